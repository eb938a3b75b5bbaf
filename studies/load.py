"""A server under load: `python -m studies.load --model NAME`: streams of one server at the same time, plain and with drafts, beside llama.cpp's and vLLM's.

A closed loop: so many clients, each of which asks anew when its answer is whole, over the loopback device, on the machine that serves. All
servers run at the same time and are measured by turns, for several rounds; one that nobody asks waits.

first     from the request to the first event of its stream
between   from one event to the next of a stream; an event has what one step accepted, so one token where nothing was drafted
tokens/s  of all streams together, as the servers count them in `usage`
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep
from typing import IO, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer

from polydraft.bench.record import csv_table, processor, write_texts
from polydraft.errors import InvalidInputError, PolydraftError
from studies import question_files as prompts_by_category

__all__ = ["Load", "Way", "answer", "load", "main", "markdown", "questions", "run", "serving"]

STREAMS = 1, 4, 16, 64
SHOWN_STREAMS = 1, 16
"""Of the page's table."""
CONTEXT = 512
"""Tokens of each stream's place in a cache, on all servers."""
LONGEST_QUESTION = 800
"""Characters of a chat's question: with its answer it fits CONTEXT."""
FEWEST = 8
"""Chats of a measurement, at least."""
SECONDS = 600.0
"""Of one request, at most."""
PLAIN: dict[str, Any] = {"speculation": {"enabled": False}}


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


async def load(
    name: str, url: str, prompts: Sequence[str], *, streams: int, max_tokens: int, chat: bool = True, **fields: Any
) -> Load:
    """So many clients at a time, until each prompt is answered. chat: through the model's template.  fields: further ones of a request."""
    load_result, waiting_prompts = Load(name, streams), list(prompts)

    async def client() -> None:
        while waiting_prompts:
            body = {
                **_asked(waiting_prompts.pop(), chat),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            body |= {"stream_options": {"include_usage": True}, **fields}
            began, came, events = await asyncio.wait_for(answer(url, f"/v1/{'chat/' * chat}completions", body), SECONDS)
            texts = [at for at, event in zip(came, events, strict=True) if _has_text(event)]
            load_result.first.append(texts[0] - began)
            load_result.between += [b - a for a, b in pairwise(texts)]
            load_result.tokens += next(e["usage"]["completion_tokens"] for e in reversed(events) if e.get("usage"))

    start = perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    load_result.seconds = perf_counter() - start
    return load_result


def _asked(prompt: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}


def _has_text(event: Mapping[str, Any]) -> bool:
    """Not so of an event that names a role, or of the last ones."""
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices", ()))


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


def questions(files: Sequence[Path], count: int, measurement: int = 0) -> list[str]:
    """Questions of all categories by turns; their first words are of the measurement, so that no server knows a prompt but for its template.

    Example:
        >>> questions((), 8, 3)[7]
        'Question 307: Write a Python function that merges two sorted lists.'
    """
    chosen = prompts_by_category.questions(files, count) if files else prompts_by_category.QUESTIONS
    short = [question.text for question in chosen if len(question.text) <= LONGEST_QUESTION]
    return [f"Question {100 * measurement + i}: {short[i % len(short)]}" for i in range(count)]


class Way(NamedTuple):
    """A server and how it is asked."""

    name: str
    url: str
    chat: bool
    fields: Mapping[str, Any]


def run(
    model: str,
    *,
    streams: Sequence[int] = STREAMS,
    threads: int = 1,
    max_tokens: int = 64,
    rounds: int = 1,
    prompts: Sequence[Path] = (),
    peer: bool = True,
    vllm: Path | None = None,
    options: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> list[Load]:
    """Plain and speculative chats with one server of ours, llama.cpp's and vLLM's, by turns, each at all numbers of streams.

    vllm: an interpreter that has it.  options: of `polydraft serve`.

    Raises:
        InvalidInputError: an interpreter without vLLM.
        PolydraftError: a server that did not start.
    """
    if vllm:
        _check_vllm(vllm)
    slots, loads, chat = max(streams), list[Load](), model != "embedded"  # which has no template
    sizes = ("--max-num-seqs", str(slots), "--max-model-len", str(CONTEXT), "--threads", str(threads))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        url = stack.enter_context(serving("--model", model, *sizes, *options)).url
        ways = [Way("polydraft, plain", url, chat, PLAIN), Way("polydraft", url, chat, {})]
        if peer:
            ways.append(Way("llama.cpp", stack.enter_context(_llama_cpp(model, folder, slots, threads)), chat, {}))
        if vllm:
            ways.append(Way("vLLM", stack.enter_context(_vllm(vllm, model, folder, slots, threads)), chat, {}))
        for way in ways:  # compiled and learnt beforehand
            _measured(way, min(slots, 4), questions(prompts, FEWEST), max_tokens)
        for number in streams:
            for turn in range(rounds):
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    asked = questions(prompts, max(FEWEST, number), 1 + len(loads))
                    loads.append(_measured(way, number, asked, max_tokens))
                    say(
                        f"{model}, {number} streams, round {turn + 1}: {way.name} {loads[-1].tokens / loads[-1].seconds:.0f} tokens/s"
                    )
    return loads


def _check_vllm(python: Path) -> None:
    probe = [python, "-c", "from importlib.util import find_spec as f; exit(f('vllm') is None)"]
    if subprocess.run(probe, check=False).returncode:
        raise InvalidInputError(
            f"{python} has no vLLM; expected an interpreter that has it. `make vllm` makes one: .venv-vllm/bin/python."
        )


def _measured(way: Way, streams: int, prompts: Sequence[str], max_tokens: int) -> Load:
    return asyncio.run(load(way.name, way.url, prompts, streams=streams, max_tokens=max_tokens, chat=way.chat, **way.fields))


@contextmanager
def _llama_cpp(model: str, folder: Path, slots: int, threads: int) -> Iterator[str]:
    """llama.cpp's own server in this process, whose threads are its own: on the very file, where it is one of its kind."""
    from polydraft.bench.gguf_file import write_gguf
    from polydraft.bench.llama_cpp import LlamaCpp
    from polydraft.models import load as models
    from polydraft.models import pair
    from polydraft.models.loading.catalogue import MODELS, cached
    from polydraft.models.loading.folder import load_module

    source = str(pair.target_folder()) if model == "embedded" else model
    file = cached(MODELS[source]) if source in MODELS else Path(source)
    if file is None or file.suffix != ".gguf":
        file = folder / "model.gguf"
        write_gguf(load_module(source), models.load_tokenizer(source), file, "F32" if model == "embedded" else "BF16")
    server = LlamaCpp(file, exact=False, num_threads=threads, parallel=slots, context=CONTEXT * slots)
    yield server.server.listening_address


@contextmanager
def _vllm(python: Path, model: str, folder: Path, slots: int, threads: int) -> Iterator[str]:
    """vLLM's own server, on the model as a folder: in bfloat16, and the embedded target as it is."""
    from polydraft.heads.export import export_model
    from polydraft.models import pair

    embedded = model == "embedded"
    model_folder = pair.target_folder() if embedded else folder / "model"
    if not embedded:
        export_model(model, model_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"dtype": "float32" if embedded else "bfloat16", "max-model-len": CONTEXT, "max-num-seqs": slots, "port": port}
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
    cores = ",".join(map(str, range(threads)))
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB
    with TemporaryFile("w+") as output:
        server = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment, cwd=folder)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, "/health", server, output))
            yield url
        finally:
            server.terminate()
            server.wait(60)


def markdown(loads: Sequence[Load]) -> str:
    """A table; the rounds of a server are joined.

    Example:
        >>> print(markdown([Load("ours", 4, [0.1], [0.02], tokens=8, seconds=2.0), Load("ours", 4, [0.3], [0.02], tokens=8, seconds=1.0)]))
        | streams | server | tokens/s | first token p50 / p99, ms | between events p50 / p99, ms |
        |---|---|---|---|---|
        | 4 | ours | 5 [4, 8] | 300 / 300 | 20.0 / 20.0 |
    """
    lines = [
        "| streams | server | tokens/s | first token p50 / p99, ms | between events p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    for streams, server in sorted({(load.streams, load.server): None for load in loads}, key=lambda key: key[0]):
        lines.append(_row([load for load in loads if (load.streams, load.server) == (streams, server)]))
    return "\n".join(lines)


def _row(rounds: Sequence[Load]) -> str:
    joined = Load(rounds[0].server, rounds[0].streams)
    for load in rounds:
        joined.first += load.first
        joined.between += load.between
        joined.tokens, joined.seconds = joined.tokens + load.tokens, joined.seconds + load.seconds
    f, speeds = joined.figures(), [load.tokens / load.seconds for load in rounds]
    throughput = f"{f['tokens_per_second']:.0f}" + (f" [{min(speeds):.0f}, {max(speeds):.0f}]" if len(rounds) > 1 else "")
    first = f"{f['first_p50_ms']:.0f} / {f['first_p99_ms']:.0f}"
    between = f"{f['between_p50_ms']:.1f} / {f['between_p99_ms']:.1f}"
    return f"| {f['streams']} | {f['server']} | {throughput} | {first} | {between} |"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    *,
    model: Annotated[list[str], typer.Option(help="Model as of `polydraft serve`; may be repeated.")],
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Streams at a time; may be repeated. Default: 1, 4, 16, 64.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each server.")] = os.cpu_count() or 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each server at each number of streams.")] = 2,
    prompts: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help=".jsonl of questions; may be repeated.")
    ] = None,
    peer: Annotated[bool, typer.Option(help="Measurement of llama.cpp's server too.")] = True,
    vllm: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Python interpreter with vLLM.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option of `polydraft serve`, as --option=--drafter=ngram.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    out: Annotated[Path | None, typer.Option(help="Page that is written.")] = None,
) -> None:
    """Tokens per second and latencies of servers under load."""
    files, counts = prompts or [], streams or STREAMS
    settings: dict[str, Any] = {"threads": threads, "max_tokens": max_tokens, "rounds": rounds, "prompts": files, "peer": peer}
    loads = {
        name: run(name, streams=counts, vllm=vllm, options=option or (), say=lambda line: typer.echo(line, err=True), **settings)
        for name in model
    }
    table = out.with_suffix(".csv") if out else Path("load.csv")
    text = page(
        loads, table.name, f"python -m studies.load {' '.join(Path(a).name if '/' in a else a for a in sys.argv[1:])}", threads
    )
    typer.echo(text)
    if json_file is not None:
        figures = {name: [load.figures() for load in rows] for name, rows in loads.items()}
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if out is not None:
        write_texts({out: text, table: csv_of(loads)})


def csv_of(loads: Mapping[str, Sequence[Load]]) -> str:
    """Every measurement of every model."""
    figures = [{"model": name, **load.figures()} for name, rows in loads.items() for load in rows]
    return csv_table(list(figures[0]), ([f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in figures))


def page(loads: Mapping[str, Sequence[Load]], csv_name: str, command: str, threads: int) -> str:
    """The page of all models' tables, by some numbers of streams."""
    parts = [
        "# Results: the server under load",
        "Clients in a closed loop chat with servers that run at the same time and are measured by turns; `polydraft` drafts as it does by default. In brackets "
        "the slowest and the fastest round. All weights are of the same file; vLLM computes in bfloat16. No prompt is asked twice.",
        f"{processor()}, {os.cpu_count()} cores, {threads} threads each; {date.today()}; `{command}`.",
    ]
    for name, rows in loads.items():
        shown = [load for load in rows if load.streams in SHOWN_STREAMS] or rows
        parts += [f"## {name}", markdown(shown)]
    return "\n\n".join([*parts, f"[All numbers of streams]({csv_name})."]) + "\n"


if __name__ == "__main__":
    app()
