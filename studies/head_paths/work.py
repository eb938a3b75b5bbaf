"""The study's work on contexts, side by side in several processes."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import typer

from polydraft.drafters.base import Parts
from polydraft.engine import by_name
from polydraft.engine.api import Engine
from studies.head_paths.contexts import MAX_DEPTH, measure
from studies.head_paths.rows import HeadRows
from studies.head_paths.values import write_values
from studies.several_drafts.rows import RowStore
from studies.several_drafts.texts import Context

__all__ = ["measure_all", "opened"]

MAX_LENGTH = 512
BATCH = 10
"""Contexts that are verified together."""


def opened(model: str, head: Path | None) -> tuple[Engine, HeadRows]:
    """The target, and the rows of its head."""
    options: dict[str, Any] = {"max_model_len": MAX_LENGTH, "max_num_seqs": 3, "threads": 1, "drafter": "none"}
    engine = Engine.from_pretrained(model, **options)
    parts = Parts(engine.target, None, engine.tokenizer, tuple(engine.eos_token_ids))
    drafter = by_name.drafter("auto", parts, {"weights": str(head)} if head else {})
    return engine, HeadRows(drafter, engine.target, engine.target.vocab_size)


def measure_all(
    processes: int, model: str, head: Path | None, texts: Sequence[Context], temperatures: Sequence[float], rows: Path
) -> None:
    """Measure and evaluate the contexts that are not there yet, in so many processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [[(n, c) for n, c in enumerate(texts) if n // 2 % processes == part] for part in range(processes)]
        for done in [pool.submit(_measure_part, model, head, part, temperatures, rows) for part in parts]:
            done.result()


def _measure_part(
    model: str, head: Path | None, texts: Sequence[tuple[int, Context]], temperatures: Sequence[float], rows: Path
) -> None:
    engine, head_rows = opened(model, head)
    target, begin = RowStore(engine.target, engine.target.vocab_size), perf_counter()
    files = [(rows / f"{number:03}.npz", number, context) for number, context in texts]
    missing = [part for part in files if not part[0].with_suffix(".json").exists()]
    for first in range(0, len(missing), BATCH):
        batch = missing[first : first + BATCH]
        for file, number, context in batch:
            if not file.exists():
                measure(context, target, head_rows, temperatures, number, MAX_DEPTH, file)
                typer.echo(f"{file.name}, {perf_counter() - begin:.0f} s", err=True)
        write_values([file for file, *_ in batch])
