"""What one client does to another: `python -m studies.neighbours --model NAME`: the longest gap between tokens of a stream beside hostile requests.

A stream runs on a server of its own, again and again; a second later the hostile request comes. The gap is the longest between two texts of the
stream from then on until the hostile request is answered, or `--seconds` have passed. The first row has no hostile request: what the machine does.

The processor's seconds of the server between two texts are beside it: on a machine that others use they say what the server itself did.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from polydraft.bench.record import markdown_table
from studies.load.servers import Served, serving

NEIGHBOUR: dict[str, Any] = {
    "prompt": "def add(",
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "max_tokens": 400,
}
TEXT = "def f{0}(x):\n    return x * {0} + {0}\n\n"
"""Of some 18 tokens, none like another."""


@dataclass
class Gaps:
    """largest: seconds between two texts of the neighbour, of each round.  working: the processor's, of the server between two texts.

    status: of the hostile request.  seconds: until it was answered, at most.
    """

    name: str
    largest: list[float] = field(default_factory=list[float])
    working: list[float] = field(default_factory=list[float])
    status: int | str = ""
    seconds: float = 0.0


def hostile(context: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests by name: a path and a body. context: tokens that a prompt may have."""
    long = "".join(TEXT.format(number) for number in range(context // 20))
    short = {"prompt": "a", "max_tokens": 64, "temperature": 1, "ignore_eos": True}
    tool = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "pattern": f"a{{{n},900}}"} for n in range(20)},
    }
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": tool}} for n in range(100)]
    plain = {f"p{n}": {"type": "integer"} for n in range(20)}
    many = [
        {
            "type": "function",
            "function": {
                "name": f"g{n}",
                "parameters": {"type": "object", "properties": plain, "required": [f"p{n % 20}"]},
            },
        }
        for n in range(500)
    ]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 16}
    return {
        "nothing": ("", {}),
        'guided_regex "(a{1,1000}){1,1000}"': ("/v1/completions", {**short, "guided_regex": "(a{1,1000}){1,1000}"}),
        'guided_regex ".*(a|b){1,900}.*"': ("/v1/completions", {**short, "guided_regex": ".*(a|b){1,900}.*"}),
        "100 tools of 20 patterns": ("/v1/chat/completions", {**chat, "tools": tools}),
        "500 tools of 20 parameters": ("/v1/chat/completions", {**chat, "tools": many}),
        "100,000 stop strings": ("/v1/completions", {**short, "stop": [f"#{n}" for n in range(100_000)]}),
        "1,024 stop strings": ("/v1/completions", {**short, "stop": [f"#{n}" for n in range(1024)]}),
        "logit_bias of 2,000 ids": ("/v1/completions", {**short, "logit_bias": {str(n): 1 for n in range(2000)}}),
        "/detokenize of 800,000 ids": ("/detokenize", {"tokens": [n % 10 for n in range(800_000)]}),
        "/tokenize of 1 MB": ("/tokenize", {"prompt": "".join(TEXT.format(n) for n in range(25_000))}),
        f"a prompt of {len(long) // 1000} kB": ("/v1/completions", {**short, "prompt": long, "max_tokens": 4}),
        f"a prompt of {len(long) // 1000} kB, seeded": ("/v1/completions", {**short, "prompt": "#" + long, "max_tokens": 4, "seed": 1}),
    }  # fmt: skip


def _worked(pid: int) -> float:
    """Seconds of the processor that a process has had: its clock, as Linux numbers it."""
    return time.clock_gettime((~pid << 3) | 2)


async def _stream(client: httpx.AsyncClient, pid: int, came: list[tuple[float, float]]) -> None:
    """The neighbour: when its texts came, by both clocks, until it is cancelled."""
    while True:
        async with client.stream("POST", "/v1/completions", json=NEIGHBOUR) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    came.append((time.perf_counter(), _worked(pid)))


async def measured(
    served: Served, requests: Mapping[str, tuple[str, dict[str, Any]]], rounds: int, seconds: float
) -> list[Gaps]:
    """Gaps beside each request, by turns."""
    gaps = {name: Gaps(name) for name in requests}
    async with httpx.AsyncClient(base_url=served.url, timeout=600) as client:
        for _ in range(rounds):
            for name, (path, body) in requests.items():
                came = list[tuple[float, float]]()
                content = json.dumps(body, separators=(",", ":"))
                neighbour = asyncio.create_task(_stream(client, served.pid, came))
                await asyncio.sleep(1.0)
                start = time.perf_counter(), _worked(served.pid)
                if path:
                    asked = asyncio.create_task(
                        client.post(path, content=content, headers={"Content-Type": "application/json"})
                    )
                    await asyncio.wait({asked}, timeout=seconds)
                    gaps[name].status = asked.result().status_code if asked.done() else "unfinished"
                    asked.cancel()
                    with suppress(asyncio.CancelledError):
                        await asked
                else:
                    await asyncio.sleep(min(seconds, 5.0))
                end = time.perf_counter(), _worked(served.pid)
                gaps[name].seconds = max(gaps[name].seconds, end[0] - start[0])
                await asyncio.sleep(0.5)
                neighbour.cancel()
                with suppress(asyncio.CancelledError):
                    await neighbour
                moments = [start, *(at for at in came if start <= at <= end), end]
                gaps[name].largest.append(max(b - a for (a, _), (b, _) in pairwise(moments)))
                gaps[name].working.append(max(b - a for (_, a), (_, b) in pairwise(moments)))
    return list(gaps.values())


def markdown(gaps: Sequence[Gaps]) -> str:
    """A table, in milliseconds.

    Example:
        >>> print(markdown([Gaps("nothing", [0.01, 0.03], [0.01, 0.02], "", 5.0)]))
        | beside | answered | after s | gap ms, median | largest | server's processor ms, median | largest |
        |---|---|---|---|---|---|---|
        | nothing |  | 5.0 | 20 | 30 | 15 | 20 |
    """
    gap = ("gap ms, median", "largest", "server's processor ms, median", "largest")
    lines = list[list[Any]]()
    for row in gaps:
        figures = (figure(values) for values in (row.largest, row.working) for figure in (median, max))
        milliseconds = (f"{1e3 * figure:.0f}" for figure in figures)
        lines.append([row.name.replace("|", r"\|"), row.status, f"{row.seconds:.1f}", *milliseconds])
    return markdown_table(["beside", "answered", "after s", *gap], lines)


def main(
    model: Annotated[str, typer.Option(help="Model, as of `polydraft serve`.")] = "embedded",
    draft_model: Annotated[str, typer.Option(help="Draft model.")] = "",
    context: Annotated[int, typer.Option(help="Tokens of the long prompts, about.")] = 900,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="Seconds that a hostile request is looked at, at most.")
    ] = 20.0,
    only: Annotated[str, typer.Option(help="Part of the names of the requests that are measured.")] = "",
    out: Annotated[Path | None, typer.Option(help="File of the table.")] = None,
) -> None:
    """Print the table."""
    options = ["--model", model, *(["--draft-model", draft_model] if draft_model else [])]
    requests = {
        name: request for name, request in hostile(context).items() if only in name or name == "nothing"
    }
    with serving(*options) as served:
        table = markdown(asyncio.run(measured(served, requests, rounds, seconds)))
    print(table)
    if out is not None:
        out.write_text(table + "\n")


if __name__ == "__main__":
    typer.run(main)
