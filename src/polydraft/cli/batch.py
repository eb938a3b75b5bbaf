"""`polydraft batch`: every prompt of a file, by several engines at a time."""

from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import bars
from polydraft.config import BatchConfig, EngineConfig, SamplingConfig


@configured
def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help=".jsonl or .parquet: rows with prompt, messages or prompt_token_ids, maybe params.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="The rows in the same order with text; .jsonl or .parquet."),
    ],
    *,
    config: Annotated[
        EngineConfig,
        Only(without=("max_num_seqs", "offered", "prefix_cache_bytes", "prefix_cache_file", "head", "index")),
    ],
    sampling: Annotated[SamplingConfig, Only("max_tokens", "temperature", "top_p", max_tokens=128)],
    job: BatchConfig,
    yes: Yes = False,
) -> None:
    """Answer every row of INPUT through Ray. Rows that cannot be answered are listed in OUTPUT.errors.jsonl, with the reason."""
    agree_on_downloads([config], yes=yes)
    from polydraft.integrations.ray import run
    from polydraft.integrations.ray.files import rows_of

    engine: dict[str, Any] = config.chosen() | {"max_num_seqs": job.rows_a_part}
    if job.share:
        engine.pop("drafter", None)  # the suffix drafter learns from all outputs
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
            model=engine.pop("model", None),
            params=sampling.chosen(),
            progress=advance,
            **job.chosen() | engine,
        )
    typer.echo(f"{good} rows answered, {bad} not" + (f": {out}.errors.jsonl" if bad else ""), err=True)
