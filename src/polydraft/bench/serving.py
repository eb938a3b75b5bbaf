"""Load figures: what streams of one server get at the same time, plain and with drafts, beside llama.cpp's server and vLLM's.

A closed loop: so many clients, each of which asks anew when its answer is whole, over the loopback device, on the machine that serves.

first     from the request to the first event of its stream
between   from one event to the next of a stream; an event has what one round kept, so one token where nothing was drafted
tokens/s  of all streams together, as the servers count them in `usage`
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from polydraft.errors import InvalidInputError, PolydraftError

__all__ = ["Load", "answer", "load", "markdown", "run", "serving"]

STREAMS = 1, 4, 16, 64
CONTEXT = 512
"""Tokens of each stream's place in a cache, on all servers."""
SECONDS = 300.0
"""Of one request, at most."""
CODE = ("def {}(a, b):\n", "class {}:\n    def __init__(self):\n", "import os\n\n\ndef {}(path):\n")
CHAT = ("How does {} work?", "Write a short story about {}.", "What should I know of {}?")
TOPICS = [
    "bread",
    "rain",
    "tides",
    "bees",
    "glass",
    "maps",
    "salt",
    "clocks",
    "trains",
    "wool",
    "kites",
    "moss",
    "tea",
    "ink",
    "stars",
    "rust",
]


@dataclass
class Load:
    """What so many streams of one server took. first, between: seconds, each.  tokens: of all.  seconds: from the first request to the last event."""

    server: str
    streams: int
    first: list[float] = field(default_factory=list[float])
    between: list[float] = field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """In milliseconds and tokens a second.

        Example:
            >>> Load("ours", 1, [0.1, 0.3], [0.01], tokens=30, seconds=1.5).figures()["first_p99_ms"]
            300.0
        """
        row: dict[str, Any] = {"server": self.server, "streams": self.streams, "tokens": self.tokens, "seconds": self.seconds}
        for name in ("first", "between"):
            values = sorted(asdict(self)[name]) or [0.0]
            for share in (50, 99):
                row[f"{name}_p{share}_ms"] = 1e3 * values[min(len(values) * share // 100, len(values) - 1)]
        return row | {"tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0}


async def answer(url: str, path: str, body: Mapping[str, Any]) -> tuple[float, list[float], list[dict[str, Any]]]:
    """One streamed answer: when it was asked for, when each event came, and the events.

    Raises:
        PolydraftError: another status than 200, or a stream that breaks off.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        began, came, events = perf_counter(), list[float](), list[dict[str, Any]]()
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise PolydraftError(
                f"{url}{path} answered {status.decode(errors='replace').strip()}: {(await reader.read(2000)).decode(errors='replace')[-500:]}"
            )
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return began, came, events
            if line.startswith(b"data: "):
                came.append(perf_counter())
                events.append(json.loads(line[6:]))
        raise PolydraftError(f"a stream of {url}{path} broke off after {len(events)} events.")
    finally:
        writer.close()


async def load(name: str, url: str, prompts: Sequence[str], *, streams: int, max_tokens: int, **asked: Any) -> Load:
    """So many clients at a time, until each prompt is answered. asked: further fields of a request."""
    load_result, waiting_prompts = Load(name, streams), list(prompts)

    async def client() -> None:
        while waiting_prompts:
            body = {
                "prompt": waiting_prompts.pop(),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            body |= {"stream_options": {"include_usage": True}, **asked}
            began, came, events = await asyncio.wait_for(answer(url, "/v1/completions", body), SECONDS)
            texts = [at for at, event in zip(came, events, strict=True) if event.get("choices")]
            load_result.first.append(texts[0] - began)
            load_result.between += [b - a for a, b in pairwise(texts)]
            load_result.tokens += next(e["usage"]["completion_tokens"] for e in reversed(events) if e.get("usage"))

    start = perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    load_result.seconds = perf_counter() - start
    return load_result


class Served(NamedTuple):
    """A server's address, and its process."""

    url: str
    pid: int


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A `polydraft serve` of its own on a free port."""
    command = [sys.executable, "-m", "polydraft", "serve", "--port", "0", "--drain", "1", *arguments]
    with TemporaryFile("w+") as output:  # a pipe that nobody reads would fill
        server = subprocess.Popen(command, stderr=output)
        try:
            url = _started(server, output)
            asyncio.run(_ready(url, "/ready", server, output))
            yield Served(url, server.pid)
        finally:
            server.terminate()
            server.wait(30)


def _started(server: subprocess.Popen[bytes], said: IO[str]) -> str:
    """The address that a server tells, once it listens."""
    while True:
        ended = server.poll() is not None
        said.seek(0)
        lines = said.read().splitlines()
        address = next((line for line in lines if line.startswith("http://")), None)
        if address is not None:
            return address.partition("/v1")[0]
        if ended:
            raise PolydraftError(f"the server did not start: {' '.join(lines[-3:])}")
        sleep(0.1)


async def _ready(url: str, path: str, server: subprocess.Popen[bytes], said: IO[str]) -> None:
    where = urlsplit(url)
    for _ in range(6000):
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n".encode())
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                return
        except OSError:
            pass
        if server.poll() is not None:
            said.seek(0)
            raise PolydraftError(f"the server ended before it answered: {' '.join(said.read().splitlines()[-3:])[-500:]}")
        await asyncio.sleep(0.1)
    raise PolydraftError(f"{url} was not ready within 600 s.")


def questions(model: str | None, count: int) -> list[str]:
    """Prompts that differ from their first words on, so that no server knows one."""
    kinds = CODE if model is None else CHAT
    return [f"{kinds[i % len(kinds)].format(TOPICS[i % len(TOPICS)])}" + ("" if i < 16 else f"  # {i}\n") for i in range(count)]


def run(
    model: str | None,
    *,
    streams: Sequence[int] = STREAMS,
    max_tokens: int = 64,
    peer: bool = True,
    vllm: Path | None = None,
    options: Sequence[str] = (),
) -> list[Load]:
    """Plain and speculative requests to one server of ours, then llama.cpp's and vLLM's, each at all numbers of streams.

    vllm: an interpreter that has it.  options: of `polydraft serve`.

    Raises:
        InvalidInputError: an interpreter without vLLM.
        PolydraftError: a server that did not start.
    """
    if (
        vllm
        and subprocess.run(
            [vllm, "-c", "from importlib.util import find_spec as f; exit(f('vllm') is None)"], check=False
        ).returncode
    ):
        raise InvalidInputError(
            f"{vllm} has no vLLM; expected an interpreter that has it. `make vllm` makes one: .venv-vllm/bin/python."
        )
    slots, loads = max(streams), list[Load]()
    flags = ["--model", model or "embedded", "--max-num-seqs", str(slots), "--max-model-len", str(CONTEXT), *options]
    ways: list[tuple[str, dict[str, Any]]] = [("polydraft, plain", {"speculation": {"enabled": False}}), ("polydraft", {})]
    with serving(*flags) as served:
        url = served.url
        for name, server in ways:  # compiled and learnt beforehand
            asyncio.run(load(name, url, questions(model, min(slots, 4)), streams=min(slots, 4), max_tokens=max_tokens, **server))
        for number in streams:
            for name, server in ways:
                loads.append(_measured(name, url, model, number, max_tokens, **server))
    with TemporaryDirectory() as place:
        folder = Path(place)
        peers = {"llama.cpp": lambda: _llama_cpp(model, folder, slots)} if peer else {}
        peers |= {"vLLM": lambda: _vllm(vllm, model, folder, slots)} if vllm else {}
        for name, start in peers.items():
            with start() as url:
                asyncio.run(load(name, url, questions(model, 2), streams=2, max_tokens=max_tokens))
                loads += [_measured(name, url, model, number, max_tokens) for number in streams]
    return loads


def _measured(name: str, url: str, model: str | None, streams: int, max_tokens: int, **asked: Any) -> Load:
    prompts = questions(model, max(8, streams))
    return asyncio.run(load(name, url, prompts, streams=streams, max_tokens=max_tokens, **asked))


@contextmanager
def _llama_cpp(model: str | None, folder: Path, slots: int) -> Iterator[str]:
    """llama.cpp's own server in this process, whose threads are its own: on the very file, where it is one of its kind."""
    from polydraft.bench.llama_cpp import LlamaCpp, write_gguf
    from polydraft.models import load as models
    from polydraft.models import pair
    from polydraft.models.folder import load_module
    from polydraft.models.hub import MODELS, cached

    source = model or str(pair.target_folder())
    file = cached(MODELS[source]) if source in MODELS else Path(source)
    if file is None or file.suffix != ".gguf":
        file = folder / "model.gguf"
        write_gguf(load_module(source), models.load_tokenizer(source), file, "F32" if model is None else "BF16")
    server = LlamaCpp(file, exact=False, parallel=slots, context=CONTEXT * slots)
    yield server.address


@contextmanager
def _vllm(python: Path, model: str | None, folder: Path, slots: int) -> Iterator[str]:
    """vLLM's own server, on the model as a folder: in bfloat16, and the embedded target as it is."""
    from polydraft.heads.export import export_model
    from polydraft.models import pair

    model_folder = pair.target_folder() if model is None else folder / "model"
    if model is not None:
        export_model(model, model_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"dtype": "float32" if model is None else "bfloat16", "max-model-len": CONTEXT, "max-num-seqs": slots, "port": port}
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model_folder,
        "--enforce-eager",
        "--host",
        "127.0.0.1",
    ]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}  # one thread, as ours; GiB
    with TemporaryFile("w+") as output:
        server = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, "/health", server, output))
            yield url
        finally:
            server.terminate()
            server.wait(60)


def markdown(found: Sequence[Load]) -> str:
    """A table.

    Example:
        >>> print(markdown([Load("ours", 4, [0.1], [0.02], tokens=8, seconds=2.0)]))
        | streams | server | tokens/s | first token p50 / p99, ms | between events p50 / p99, ms |
        |---|---|---|---|---|
        | 4 | ours | 4 | 100 / 100 | 20.0 / 20.0 |
    """
    lines = [
        "| streams | server | tokens/s | first token p50 / p99, ms | between events p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    for load in sorted(found, key=lambda load: load.streams):
        f = load.figures()
        first = f"{f['first_p50_ms']:.0f} / {f['first_p99_ms']:.0f}"
        between = f"{f['between_p50_ms']:.1f} / {f['between_p99_ms']:.1f}"
        lines.append(f"| {f['streams']} | {f['server']} | {f['tokens_per_second']:.0f} | {first} | {between} |")
    return "\n".join(lines)
