"""`polydraft serve`: what it refuses in one line, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from typer.testing import CliRunner

from polydraft.cli.main import EXIT_STATUS, app
from polydraft.models import pair

SMALL = ["--model", str(pair.draft_folder()), "--drafter", "ngram", "--depth", "3", "--max-num-seqs", "2"]


def refusal(*given: str) -> str:
    found = CliRunner().invoke(app, ["serve", "--port", "0", *given])
    assert found.exit_code == EXIT_STATUS and "Traceback" not in found.stderr
    (line,) = [x for x in found.stderr.splitlines() if x.startswith("error: ")]
    return line


def test_bad_input_ends_with_one_line(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("\n")
    assert "not-a-model" in refusal("--model", "not-a-model")
    assert "could not be used" in refusal("--api-key-file", str(tmp_path / "none"))
    assert "which has no key" in refusal("--api-key-file", str(empty))
    assert "--model was given 2 times; expected it once" in refusal("--model", "a", "--model=b")
    for origin in ("not a url", "https://example.org/", "example.org", "https://EXAMPLE.org", ""):
        assert f"--cors {origin!r} was given; expected an origin such as https://example.org" in refusal("--cors", origin)
    assert "192.0.2.1" in refusal("--host", "192.0.2.1")
    assert "Lower max_model_len" in refusal(*SMALL, "--max-num-seqs", "100000000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Give a free port" in refusal("--port", str(taken.getsockname()[1]))


def test_a_server_that_is_told_to_end_lets_what_runs_finish():
    command = [sys.executable, "-m", "polydraft", "serve", *SMALL, "--port", "0", "--drain", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "POLYDRAFT_API_KEY": "k"}) as server:
        killer = threading.Timer(200, server.kill)
        killer.start()
        lines = []
        while not (lines and lines[-1].startswith("http://127.0.0.1:")):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        url = lines[-1].split("/v1")[0]
        body = {"prompt": "def f(", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=200
        ) as answer:
            events = answer.iter_lines()
            assert '"text"' in next(events)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert '"finish_reason":"length"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert server.wait(60) == -signal.SIGTERM  # it ends as it was told to, once all is done
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        killer.cancel()
