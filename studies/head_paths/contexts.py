"""Rows of one context: trees of all ways of drawing and numbers of paths, and what target and head say at their nodes, in one file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.engine.api import Engine
from studies.head_paths.rows import HeadRows
from studies.several_drafts.draws import draw_trees, with_spares
from studies.several_drafts.measure import Group
from studies.several_drafts.rows import RowStore
from studies.several_drafts.texts import Context, answers

__all__ = ["MAX_DEPTH", "MAX_PATHS", "NUM_PATHS", "WIDTHS", "measure", "written_contexts"]

MAX_PATHS, MAX_DEPTH = 8, 7
WIDTHS: Mapping[str, Sequence[int]] = {
    "iid": (MAX_PATHS,),
    "without_replacement": (MAX_PATHS,),
    "systematic": range(2, MAX_PATHS + 1),
}
"""As `several_drafts.draws.WIDTHS`."""
NUM_PATHS = WIDTHS["systematic"]
"""Numbers of several paths that are compared."""


def written_contexts(engine: Engine, prompts: dict[str, Sequence[str]], count: int, file: Path) -> list[Context]:
    """Contexts of so many answers of each kind of text, kept in a file."""
    if not file.exists():
        texts = [asdict(c) for found in answers(engine, engine.tokenizer, prompts, count, lambda _: False) for c in found]
        file.write_text(json.dumps(texts), encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Context(c["text"], c["answer"], tuple(c["token_ids"])) for c in found]


def measure(
    context: Context, target: RowStore, head: HeadRows, temperatures: Sequence[float], seed: int, depth: int, file: Path
) -> None:
    """Draw all trees behind a context, score them with the target, and write the file."""
    target.open(context.token_ids)
    head.open(context.token_ids)
    groups = {T: Group(target, [head], T) for T in temperatures}
    for (T, kind, paths), tree in draw_trees(head, "head", temperatures, seed, depth, WIDTHS).items():
        groups[T].trees[kind, paths] = tree
    for T, group in groups.items():
        iid = group.trees["iid", MAX_PATHS]
        chain = [t for t, p, d in zip(iid.tokens, iid.paths, iid.depths, strict=True) if p == 0 and d > 0]
        spares = with_spares(head, "head", T, seed, chain, distinct=True, paths=MAX_PATHS)
        group.trees["distinct spares", max(spares.paths) + 1] = spares
    inner = [tree.prefixes[n] for group in groups.values() for tree in group.trees.values() for n in tree.inner()]
    target.fill(inner)
    head.fill(inner)
    arrays: dict[str, Any] = {"answer": np.array(context.answer), "text": np.array(context.text)}
    for T, group in groups.items():
        arrays |= {f"{T}|{key}": value for key, value in group.arrays().items()}
    partial = file.with_suffix(".part")
    with partial.open("wb") as out:
        np.savez(out, **arrays)
    partial.rename(file)
