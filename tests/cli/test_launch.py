"""`polydraft launch`: agents are told of the server, which is started where none runs and ends with them."""

import json
import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polydraft.check.remote import Completions
from polydraft.cli.agents import AGENTS
from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.main import app
from polydraft.config import ServerConfig
from polydraft.models import pair
from polydraft.models.store.catalogue import MODELS
from polydraft.server.pool import ModelPool, ServedModel
from tests.server.conftest import serving, serving_models, small_engine

launch = import_module("polydraft.cli.launch")

AGENT = """#!{python}
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"]
defaults = os.environ.get("QWEN_CODE_SYSTEM_DEFAULTS_PATH")
settings = json.load(open(defaults)) if defaults else None
with urllib.request.urlopen(url + "/models") as response:
    names = [model["id"] for model in json.load(response)["data"]]
print(json.dumps({{"url": url, "model": os.environ["OPENAI_MODEL"], "names": names, "arguments": sys.argv[1:], "settings": settings}}))
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
def test_an_agent_is_run_on_the_server_that_runs_whatever_the_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):  # where nothing listens
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(small_engine()) as served:
        told, said = launched("--url", f"{served.url}/v1", "--", "-p", "hello there")
        assert Completions(served.url, served.engine.tokenizer).name == "small"
    assert told["settings"] == {"model": {"generationConfig": {"contextWindowSize": 512}}}
    assert "small has a context of 512 tokens" in said and "--max-model-len" in said
    assert told["url"] == f"{served.url}/v1" and told["model"] == "small"
    assert told["arguments"] == ["--auth-type", "openai", "--model", "small", "-p", "hello there"]


@pytest.mark.usefixtures("installed")
def test_a_server_is_started_where_none_runs_and_ends_with_the_agent():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told, said = launched(
        "--url", f"http://127.0.0.1:{port}", "--model", str(pair.draft_folder()), "--max-model-len", "700"
    )
    assert told["settings"] == {"model": {"generationConfig": {"contextWindowSize": 700}}}
    assert told["names"] == [told["model"]] == ["draft"] and "starting a server" in said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("agent", AGENTS)
def test_what_an_agent_is_told_is_printed(agent):
    found = CliRunner().invoke(
        app, ["launch", agent, "--model", "m", "--url", "http://127.0.0.1:9", "--print"]
    )
    assert found.exit_code == 0 and "http://127.0.0.1:9" in found.stdout
    *variables, command = found.stdout.splitlines()
    assert command.startswith(AGENTS[agent].program) and all(line.startswith("export ") for line in variables)


CONTEXT = {
    "claude": "CLAUDE_CODE_MAX_CONTEXT_TOKENS=20000",
    "codex": "model_context_window=20000",
    "qwen": "QWEN_CODE_SYSTEM_DEFAULTS_PATH=",
    "opencode": '"context": 20000',
    "aider": "--model-metadata-file",
}


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_is_told_the_context(agent):
    asked = ["launch", agent, "--url", "http://127.0.0.1:9", "--print"]
    told = CliRunner().invoke(app, [*asked, "--model", "m", "--max-model-len", "20000"]).stdout
    assert CONTEXT[agent] in told
    for path in re.findall(r"[^=\s]+\.json", told):
        assert "20000" in Path(path).read_text() or '"max_input_tokens": 17500' in Path(path).read_text()
    assert CONTEXT[agent] not in CliRunner().invoke(app, [*asked, "--model", "m"]).stdout  # nobody knows it


def test_the_model_of_an_agent_is_one_that_it_can_work_with():
    listed = MODELS[launch.AGENT_MODEL]
    assert "code" in listed.about and listed.draft is not None
    assert (
        max(agent.least for agent in AGENTS.values()) < launch.AGENT_CONTEXT
        and min(a.least for a in AGENTS.values()) >= 16_384
    )
    told = CliRunner().invoke(app, ["launch", "claude", "--url", "http://127.0.0.1:9", "--print"]).stdout
    assert (
        f"--model {listed.name}" in told and f"CLAUDE_CODE_MAX_CONTEXT_TOKENS={launch.AGENT_CONTEXT}" in told
    )


def test_the_context_of_a_model_that_is_not_loaded_is_asked_for():
    models = [ServedModel(name, small_engine) for name in ("one", "two")]
    config = ServerConfig()
    with serving_models(ModelPool(models, config), config) as served:
        to = launch._endpoint(
            served.url, "none", launch._named(launch._models(served.url, "none") or [], "two", served.url)
        )
        assert (to.model, to.context) == ("two", 512)


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
    assert "the server did not start" in refusal(
        "qwen", "--url", f"http://127.0.0.1:{port}", "--model", "not-a-model"
    )
