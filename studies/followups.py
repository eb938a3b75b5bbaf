"""What agents wait for: `python -m studies.followups --model NAME`: first byte and first token of long conversations, in a new server and a restarted one.

Turn 1 has instructions of so many tokens, turn 2 its answer and one more question. The server keeps its prefix cache in a file: it is killed (SIGKILL)
behind turn 2, and a new one is asked turn 3. Headers, the first byte (any event or comment) and the first text are timed from the request on.
"""

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from polydraft.bench.record import markdown_table
from studies.load.servers import serving
from studies.neighbours import TEXT

WRITTEN_SECONDS = 90.0
"""In which the file of the prefix cache is written behind an answer, at most."""


class Wait(NamedTuple):
    """Of one turn. headers, first_byte, first_text: seconds.  prompt, cached: tokens."""

    turn: str
    prompt: int
    cached: int
    headers: float
    first_byte: float
    first_text: float


def asked(url: str, turn: str, messages: list[dict[str, Any]], max_tokens: int) -> tuple[Wait, str]:
    """One streamed answer."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    moments = dict[str, float]()
    text = ""
    usage = dict[str, Any]()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=1200) as answer:
        answer.raise_for_status()
        moments["headers"] = time.perf_counter() - start
        for line in answer.iter_lines():
            moments.setdefault("first_byte", time.perf_counter() - start)
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if content := choice["delta"].get("content"):
                        moments.setdefault("first_text", time.perf_counter() - start)
                        text += content
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Wait(
        turn, usage["prompt_tokens"], cached, moments["headers"], moments["first_byte"], moments["first_text"]
    ), text


def markdown(waits: Iterable[Wait]) -> str:
    """A table.

    Example:
        >>> print(markdown([Wait("1", 6000, 0, 0.05, 0.05, 30.0)]))
        | turn | prompt tokens | of these cached | headers s | first byte s | first text s |
        |---|---|---|---|---|---|
        | 1 | 6000 | 0 | 0.05 | 0.05 | 30.00 |
    """
    head = ["turn", "prompt tokens", "of these cached", "headers s", "first byte s", "first text s"]
    cells = [
        (w.turn, w.prompt, w.cached, f"{w.headers:.2f}", f"{w.first_byte:.2f}", f"{w.first_text:.2f}")
        for w in waits
    ]
    return markdown_table(head, cells)


def main(
    model: Annotated[
        str, typer.Option(help="Model, as of `polydraft serve`.")
    ] = "qwen2.5-coder-0.5b-instruct",
    tokens: Annotated[int, typer.Option(help="Tokens of the instructions, about.")] = 15_000,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    out: Annotated[Path | None, typer.Option(help="File of the table.")] = None,
) -> None:
    """Print the table."""
    instructions = "You know this file:\n" + "".join(TEXT.format(number) for number in range(tokens // 27))
    messages = [{"role": "system", "content": instructions}]
    waits = list[Wait]()

    def turn(url: str, name: str, question: str) -> None:
        messages.append({"role": "user", "content": question})
        wait, text = asked(url, name, messages, max_tokens)
        messages.append({"role": "assistant", "content": text})
        waits.append(wait)
        print(wait, flush=True)

    with TemporaryDirectory() as folder:
        file = Path(folder) / "prefixes"
        options = ("--model", model, "--prefix-cache-file", str(file))
        with serving(*options) as served:
            turn(served.url, "1", "What does f1 return?")
            turn(served.url, "2", "And f2?")
            until = time.monotonic() + WRITTEN_SECONDS
            size = -1
            while time.monotonic() < until and (not file.exists() or file.stat().st_size != size):
                size = file.stat().st_size if file.exists() else -1
                time.sleep(5)
            os.kill(served.pid, signal.SIGKILL)
        with serving(*options) as served:
            turn(served.url, "3, behind kill -9 and a restart", "And f3?")
    print(table := markdown(waits))
    if out is not None:
        out.write_text(table + "\n")


if __name__ == "__main__":
    typer.run(main)
