"""`polydraft serve`: an OpenAI-compatible server."""

import os
import re
import signal
import socket
import sys
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.chat import OFFERED
from polydraft.cli.progress import Preparation
from polydraft.cli.served_models import EMBEDDED, ModelChoice, model_choices
from polydraft.cli.start import build, check_threads, weights
from polydraft.errors import InvalidInputError, PolydraftError

if TYPE_CHECKING:
    from polydraft.engine.asynchronous import AsyncEngine
    from polydraft.server.app import Settings
    from polydraft.server.pool import ModelPool

__all__ = ["serve"]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


def serve(
    model: Annotated[
        list[str] | None,
        given.models(
            "Target, named as for `polydraft generate`, or NAME=TARGET; several are loaded when they are asked for. Default: the chat model where it was fetched, else the embedded pair."
        ),
    ] = None,
    models_dir: Annotated[
        Path | None, given.models("Folder whose .gguf files and model folders are served, beside those of --model.")
    ] = None,
    max_loaded: Annotated[
        int, given.models("Models that are loaded at a time; the least recently used one leaves when it is idle.", min=1)
    ] = 2,
    draft_model: Annotated[
        list[str] | None,
        given.models("A smaller model with the same vocabulary, named alike; NAME=MODEL for one of several targets."),
    ] = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    offer: Annotated[list[str] | None, given.drafts("A further drafter that requests may name; may be repeated.")] = None,
    depth: given.Depth = None,
    num_paths: given.NumPaths = None,
    head: given.Head = None,
    decoding: given.Decoding = None,
    amateur: given.Amateur = None,
    alpha: given.Alpha = None,
    beta: given.Beta = None,
    decoding_option: given.DecodingOption = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    backend: given.Backend = "auto",
    quantization: given.Quantization = None,
    exact: given.Exact = False,
    cache_dtype: given.CacheDtype = None,
    threads: given.PassThreads = None,
    tensor_parallel: given.TensorParallel = None,
    max_model_len: Annotated[int | None, given.models("Longest prompt plus output, in tokens.")] = None,
    max_num_seqs: Annotated[int, given.models("Samples that run at the same time; each has a place in the cache.", min=1)] = 8,
    prefix_cache_bytes: Annotated[
        int | None,
        given.models(
            "Most memory for KV cache entries of finished texts, beside the slots, in bytes; default: an eighth of the free memory, at most 8 GiB.",
            min=0,
        ),
    ] = None,
    host: Annotated[str, given.server("Address to listen on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, given.server("Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, given.server("Name that clients give; default: the model's.")] = None,
    api_key_file: Annotated[
        Path | None,
        given.server("File with API keys, one a line; POLYDRAFT_API_KEY is one more. Without any, none is asked for."),
    ] = None,
    cors: Annotated[list[str] | None, given.server("Origin whose pages may call; may be repeated.")] = None,
    max_waiting: Annotated[int, given.server("Samples that may wait for a place; more are told to come again.", min=1)] = 256,
    max_body: Annotated[int, given.server("Bytes of a request, at most.", min=1)] = 4 << 20,
    max_choices: Annotated[int, given.server("Prompts times n of a request, at most.", min=1)] = 64,
    timeout: Annotated[float, given.server("Seconds of a request, at most.", min=0.1)] = 600,
    reasoning: Annotated[
        bool, given.server("Whether chats tell what models think between <think> and </think> apart, as reasoning_content.")
    ] = True,
    otlp_endpoint: Annotated[
        str | None,
        given.server("Collector of OpenTelemetry spans, such as http://localhost:4318/v1/traces; needs the extra tracing."),
    ] = None,
    drain: Annotated[float, given.server("Seconds that what runs has when the server is told to end.", min=0)] = 30,
    replicas: Annotated[
        int | None, given.replicas("Engines behind one address, each a process of its own, through Ray Serve.", min=1)
    ] = None,
    max_replicas: Annotated[int | None, given.replicas("As many as there may become under load.", min=1)] = None,
    cpus: Annotated[float | None, given.replicas("Of each replica, fractions too; an equal share without it.", min=0)] = None,
    gpus: Annotated[float, given.replicas("Of each replica, fractions too.", min=0)] = 0,
    address: Annotated[
        str | None,
        given.replicas("Of a Ray cluster, which keeps the server when this command ends; one on this machine without it."),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does; without --model the small chat model where it was fetched, else (or with --model embedded) the embedded pair."""
    choices = model_choices(model or ([] if models_dir else [_default() or EMBEDDED]), models_dir, draft_model or ())
    if served_model_name is not None:
        choices[0] = choices[0]._replace(name=served_model_name)
    origins = tuple(map(_origin, cors or ()))
    for choice in choices:
        typer.echo(f"serving {choice.name}: {_about(bool(model or models_dir), choice.place)}", err=True)
    name, place, draft = choices[0]
    if otlp_endpoint is not None:
        from polydraft.server.tracing import export_to

        export_to(otlp_endpoint)
    listening = _bound(host, port)
    settings: dict[str, Any] = {"model": name, "keys": _keys(api_key_file), "cors": origins, "most_body": max_body}
    settings |= {"most_choices": max_choices, "seconds": timeout, "drain": drain, "reasoning": reasoning}
    options: dict[str, Any] = {
        "drafter": drafter,
        "offered": tuple(offer or ()),
        "verifier": verifier,
        "depth": depth,
        "num_paths": num_paths,
        "decoding": decoding,
        "decoding_options": given.decoding_options(decoding_option, amateur=amateur, alpha=alpha, beta=beta),
    }
    options |= {
        "drafter_options": {} if head is None else {"weights": head},
        "dtype": dtype,
        "device": device,
        "backend": backend,
    }
    options |= {
        "quantization": quantization,
        "activations": given.activations(exact),
        "cache_dtype": cache_dtype,
        "threads": threads,
        "tensor_parallel": tensor_parallel,
    }
    options |= {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "prefix_cache_bytes": prefix_cache_bytes}
    if replicas is not None:
        if len(choices) > 1:
            raise InvalidInputError(f"--replicas was given beside {len(choices)} models; expected one. Start a server for each.")
        scale = {"replicas": replicas, "max_replicas": max_replicas, "cpus": cpus, "gpus": gpus, "max_waiting": max_waiting}
        _replicas(name, listening, address, settings, {"model": place, "draft_model": draft, **scale, **options})
        return
    if given_alone := [
        o for o, v in (("--max-replicas", max_replicas), ("--address", address), ("--cpus", cpus), ("--gpus", gpus)) if v
    ]:
        raise InvalidInputError(f"{given_alone[0]} was given without --replicas, which it is about. Give both.")
    with Preparation(f"loading {name} ..." if len(choices) == 1 else "starting ..."):
        _check_installed()
        from polydraft.engine.asynchronous import AsyncEngine
        from polydraft.server.app import Settings

        if len(choices) == 1:
            models: AsyncEngine | ModelPool = AsyncEngine(build(place, draft, **options), max_waiting=max_waiting)
        else:
            models = _pool(choices, options, Settings(**settings), max_loaded=max_loaded, max_waiting=max_waiting)
    _run(models, Settings(**settings), listening)


def _pool(choices: "list[ModelChoice]", options: dict[str, Any], settings: "Settings", **limits: int) -> "ModelPool":
    """Models that are loaded when they are asked for."""
    from polydraft.server.pool import ModelPool, ServedModel, weight_file_bytes

    check_threads(options["threads"])
    models = [
        ServedModel(
            choice.name,
            partial(build, choice.place, choice.draft, **options),
            sum(weight_file_bytes(place) for place in (choice.place, choice.draft) if place is not None),
        )
        for choice in choices
    ]
    return ModelPool(models, settings, **limits)


def _run(models: "AsyncEngine | ModelPool", settings: "Settings", listening: socket.socket) -> None:
    import uvicorn

    from polydraft.engine.asynchronous import AsyncEngine
    from polydraft.errors import RequestWarning
    from polydraft.server.app import create_app
    from polydraft.server.connection import Connection

    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if isinstance(models, AsyncEngine):
        built = models.engine.summary()
        typer.echo(f"{address}, {settings.model}{weights(built)}, drafter {built['drafter']}", err=True)
    else:
        typer.echo(f"{address}, {', '.join(models.models)}", err=True)
    config = uvicorn.Config(
        create_app(models, settings),
        log_level="info" if sys.stderr.isatty() else "warning",
        timeout_graceful_shutdown=max(1, int(settings.drain)),
        timeout_keep_alive=75,  # shorter than what clients keep, and they find a connection closed under their request
        server_header=False,
        http=Connection,
        ws="none",
    )
    warnings.simplefilter("ignore", RequestWarning)  # the log has it
    uvicorn.Server(config).run(sockets=[listening])


def _replicas(name: str, listening: socket.socket, address: str | None, settings: dict[str, Any], asked: dict[str, Any]) -> None:
    """Serve through Ray: in a cluster of this command until it is told to end, or in one that is there, which it leaves to it."""
    _check_installed()
    from polydraft.integrations.ray.serve import deploy, shutdown
    from polydraft.server.app import Settings

    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    listening.close()  # Serve's proxy takes it

    def update() -> None:
        with Preparation(f"starting replicas of {name} ..."):
            deploy(host=host, port=port, address=address, settings=Settings(**settings), **asked)
        typer.echo(f"{url}, {asked['replicas']} replicas", err=True)

    if address is not None:
        update()
        return
    signals = SimpleQueue[int]()
    try:
        update()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # Ray took them while it began
            signal.signal(number, lambda number, _: signals.put(number))
        while signals.get() == signal.SIGHUP:
            try:
                update()
            except PolydraftError as error:
                typer.echo(f"the update failed, and what can goes on: {error}", err=True)
    finally:
        shutdown()


def _default() -> str | None:
    from polydraft.models.hub import MODELS, cached

    return OFFERED if cached(MODELS[OFFERED]) is not None else None


def _about(named: bool, place: str | None) -> str:
    """A model in words. named: whether an option names it."""
    text = place or "the pair of small models inside the package"
    if named:
        return text
    return "no --model was given" + (
        "; the chat model was fetched before" if place else f", and no chat model was fetched: {text}"
    )


def _bound(host: str, port: int) -> socket.socket:
    """A socket on that address, before anything is loaded.

    Raises:
        InvalidInputError: it is in use, not of this machine, or not ours to take.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)  # until it is ready, clients wait
    except OSError as error:
        raise InvalidInputError(
            f"--host {host} --port {port} were given, which cannot be listened on: {error.strerror}. Give a free port of this machine, or 0."
        ) from error
    return listening


def _origin(text: str) -> str:
    """An origin as browsers send it.

    Raises:
        InvalidInputError: something else.

    Example:
        >>> _origin("https://example.org"), _origin("*")
        ('https://example.org', '*')
    """
    if text != "*" and not ORIGIN.fullmatch(text):
        raise InvalidInputError(
            f"--cors {text!r} was given; expected an origin such as https://example.org, without a path, or *."
        )
    return text


def _keys(file: Path | None) -> tuple[str, ...]:
    lines = [] if file is None else file.read_text(encoding="utf-8", errors="replace").splitlines()
    keys = [line.strip() for line in [*lines, os.environ.get("POLYDRAFT_API_KEY", "")] if line.strip()]
    if file is not None and not keys:
        raise InvalidInputError(f"--api-key-file {file} was given, which has no key; expected one a line.")
    return tuple(keys)


def _check_installed() -> None:
    missing = next((name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None), None)
    if missing:
        raise InvalidInputError(f"{missing} is not installed; install the extra: pip install 'polydraft[server]'.")
