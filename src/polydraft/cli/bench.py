"""`polydraft bench`: this library and its peers on the same models and prompts, in one interleaved run."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.doctor import machine
from polydraft.cli.files import check_output, check_output_folder, check_picture, read_lines
from polydraft.cli.quiet import quiet
from polydraft.errors import InvalidInputError

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write FILE, and beside it a .md table and a .png.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three prompts, one repetition.")] = False,
    inflate: Annotated[int, typer.Option(min=0, help="Append N layers to the target that cost and change nothing.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of everyone. One avoids stalls on a busy machine.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file, one prompt a line, or .jsonl with a prompt key; default: held-out Python files."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of the target; the embedded pair without it.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Folder of a smaller model with the same vocabulary.")] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="DRAFTER[+VERIFIER][@PATHSxDEPTH] to measure; may be repeated; a good set without it."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 compares greedy decoding.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Of all prompts.")] = 2,
    peers: Annotated[bool, typer.Option(help="Measure transformers, llama.cpp and vLLM too, where installed.")] = True,
) -> None:
    """Measure this library against its peers: same models, prompts and threads, one interleaved run, outputs checked."""
    if context.invoked_subcommand is not None:
        return
    check_output("--json", json_file)
    check_picture("--json", json_file)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    quiet()
    from rich.progress import Progress

    from polydraft.bench import report as reports
    from polydraft.bench.suite import Bench, Way

    for text in way or ():
        Way.parse(text)
    made = Bench(
        target=model,
        draft=draft_model,
        ways=way or (),
        temperature=temperature,
        inflate_layers=inflate,
        num_threads=threads,
        batch_size=batch,
        peers=peers,
    )
    texts = made.prompts(3 if quick else 6) if prompts is None else _read(prompts, made.tokenizer)
    repetitions = 1 if quick else repetitions
    with closing(made), Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=len(made.contenders) * (1 + len(texts) * repetitions))
        found = made.run(texts, max_tokens=max_tokens, repetitions=repetitions, progress=lambda: bar.advance(task))
    if not found.measurements:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.absent.items())
        raise InvalidInputError(f"no contender could be measured; expected at least one. {reasons}")
    settings = {
        "temperature": temperature,
        "inflate": inflate,
        "threads": threads,
        "batch": batch,
        "max_tokens": max_tokens,
        "num_prompts": len(texts),
        "repetitions": repetitions,
    }
    report = reports.as_dict(found, machine(), settings)
    typer.echo(reports.markdown(report))
    if json_file is not None:
        for path in reports.write(report, json_file):
            typer.echo(f"wrote {path}", err=True)


def _read(path: Path, tokenizer: Any) -> list[list[int]]:
    from polydraft.models import load

    return [load.encode(tokenizer, text) for text in read_lines("--prompts", path)]


@app.command()
def drafters(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the tables and all numbers.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two requests of 32 tokens, a short curve.")] = False,
    drafter: Annotated[list[str] | None, typer.Option(help="Name in the table; may be repeated; all without it.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Drafted tokens of a step.")] = 16,
    depth: Annotated[int, typer.Option(min=1, help="Longest path of a draft.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Most paths of a draft.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, help="Of the embedded target.")] = 1.0,
    num_tokens: Annotated[int, typer.Option(min=1, max=480, help="Tokens of each continuation.")] = 200,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each workload.")] = 8,
    index_bytes: Annotated[int, typer.Option(min=1, help="Text that the indexes are made of.")] = 2_000_000,
) -> None:
    """Compare the drafters that need no training, at one node budget, on code, edits and chat-like text."""
    check_output_folder("--out", out)
    import torch

    torch.set_num_threads(1)
    quiet()
    from rich.progress import Progress

    from polydraft.bench import drafters_table as reports
    from polydraft.bench.drafters import CONTENDERS, LEARNERS, WAYS, WORKLOADS, Bench, compare
    from polydraft.errors import unknown_name

    known = {c.name: c for c in CONTENDERS}
    for name in drafter or ():
        if name not in known:
            raise unknown_name("drafter of this benchmark", name, known)
    chosen = [c for c in CONTENDERS if not drafter or c.name in drafter]
    made = Bench(
        nodes=nodes,
        depth=depth,
        width=width,
        temperature=temperature,
        num_tokens=32 if quick else num_tokens,
        num_requests=2 if quick else num_requests,
        index_bytes=200_000 if quick else index_bytes,
    )
    steps = len(chosen) * len(WAYS) * len(WORKLOADS) + sum(c.name in LEARNERS for c in chosen)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=steps)
        found = compare(made, chosen, curve=(400, 100) if quick else (8000, 500), progress=lambda: bar.advance(task))
    report = {"hardware": machine(), "command": " ".join(["polydraft", *sys.argv[1:]]), **found}
    typer.echo(reports.markdown(report))
    if out is not None:
        for path in reports.write(report, out):
            typer.echo(f"wrote {path}", err=True)
