"""`polydraft batch`: every prompt of a file, by several engines at a time."""

from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.progress import bars

__all__ = ["batch"]


def batch(
    source: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help=".jsonl or .parquet: rows with prompt, messages or prompt_token_ids, maybe params."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The rows in the same order with text; .jsonl or .parquet.")],
    workers: Annotated[int, typer.Option(min=1, help="Engines, each a process of its own.")] = 1,
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    quantization: given.Quantization = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    max_tokens: Annotated[int, given.sampling("Most tokens to emit; a row's own params come first.")] = 128,
    temperature: given.ModelTemperature = None,
    top_p: given.ModelTopP = None,
    seed: Annotated[int, given.sampling("With the row's number it is the seed of a row.")] = 0,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Answered as one batch, and at most lost with a worker.")] = 16,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run ended, however it ended.")] = False,
    share: Annotated[bool, typer.Option("--share", help="Suffix drafts from all workers' outputs.")] = False,
    cpus: Annotated[float | None, typer.Option(help="Of each worker, fractions too; an equal share without it.")] = None,
    gpus: Annotated[float, typer.Option(help="Of each worker, fractions too.")] = 0,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster; one on this machine without it.")] = None,
) -> None:
    """Answer every row of INPUT through Ray. Rows that cannot be answered are listed in OUTPUT.errors.jsonl, with the reason."""
    from polydraft.integrations.ray import run
    from polydraft.integrations.ray.files import rows_of

    options: dict[str, Any] = {"draft_model": draft_model, "quantization": quantization, "verifier": verifier}
    options |= {} if share else {"drafter": None if drafter == "none" else drafter}
    total = sum(1 for _ in rows_of(source))
    with bars("rows") as show:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(total, done)

        good, bad = run(
            source,
            out,
            workers=workers,
            model=model,
            params=given.set_options(max_tokens=max_tokens, temperature=temperature, top_p=top_p),
            seed=seed,
            rows_a_part=rows,
            resume=resume,
            share=share,
            cpus=cpus,
            gpus=gpus,
            address=address,
            progress=advance,
            max_num_seqs=rows,
            **{k: v for k, v in options.items() if v is not None},
        )
    typer.echo(f"{good} rows answered, {bad} not" + (f": {out}.errors.jsonl" if bad else ""), err=True)
