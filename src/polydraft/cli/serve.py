"""`polydraft serve`: an OpenAI-compatible server."""

import os
import re
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.help import HelpAll
from polydraft.cli.options import DEFAULT_MODEL, NoCache, Only, configured
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, check, check_threads, weights
from polydraft.config import Config, EngineConfig, ReplicaConfig, ServerConfig, setting
from polydraft.errors import InvalidInputError, PolydraftError, first_line
from polydraft.models.store.gguf_parts import model_files, model_title

if TYPE_CHECKING:
    from fastapi import FastAPI

    from polydraft.engine.asynchronous import AsyncEngine
    from polydraft.server.pool import ModelPool


class ModelChoice(NamedTuple):
    """name: that clients give.  place: as of `Engine.from_pretrained`.  draft: of its draft model.  further: of further ones."""

    name: str
    place: str
    draft: str | None = None
    further: tuple[str, ...] = ()


def model_choices(
    models: Sequence[str], models_dir: Path | None, draft_models: Sequence[str]
) -> list[ModelChoice]:
    """Those of the options --model, --models-dir and --draft-model.

    Raises:
        InvalidInputError: two models of one name, a folder without models, or a draft model of no model.

    Example:
        >>> model_choices(["small=a.gguf", "b/Big.gguf"], None, ["Big=draft.gguf"])
        [ModelChoice(name='small', place='a.gguf', draft=None, further=()), ModelChoice(name='Big', place='b/Big.gguf', draft='draft.gguf', further=())]
    """
    named = [_named(text) for text in models] + ([] if models_dir is None else _in_folder(models_dir))
    names = [name for name, _ in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInputError(
            f"two models are named {twice!r}; expected different names. Give one as --model NAME=MODEL."
        )
    drafts = dict[str, list[str]]()
    for text in draft_models:
        name, place = _draft(text, names)
        drafts.setdefault(name, []).append(place)
    choices = list[ModelChoice]()
    for name, place in named:
        first, *further = drafts.get(name) or [None]
        choices.append(ModelChoice(name, place, first, tuple(filter(None, further))))
    return choices


def model_name(place: str) -> str:
    """What clients call a model of this place.

    Example:
        >>> model_name("models/Qwen2.5-0.5B.gguf"), model_name("owner/name")
        ('Qwen2.5-0.5B', 'name')
    """
    return model_title(Path(place)) or place


def _named(text: str) -> tuple[str, str]:
    name, separator, place = text.partition("=")
    if not separator or "/" in name or Path(text).exists():
        return model_name(text), text
    if not name or not place:
        raise InvalidInputError(f"--model {text!r} was given; expected NAME=MODEL, or the model alone.")
    return name, place


def _draft(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, separator, place = text.partition("=")
    if not separator or name not in names:
        if len(names) == 1:
            return names[0], text
        raise InvalidInputError(
            f"--draft-model {text!r} was given beside the models {', '.join(names)}; expected NAME=MODEL with the name of one of them."
        )
    return name, place


def _in_folder(folder: Path) -> list[tuple[str, str]]:
    """GGUF files of a folder, and folders in it with a model of transformers."""
    if not folder.is_dir():
        raise InvalidInputError(
            f"--models-dir {str(folder)!r} was given, which is no folder; expected one with models."
        )
    paths = list(folder.iterdir())
    places = sorted([*model_files(paths), *(path for path in paths if (path / "config.json").is_file())])
    if not places:
        raise InvalidInputError(
            f"--models-dir {str(folder)!r} was given, which has no models; expected .gguf files, or folders with a config.json."
        )
    return [(model_name(str(place)), str(place)) for place in places]


@dataclass(frozen=True, kw_only=True)
class Served(Config):
    """Which models are served."""

    model: Sequence[str] = setting(
        "Target model, named as for `polydraft generate`, or NAME=TARGET; may be repeated, and each is loaded at its first request",
        list,
        (),
        unset=DEFAULT_MODEL,
        panel="Models",
    )
    models_dir: Path | None = setting(
        "Folder of further models: .gguf files and model folders", Path, panel="Models"
    )
    max_loaded: int = setting(
        "Maximum number of loaded models; the least recently used idle one leaves",
        int,
        2,
        low=1,
        panel="Models",
    )
    draft_model: Sequence[str] = setting(
        "Draft model: a smaller model with the same vocabulary, named like --model; NAME=MODEL for one of several targets; may be repeated, a path of each",
        list,
        (),
        unset="the one listed with the target, if any",
        panel="Models",
    )


@configured
def serve(
    *,
    served: Served,
    config: Annotated[EngineConfig, Only(without=("model", "draft_model"))],
    server: ServerConfig,
    replicas: ReplicaConfig,
    yes: Yes = False,
    no_cache: NoCache = False,
    help_all: HelpAll = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does."""
    choices = _choices(served, server.served_model_name)
    origins = tuple(map(_origin, server.cors))
    keys = _keys(server.api_key_file)
    listening = _bound(server.host, server.port)
    by_default = "" if served.model or served.models_dir else ", the default model"
    for choice in choices:
        typer.echo(f"serving {choice.name}: {choice.place}{by_default}", err=True)
    configs = _configs(config, choices)
    for model_config in configs:
        check(model_config)
    if replicas.replicas is not None and len(choices) > 1:
        raise InvalidInputError(
            f"--replicas was given beside {len(choices)} models; expected one. Start a server for each."
        )
    if server.otlp_endpoint is not None:
        from polydraft.server.tracing import export_to

        export_to(server.otlp_endpoint)
    agree_on_downloads(configs, yes=yes)
    name = choices[0].name
    server = server.with_(served_model_name=name, cors=origins)
    if replicas.replicas is not None:
        _replicas(listening, server, keys, configs[0], replicas)
        return

    def models() -> "AsyncEngine | ModelPool":
        if len(choices) > 1:
            return _pool([choice.name for choice in choices], configs, server, served.max_loaded)
        from polydraft.engine.asynchronous import AsyncEngine

        return AsyncEngine(build(configs[0], answers=True), max_waiting=server.max_waiting)

    _run(models, f"loading {name} ..." if len(choices) == 1 else "starting ...", server, keys, listening)


def _choices(served: Served, name: str | None) -> "list[ModelChoice]":
    """The models that are served; the first one by this name, if there is one."""
    names = list(served.model) or ([] if served.models_dir else [DEFAULT_MODEL])
    choices = model_choices(names, served.models_dir, served.draft_model)
    if name is not None:
        choices[0] = choices[0]._replace(name=name)
    return choices


def _configs(config: EngineConfig, choices: "Sequence[ModelChoice]") -> list[EngineConfig]:
    """What each model is loaded by; several have a file of prefixes each."""
    configs = [
        config.with_(model=choice.place, draft_model=choice.draft, further_draft_models=choice.further)
        for choice in choices
    ]
    if len(choices) == 1 or config.prefix_cache_file is None:
        return configs
    names = [re.sub(r"[^\w.-]", "_", choice.name) for choice in choices]
    return [
        model_config.with_(prefix_cache_file=Path(f"{config.prefix_cache_file}.{name}"))
        for model_config, name in zip(configs, names, strict=True)
    ]


def _pool(
    names: list[str], configs: list[EngineConfig], server: ServerConfig, max_loaded: int
) -> "ModelPool":
    """Models that are loaded when they are asked for."""
    from polydraft.server.pool import ModelPool, ServedModel, weight_file_bytes

    check_threads(configs[0].threads)
    models = [
        ServedModel(
            name,
            partial(build, config),
            sum(
                weight_file_bytes(place)
                for place in (config.model, config.draft_model, *config.further_draft_models)
                if place is not None
            ),
        )
        for name, config in zip(names, configs, strict=True)
    ]
    return ModelPool(models, server, max_loaded=max_loaded)


def _run(
    models: Callable[[], "AsyncEngine | ModelPool"],
    first: str,
    server: ServerConfig,
    keys: Sequence[str],
    listening: socket.socket,
) -> None:
    """Listen at once, load in a thread, and serve. first: the line while it loads."""
    import uvicorn

    from polydraft.server.starting import LAST_SECONDS, Connection, DrainingServer, Starting

    *_, address = _address(listening)
    summary = ""

    def make() -> "FastAPI":
        nonlocal summary
        with Preparation(first):
            from polydraft.engine.asynchronous import AsyncEngine
            from polydraft.errors import RequestWarning
            from polydraft.server.app import create_app

            warnings.simplefilter("ignore", RequestWarning)  # the log has it
            loaded = models()
            app = create_app(loaded, server, keys)
        if isinstance(loaded, AsyncEngine):
            built = loaded.engine.summary()
            summary = f"{server.served_model_name}{weights(built)}, drafter {built['drafter']}"
        else:
            summary = ", ".join(loaded.models)
        return app

    def fail() -> None:
        running.should_exit = True

    starting = Starting(
        make,
        ready=lambda: typer.echo(f"{address}, {summary}", err=True),
        ends=lambda: running.should_exit,
        failed=fail,
    )
    config = uvicorn.Config(
        starting,
        log_level="info" if sys.stderr.isatty() else "warning",
        timeout_graceful_shutdown=int(server.drain) + LAST_SECONDS,
        timeout_keep_alive=75,  # shorter than the timeout of clients, and they find a connection closed under their request
        server_header=False,
        http=Connection,
        ws="none",
    )
    running = DrainingServer(config, starting.drain)
    running.run(sockets=[listening])
    if starting.error is not None:
        raise starting.error


def _replicas(
    listening: socket.socket,
    server: ServerConfig,
    keys: Sequence[str],
    config: EngineConfig,
    replicas: ReplicaConfig,
) -> None:
    """Serve through Ray: in a cluster of this command until it is told to end, or in one that is there, which it leaves to it."""
    from polydraft.integrations.ray.serve import deploy, shutdown

    host, port, url = _address(listening)
    listening.close()  # Serve's proxy takes it

    def update() -> None:
        with Preparation(f"starting replicas of {server.served_model_name} ..."):
            deploy(host=host, port=port, server=server, keys=keys, **replicas.chosen() | config.chosen())
        typer.echo(f"{url}, {replicas.replicas} replicas", err=True)

    if replicas.address is not None:
        update()
        return
    signals = SimpleQueue[int]()
    renewal = getattr(signal, "SIGHUP", None)  # Windows has none
    try:
        update()
        for number in filter(None, (signal.SIGTERM, signal.SIGINT, renewal)):  # Ray took them while it began
            signal.signal(number, lambda number, _: signals.put(number))
        while signals.get() == renewal:
            try:
                update()
            except PolydraftError as error:
                typer.echo(f"the update failed, and what can goes on: {error}", err=True)
    finally:
        shutdown()


def _bound(host: str, port: int) -> socket.socket:
    """A socket on that address, before anything is loaded.

    Raises:
        InvalidInputError: it is in use, not of this machine, or not ours to take.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        if os.name != "nt":  # where it would take a port that another program has
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)  # until it is ready, clients wait
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InvalidInputError(
            f"--host {host} --port {port} were given, which cannot be listened on: {reason}. Give an address of this machine and a free port, or 0."
        ) from error
    return listening


def _address(listening: socket.socket) -> tuple[str, int, str]:
    """Host, port and URL of a socket."""
    host, port = listening.getsockname()[:2]
    return host, port, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _origin(text: str) -> str:
    """An origin as browsers send it.

    Raises:
        InvalidInputError: something else.

    Example:
        >>> _origin("https://example.org"), _origin("*")
        ('https://example.org', '*')
    """
    if text != "*" and not re.fullmatch(
        r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", text
    ):
        raise InvalidInputError(
            f"--cors {text!r} was given; expected an origin such as https://example.org, without a path, or *."
        )
    return text


def _keys(file: Path | None) -> tuple[str, ...]:
    lines = [] if file is None else file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    keys = [line.strip() for line in [*lines, os.environ.get("POLYDRAFT_API_KEY", "")] if line.strip()]
    if file is not None and not keys:
        raise InvalidInputError(f"--api-key-file {file} was given, which has no key; expected one a line.")
    return tuple(keys)
