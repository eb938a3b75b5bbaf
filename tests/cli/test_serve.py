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

from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.cli.serve import model_choices
from polydraft.models import pair
from tests.server.conftest import data_of

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
    assert "two models are named 'a'; expected different names" in refusal("--model", "a", "--model=b/a.gguf")
    assert "expected NAME=MODEL with the name of one of them" in refusal(
        "--model", "a", "--model=b", "--draft-model", "c"
    )
    assert "expected NAME=MODEL, or the model alone" in refusal("--model", "=b")
    assert "which has no models" in refusal("--models-dir", str(tmp_path))
    assert "which is no folder" in refusal("--models-dir", str(empty))
    assert "given beside 2 models; expected one" in refusal("--model", "a", "--model", "b", "--replicas", "2")
    for origin in ("not a url", "https://example.org/", "example.org", "https://EXAMPLE.org", ""):
        assert f"--cors {origin!r} was given; expected an origin such as https://example.org" in refusal(
            "--cors", origin
        )
    assert "192.0.2.1" in refusal("--host", "192.0.2.1")
    assert "Lower --max-model-len" in refusal(*SMALL, "--max-num-seqs", "100000000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "and a free port, or 0" in refusal("--port", str(taken.getsockname()[1]))


def test_a_server_that_is_told_to_end_lets_what_runs_finish():
    command = [sys.executable, "-m", "polydraft", "serve", *SMALL, "--port", "0", "--drain", "20"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "POLYDRAFT_API_KEY": "k"}
    ) as server:
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
            events = data_of(answer.iter_lines())
            assert '"text"' in next(events)
            server.send_signal(signal.SIGTERM)
            *_, last, end = events
        assert '"finish_reason":"length"' in last and end == "[DONE]"
        assert server.wait(60) == -signal.SIGTERM  # it ends as it was told to, once all is done
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        killer.cancel()


def test_models_of_options_and_of_a_folder_are_served_by_name(tmp_path):
    (tmp_path / "small.gguf").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    choices = model_choices(["one=a/b.gguf", "embedded"], tmp_path, ["small=draft.gguf"])
    assert choices == [
        ("one", "a/b.gguf", None, ()),
        ("embedded", "embedded", None, ()),
        ("folder", str(tmp_path / "folder"), None, ()),
        ("small", str(tmp_path / "small.gguf"), "draft.gguf", ()),
    ]


def test_a_server_of_several_models_loads_each_when_it_is_asked_for():
    models = [
        "--model",
        f"one={pair.draft_folder()}",
        "--model",
        f"two={pair.draft_folder()}",
        "--max-loaded",
        "1",
    ]
    command = [sys.executable, "-m", "polydraft", "serve", *models, *SMALL[2:], "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        killer = threading.Timer(200, server.kill)
        killer.start()
        lines = [""]
        while not lines[-1].startswith("http://127.0.0.1:"):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        assert lines[-1].endswith(", one, two\n")
        url = lines[-1].split("/v1")[0]
        for name in ("two", "one"):
            answer = httpx.post(
                f"{url}/v1/completions",
                json={"model": name, "prompt": "def f(", "max_tokens": 4},
                timeout=100,
            )
            assert answer.json()["model"] == name
            models = httpx.get(f"{url}/v1/models").json()["data"]
            assert {model["id"]: model["loaded"] for model in models} == {
                "one": name == "one",
                "two": name == "two",
            }
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        killer.cancel()
