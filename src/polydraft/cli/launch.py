"""`polydraft launch`: a coding agent on a local model. The server is started where none runs, and ends with the agent."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import typer

from polydraft.cli.agents import AGENTS, KEY, Endpoint
from polydraft.cli.downloads import Yes, agree_on_downloads, listed_models
from polydraft.cli.progress import Preparation
from polydraft.config import EngineConfig
from polydraft.errors import InvalidInputError, ModelLoadError

AGENT_MODEL = "qwen2.5-coder-1.5b-instruct"
"""Of a server that is started: the smallest listed model that was trained on calls of tools and code."""
AGENT_CONTEXT = 32_768
"""Of that model, in tokens."""
AGENT_OPTIONS = ("--max-num-seqs", "2", "--timeout", "3600")
"""Of a server that is started: an agent asks for one thing, or two, and for long."""


def launch(
    agent: Annotated[str, typer.Argument(help=f"Which one: {', '.join(AGENTS)}.", metavar="AGENT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the agent is given, behind --.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Target model, named as for `polydraft generate`; of a server that runs, a model of it. Default: {AGENT_MODEL}, or the first of the server.", rich_help_panel="Models")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Draft model of a server that is started. Default: the one listed with the target, if any.", rich_help_panel="Models")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context of a server that is started, in tokens. Default: the model's own.", min=1, rich_help_panel="Models")] = None,
    url: Annotated[str, typer.Option(help="Address of the server; one of this machine is started where none runs.", rich_help_panel="Server")] = "http://127.0.0.1:8000",
    show: Annotated[bool, typer.Option("--print", help="Variables and command of the agent, and nothing is started.")] = False,
    yes: Yes = False,
) -> None:  # fmt: skip
    """Run a coding agent (Claude Code, Codex, qwen-code, opencode, aider) on a local model."""
    if agent not in AGENTS:
        raise InvalidInputError(f"the agent {agent!r} was given; expected one of {', '.join(AGENTS)}.")
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("POLYDRAFT_API_KEY", KEY)
    if show:
        running = _models(url, key)
        if running:
            to = _endpoint(url, key, _named(running, model, url))
        else:
            to = _to_start(url, key, model, max_model_len)
        _print_command(*_agent_command(agent, to, arguments or ()))
        return
    _check_program(agent)
    with _server(url, key, model, draft_model, max_model_len, yes=yes) as to:
        if to.context is not None and to.context < AGENTS[agent].least:
            typer.echo(_too_short(agent, to), err=True)
        status = _run(*_agent_command(agent, to, arguments or ()))
    if status:
        raise typer.Exit(status if status > 0 else 128 - status)


def _check_program(agent: str) -> None:
    """Refuse an agent that is not installed."""
    chosen = AGENTS[agent]
    if shutil.which(chosen.program) is None:
        raise InvalidInputError(
            f"the program {chosen.program!r} is not there; expected it on the PATH. Install it: {chosen.install}"
        )


def _print_command(variables: Mapping[str, str], command: Sequence[str]) -> None:
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(shlex.join(command))


def _run(variables: Mapping[str, str], command: Sequence[str]) -> int:
    """The agent's exit status. Ctrl-C is the agent's while it runs."""
    with subprocess.Popen(command, env={**os.environ, **variables}) as running:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return running.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def _agent_command(agent: str, to: Endpoint, more: Sequence[str]) -> tuple[Mapping[str, str], list[str]]:
    """Variables and command."""
    chosen = AGENTS[agent]
    return {**chosen.variables(to), **_without_proxy(to.url)}, [chosen.program, *chosen.arguments(to), *more]


def _without_proxy(url: str) -> dict[str, str]:
    """Variables by which an agent asks a server of this machine itself, and not the proxy that the environment has."""
    proxied = any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"))
    if not proxied:
        return {}
    from polydraft.files.urls import is_of_this_machine

    if not is_of_this_machine(url):
        return {}
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = ",".join(filter(None, (others, urlsplit(url).hostname)))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _too_short(agent: str, to: Endpoint) -> str:
    return (
        f"warning: {to.model} has a context of {to.context:,} tokens; with the instructions and tools of {agent} it needs {AGENTS[agent].least:,}. "
        "Give a --model with a longer one, or a larger --max-model-len."
    )


def _to_start(url: str, key: str, model: str | None, max_model_len: int | None) -> Endpoint:
    """What a server will be that does not run yet."""
    return Endpoint(
        url, model or AGENT_MODEL, key, max_model_len or (AGENT_CONTEXT if model is None else None)
    )


def _endpoint(url: str, key: str, model: Mapping[str, Any]) -> Endpoint:
    """One of a server's models; the context of one that is not loaded is asked for, which loads it."""
    context = model.get("max_model_len")
    if context is None and model.get("loaded") is False:
        context = _asked(f"{url}/tokenize", key, {"model": model["id"], "prompt": "x"}).get("max_model_len")
    return Endpoint(url, model["id"], key, context if isinstance(context, int) else None)


def _named(models: Sequence[Mapping[str, Any]], name: str | None, url: str) -> Mapping[str, Any]:
    """The model of a name, or the first.

    Raises:
        InvalidInputError: the server has none of this name.
    """
    names = [model["id"] for model in models]
    if name is not None and name not in names:
        raise InvalidInputError(
            f"--model {name!r} was given; the server at {url} has {', '.join(names)}. Name one, or give another --url."
        )
    return models[0 if name is None else names.index(name)]


@contextmanager
def _server(
    url: str, key: str, model: str | None, draft_model: str | None, max_model_len: int | None, *, yes: bool
) -> Iterator[Endpoint]:
    """A model of a server that is ready: of the one that runs there, or of one that is started and ends with the block."""
    models = _models(url, key)
    if models:
        yield _endpoint(url, key, _named(models, model, url))
        return
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise InvalidInputError(
            f"--url {url} was given, where no server answers; expected one that runs, or an address of this machine."
        )
    _fetch(model or AGENT_MODEL, draft_model, yes=yes)
    command = [
        sys.executable,
        "-m",
        "polydraft",
        "serve",
        "--host",
        parts.hostname,
        "--port",
        str(parts.port or 80),
    ]
    command += ["--model", model or AGENT_MODEL, *AGENT_OPTIONS]
    command += ["--draft-model", draft_model] if draft_model else []
    command += ["--max-model-len", str(max_model_len)] if max_model_len else []
    with tempfile.NamedTemporaryFile("w+", prefix="polydraft-serve-", suffix=".log") as log:
        typer.echo(f"starting a server at {url}, whose log is {log.name}", err=True)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        ) as server:
            try:
                yield _endpoint(url, key, _ready(server, url, key, Path(log.name)))
            finally:
                server.terminate()


def _fetch(model: str, draft_model: str | None, *, yes: bool) -> None:
    """Fetch what is listed and not here, after a question in a terminal: the server that is started has none."""
    from polydraft.models.store.catalogue import MODELS, fetch

    config = EngineConfig(model=model, draft_model=draft_model)
    agree_on_downloads([config], yes=yes)
    for name in listed_models(config):
        fetch(MODELS[name])


def _ready(server: "subprocess.Popen[bytes]", url: str, key: str, log: Path) -> Mapping[str, Any]:
    """Its model, once it takes requests."""
    with Preparation("loading the model ...") as preparation:
        while server.poll() is None:
            if _answers(f"{url}/ready") and (models := _models(url, key)):
                preparation.say(f"{models[0]['id']} at {url}/v1")
                return models[0]
            time.sleep(0.2)
    log_lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    raise ModelLoadError(f"the server did not start: {log_lines[-1].removeprefix('error: ')}")


def _models(url: str, key: str) -> list[dict[str, Any]] | None:
    """The models that a server has, each with its name under "id"; None where nothing listens.

    Raises:
        InvalidInputError: something else listens there, or the key does not open.
    """
    try:
        models = _asked(f"{url}/v1/models", key)["data"]
        return [{**model, "id": str(model["id"])} for model in models]
    except HTTPError as error:
        advice = "Set POLYDRAFT_API_KEY." if error.code == 401 else "Give another --url."
        raise InvalidInputError(
            f"--url {url} was given, which answers with status {error.code} to /v1/models. {advice}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"--url {url} was given, where something else than a server of models answers. Give another."
        ) from error
    except (URLError, OSError):
        return None


def _opened(url: str, data: bytes | None, headers: dict[str, str], seconds: float) -> Any:
    """The response to a request."""
    from urllib.request import Request

    from polydraft.files.urls import opened

    return opened(Request(url, data, headers), seconds)


def _asked(url: str, key: str, body: Mapping[str, Any] | None = None) -> Any:
    """What a path of a server says. body: is posted, for which a model may have to be loaded."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with _opened(url, data, headers, 10 if body is None else 600) as response:
        return json.load(response)


def _answers(url: str) -> bool:
    try:
        with _opened(url, None, {}, 10) as response:
            return response.status == 200
    except OSError:
        return False
