"""`polydraft launch`: agents are told of the server, which is started where none runs and ends with them."""

import json
import os
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polydraft.cli.agents import AGENTS
from polydraft.cli.main import EXIT_STATUS, app
from polydraft.models import pair
from tests.server.conftest import serving, small_engine

AGENT = """#!{python}
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"]
with urllib.request.urlopen(url + "/models") as response:
    names = [model["id"] for model in json.load(response)["data"]]
print(json.dumps({{"url": url, "model": os.environ["OPENAI_MODEL"], "names": names, "arguments": sys.argv[1:]}}))
sys.exit(7)
"""


def refusal(*given):
    found = CliRunner().invoke(app, ["launch", *given])
    assert found.exit_code == EXIT_STATUS and "Traceback" not in found.stderr
    return found.stderr


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A program in the place of qwen-code, which says what it was told."""
    program = tmp_path / "qwen"
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def launched(*given):
    command = [sys.executable, "-m", "polydraft", "launch", "qwen", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 7, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.usefixtures("installed")
def test_an_agent_is_run_on_the_server_that_runs():
    with serving(small_engine()) as served:
        told, _ = launched("--url", f"{served.url}/v1", "--", "-p", "hello there")
    assert told["url"] == f"{served.url}/v1" and told["model"] == "small"
    assert told["arguments"] == ["--auth-type", "openai", "--model", "small", "-p", "hello there"]


@pytest.mark.usefixtures("installed")
def test_a_server_is_started_where_none_runs_and_ends_with_the_agent():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told, said = launched("--url", f"http://127.0.0.1:{port}", "--model", str(pair.draft_folder()))
    assert told["names"] == [told["model"]] == ["draft"] and "starting a server" in said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("agent", AGENTS)
def test_what_an_agent_is_told_is_printed(agent):
    found = CliRunner().invoke(app, ["launch", agent, "--model", "m", "--url", "http://127.0.0.1:9", "--print"])
    assert found.exit_code == 0 and "http://127.0.0.1:9" in found.stdout
    *variables, command = found.stdout.splitlines()
    assert command.startswith(AGENTS[agent].program) and all(line.startswith("export ") for line in variables)


def test_what_cannot_be_launched_is_refused(monkeypatch, tmp_path):
    assert "expected one of claude, codex" in refusal("emacs")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm install -g @openai/codex" in refusal("codex")


@pytest.mark.usefixtures("installed")
def test_servers_that_do_not_fit_are_refused():
    assert "where no server answers" in refusal("qwen", "--url", "https://127.0.0.1:9")
    with serving(small_engine(), keys=["k"]) as served:
        assert "Set POLYDRAFT_API_KEY" in refusal("qwen", "--url", served.url)
    with serving(small_engine()) as served:
        assert "has small. Name one" in refusal("qwen", "--url", served.url, "--model", "other")
        assert "status 404" in refusal("qwen", "--url", f"{served.url}/page")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "the server did not start" in refusal("qwen", "--url", f"http://127.0.0.1:{port}", "--model", "not-a-model")
