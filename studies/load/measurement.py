"""Clients of a server in a closed loop, and what they wait for.

first     from the request to the first event of its stream
between   from one event to the next of a stream; an event has what one step accepted, so one token where nothing was drafted
stretch   from an event until STRETCH tokens more are there, a token's share of it: what a reader waits for, however many tokens a step has
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from polydraft.bench.record import markdown_table
from polydraft.errors import PolydraftError

STRETCH = 8
"""Tokens of a stretch."""
SECONDS = 600.0
"""Of one request, at most."""


@dataclass
class Load:
    """What so many streams of one server took. first, between, stretch: seconds, each.  tokens: of all.  seconds: from the first request to the last event."""

    server: str
    streams: int
    first: list[float] = field(default_factory=list[float])
    between: list[float] = field(default_factory=list[float])
    stretch: list[float] = field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """In milliseconds and tokens a second.

        Example:
            >>> Load("ours", 1, [0.1, 0.3], [0.01], [0.02], tokens=30, seconds=1.5).figures()["first_p99_ms"]
            300.0
        """
        row: dict[str, Any] = {
            "server": self.server,
            "streams": self.streams,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        for name in ("first", "between", "stretch"):
            values = sorted(asdict(self)[name]) or [0.0]
            for share in (50, 99):
                row[f"{name}_p{share}_ms"] = 1e3 * values[min(len(values) * share // 100, len(values) - 1)]
        return row | {"tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0}


async def answer(
    url: str, path: str, body: Mapping[str, Any]
) -> tuple[float, list[float], list[dict[str, Any]]]:
    """One streamed answer: when it was asked for, when each event came, and the events.

    Raises:
        PolydraftError: another status than 200, or a stream that breaks off.
    """
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        began = perf_counter()
        came = list[float]()
        events = list[dict[str, Any]]()
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
    name: str,
    url: str,
    prompts: Sequence[str],
    *,
    streams: int,
    max_tokens: int,
    chat: bool = True,
    **fields: Any,
) -> Load:
    """So many clients at a time, until each prompt is answered. chat: through the model's template.  fields: further ones of a request."""
    load_result = Load(name, streams)
    waiting_prompts = list(prompts)

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
            began, came, events = await asyncio.wait_for(
                answer(url, f"/v1/{'chat/' * chat}completions", body), SECONDS
            )
            sizes = list(map(_text_length, events))
            texts = [(at, size) for at, size in zip(came, sizes, strict=True) if size]
            times = [at for at, _ in texts]
            num_tokens = _num_tokens(events)
            load_result.first.append(times[0] - began)
            load_result.between += [b - a for a, b in pairwise(times)]
            load_result.stretch += stretches(times, [num_tokens * size / sum(sizes) for _, size in texts])
            load_result.tokens += num_tokens

    start = perf_counter()
    await asyncio.gather(*(client() for _ in range(streams)))
    load_result.seconds = perf_counter() - start
    return load_result


def _asked(prompt: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}


def _text_length(event: Mapping[str, Any]) -> int:
    """Characters; none in an event that names a role, or in the last ones."""
    choices = event.get("choices", ())
    return sum(len(choice.get("text") or choice.get("delta", {}).get("content") or "") for choice in choices)


def _num_tokens(events: Sequence[Mapping[str, Any]]) -> int:
    return next(event["usage"]["completion_tokens"] for event in reversed(events) if event.get("usage"))


def stretches(times: Sequence[float], tokens: Sequence[float]) -> list[float]:
    """Seconds a token of every stretch: from an event until STRETCH tokens more are there. tokens: of each event, as its share of the text's characters.

    Example:
        >>> stretches([0.0, 1.0, 2.0, 4.0], [1.0, 4.0, 4.0, 8.0])
        [0.25, 0.375, 0.25]
    """
    seconds = list[float]()
    end = 0
    for begin, start in enumerate(times):
        count = sum(tokens[begin + 1 : end + 1])
        while count < STRETCH and end + 1 < len(times):
            end += 1
            count += tokens[end]
        if count >= STRETCH:
            seconds.append((times[end] - start) / STRETCH)
    return seconds


def markdown(loads: Sequence[Load]) -> str:
    """A table; the rounds of a server are joined.

    Example:
        >>> print(markdown([Load("ours", 4, [0.1], [0.02], [0.01], 8, 2.0), Load("ours", 4, [0.3], [0.02], [0.01], 8, 1.0)]))
        | streams | server | tokens/s | first token p50 / p99, ms | between events p50 / p99, ms | a token of 8 p50 / p99, ms |
        |---|---|---|---|---|---|
        | 4 | ours | 5 [4, 8] | 300 / 300 | 20.0 / 20.0 | 10.0 / 10.0 |
    """
    rounds: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        rounds.setdefault((load.streams, load.server), []).append(load)
    timed = ("first token", "between events", f"a token of {STRETCH}")
    head = ["streams", "server", "tokens/s", *(f"{what} p50 / p99, ms" for what in timed)]
    return markdown_table(head, (_row(rounds[key]) for key in sorted(rounds, key=lambda key: key[0])))


def _row(rounds: Sequence[Load]) -> list[Any]:
    joined = Load(rounds[0].server, rounds[0].streams)
    for load in rounds:
        joined.first += load.first
        joined.between += load.between
        joined.stretch += load.stretch
        joined.tokens = joined.tokens + load.tokens
        joined.seconds = joined.seconds + load.seconds
    f = joined.figures()
    speeds = [load.tokens / load.seconds for load in rounds]
    throughput = f"{f['tokens_per_second']:.0f}" + (
        f" [{min(speeds):.0f}, {max(speeds):.0f}]" if len(rounds) > 1 else ""
    )
    first = f"{f['first_p50_ms']:.0f} / {f['first_p99_ms']:.0f}"
    between = f"{f['between_p50_ms']:.1f} / {f['between_p99_ms']:.1f}"
    stretch = f"{f['stretch_p50_ms']:.1f} / {f['stretch_p99_ms']:.1f}"
    return [f["streams"], f["server"], throughput, first, between, stretch]
