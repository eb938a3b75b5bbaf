"""A server under load: `python -m studies.load --model NAME`: streams of one server at the same time, plain and with drafts, beside llama.cpp's and vLLM's.

A closed loop: so many clients, each of which asks anew when its answer is whole, over the loopback device, on the machine that serves. All
servers run at the same time and are measured by turns, for several rounds; one that nobody asks waits. `measurement` says what is timed; tokens/s are of
all streams together, as the servers count them in `usage`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer

from polydraft.bench.record import csv_table, processor, write_texts
from studies import question_files as prompts_by_category
from studies.load.measurement import STRETCH, Load, load, markdown
from studies.load.servers import CONTEXT, check_vllm, llama_cpp, serving, vllm_server
from studies.options import Quick

STREAMS = 1, 4, 16, 64
SHOWN_STREAMS = 1, 16
"""Of the page's table."""
LONGEST_QUESTION = 800
"""Characters of a chat's question: with its answer it fits CONTEXT."""
FEWEST = 8
"""Chats of a measurement, at least."""
PLAIN: dict[str, Any] = {"speculation": {"enabled": False}}


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
        check_vllm(vllm)
    slots = max(streams)
    loads = list[Load]()
    chat = model != "embedded"  # which has no template
    sizes = ("--max-num-seqs", str(slots), "--max-model-len", str(CONTEXT), "--threads", str(threads))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        url = stack.enter_context(serving("--model", model, *sizes, *options)).url
        ways = [Way("polydraft, plain", url, chat, PLAIN), Way("polydraft", url, chat, {})]
        if peer:
            ways.append(
                Way("llama.cpp", stack.enter_context(llama_cpp(model, folder, slots, threads)), chat, {})
            )
        if vllm:
            ways.append(
                Way("vLLM", stack.enter_context(vllm_server(vllm, model, folder, slots, threads)), chat, {})
            )
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


def _measured(way: Way, streams: int, prompts: Sequence[str], max_tokens: int) -> Load:
    return asyncio.run(
        load(way.name, way.url, prompts, streams=streams, max_tokens=max_tokens, chat=way.chat, **way.fields)
    )


app = typer.Typer(add_completion=False)


@app.command()
def main(
    *,
    model: Annotated[list[str], typer.Option(help="Model as of `polydraft serve`; may be repeated.")],
    streams: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Streams at a time; may be repeated. Default: 1, 4, 16, 64."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each server.")] = os.cpu_count() or 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measurements of each server at each number of streams.")
    ] = 2,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help=".jsonl of questions; may be repeated."),
    ] = None,
    peer: Annotated[bool, typer.Option(help="Measurement of llama.cpp's server too.")] = True,
    vllm: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Python interpreter with vLLM.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of `polydraft serve`, as --option=--drafter=ngram.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    out: Annotated[Path | None, typer.Option(help="Page that is written.")] = None,
    quick: Quick = False,
) -> None:
    """Tokens per second and latencies of servers under load."""
    files = prompts or []
    counts = (2,) if quick else streams or STREAMS
    if quick:
        max_tokens = 4
        rounds = 1
    settings: dict[str, Any] = {
        "threads": threads,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "prompts": files,
        "peer": peer,
    }
    loads = {
        name: run(
            name,
            streams=counts,
            vllm=vllm,
            options=option or (),
            say=lambda line: typer.echo(line, err=True),
            **settings,
        )
        for name in model
    }
    table = out.with_suffix(".csv") if out else Path("load.csv")
    text = page(
        loads,
        table.name,
        f"python -m studies.load {' '.join(Path(a).name if '/' in a else a for a in sys.argv[1:])}",
        threads,
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
    return csv_table(
        list(figures[0]),
        ([f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in figures),
    )


def page(loads: Mapping[str, Sequence[Load]], csv_name: str, command: str, threads: int) -> str:
    """The page of all models' tables, by some numbers of streams."""
    parts = [
        "# Results: the server under load",
        "Clients in a closed loop chat with servers that run at the same time and are measured by turns; `polydraft` drafts as it does by default. In brackets "
        f"the slowest and the fastest round. An event has what one step accepted; `a token of {STRETCH}` is an eighth of the time in which the next {STRETCH} tokens come. All weights are of the same file; vLLM computes in bfloat16. No prompt is asked twice.",
        f"{processor()}, {os.cpu_count()} cores, {threads} threads each; {date.today()}; `{command}`.",
    ]
    for name, rows in loads.items():
        shown = [load for load in rows if load.streams in SHOWN_STREAMS] or rows
        parts += [f"## {name}", markdown(shown)]
    return "\n\n".join([*parts, f"[All numbers of streams]({csv_name})."]) + "\n"


if __name__ == "__main__":
    app()
