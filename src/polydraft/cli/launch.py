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
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

from polydraft.cli.agents import AGENTS, KEY
from polydraft.cli.options import DEFAULT_MODEL
from polydraft.cli.progress import Preparation
from polydraft.errors import InvalidInputError, ModelLoadError

__all__ = ["launch"]


def launch(
    agent: Annotated[str, typer.Argument(help=f"Which one: {', '.join(AGENTS)}.", metavar="AGENT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the agent is given, behind --.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Target model, named as for `polydraft generate`; of a server that runs, a model of it. Default: {DEFAULT_MODEL}, or the first of the server.", rich_help_panel="Models")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Draft model of a server that is started. Default: the one listed with the target, if any.", rich_help_panel="Models")] = None,
    url: Annotated[str, typer.Option(help="Address of the server; one of this machine is started where none runs.", rich_help_panel="Server")] = "http://127.0.0.1:8000",
    show: Annotated[bool, typer.Option("--print", help="Variables and command of the agent, and nothing is started.")] = False,
) -> None:  # fmt: skip
    """Run a coding agent (Claude Code, Codex, qwen-code, opencode, aider) on a local model."""
    if agent not in AGENTS:
        raise InvalidInputError(f"the agent {agent!r} was given; expected one of {', '.join(AGENTS)}.")
    url, key = url.rstrip("/").removesuffix("/v1"), os.environ.get("POLYDRAFT_API_KEY", KEY)
    if show:
        variables, command = _agent_command(agent, url, model or DEFAULT_MODEL, key, arguments or ())
        for name, value in variables.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        typer.echo(shlex.join(command))
        return
    if shutil.which(AGENTS[agent].program) is None:
        raise InvalidInputError(
            f"the program {AGENTS[agent].program!r} is not there; expected it on the PATH. Install it: {AGENTS[agent].install}"
        )
    with _server(url, key, model, draft_model) as name:
        variables, command = _agent_command(agent, url, name, key, arguments or ())
        with subprocess.Popen(command, env={**os.environ, **variables}) as running:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the agent's
            try:
                status = running.wait()
            finally:
                signal.signal(signal.SIGINT, before)
    if status:
        raise typer.Exit(status if status > 0 else 128 - status)


def _agent_command(agent: str, url: str, model: str, key: str, more: Sequence[str]) -> tuple[Mapping[str, str], list[str]]:
    """Variables and command."""
    chosen = AGENTS[agent]
    return chosen.variables(url, model, key), [chosen.program, *chosen.arguments(url, model), *more]


@contextmanager
def _server(url: str, key: str, model: str | None, draft_model: str | None) -> Iterator[str]:
    """The name of a model of a server that is ready: of the one that runs there, or of one that is started and ends with the block."""
    names = _models(url, key)
    if names is not None:
        if model is not None and model not in names:
            raise InvalidInputError(
                f"--model {model!r} was given; the server at {url} has {', '.join(names)}. Name one, or give another --url."
            )
        yield model or names[0]
        return
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise InvalidInputError(
            f"--url {url} was given, where no server answers; expected one that runs, or an address of this machine."
        )
    command = [sys.executable, "-m", "polydraft", "serve", "--host", parts.hostname, "--port", str(parts.port or 80)]
    command += ["--model", model or DEFAULT_MODEL] + (["--draft-model", draft_model] if draft_model else [])
    with tempfile.NamedTemporaryFile("w+", prefix="polydraft-serve-", suffix=".log") as log:
        typer.echo(f"starting a server at {url}, whose log is {log.name}", err=True)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True) as server:
            try:
                yield _ready(server, url, key, Path(log.name))[0]
            finally:
                server.terminate()


def _ready(server: "subprocess.Popen[bytes]", url: str, key: str, log: Path) -> list[str]:
    """Names of its models, once it takes requests."""
    with Preparation("loading the model ...") as preparation:
        while server.poll() is None:
            if _answers(f"{url}/ready") and (names := _models(url, key)):
                preparation.say(f"{names[0]} at {url}/v1")
                return names
            time.sleep(0.2)
    log_lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    raise ModelLoadError(f"the server did not start: {log_lines[-1].removeprefix('error: ')}")


def _models(url: str, key: str) -> list[str] | None:
    """Names of the models that a server has; None where nothing listens.

    Raises:
        InvalidInputError: something else listens there, or the key does not open.
    """
    try:
        with urlopen(Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}), timeout=10) as response:
            return [model["id"] for model in json.load(response)["data"]]
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


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=10) as response:
            return response.status == 200
    except OSError:
        return False
