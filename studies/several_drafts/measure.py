"""Rows of one context: all trees of all draft models, and what target and draft say at their nodes, in one file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from polydraft.models import load
from polydraft.models.loading import checkpoint
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.gguf_parts import is_gguf
from polydraft.models.loading.hub import located
from studies.several_drafts.draws import DraftTree, draw_trees, lookup, side_by_side, with_spares
from studies.several_drafts.rows import RowStore, joined
from studies.several_drafts.texts import Context

__all__ = ["LOOKUP", "Group", "checkpoint_of", "measure", "missing_drafts", "stored_context", "without_layers"]

LOOKUP = "n-gram"
Key = tuple[str, int]
"""How a tree was drawn, and its number of paths."""


def checkpoint_of(name: str) -> checkpoint.Checkpoint:
    """The weights of a folder or GGUF file.

    Raises:
        ModelLoadError: of a family that is not compiled.
    """
    place = located(name)
    files = checkpoint.of_file(GgufFile(place)) if is_gguf(place) else checkpoint.of_folder(place)
    if files is None:
        raise load.ModelLoadError(f"{name!r} was given; expected a model of the Llama family, whose layers can be left out.")
    return files


def without_layers(files: checkpoint.Checkpoint, layers: Sequence[int]) -> checkpoint.Checkpoint:
    """The model whose other layers follow each other: a weaker draft model of the same vocabulary."""
    stay = [i for i in range(files.config.num_hidden_layers) if i not in layers]

    def original(weight: str) -> str:
        head, _, rest = weight.partition("model.layers.")
        number, _, part = rest.partition(".")
        return f"model.layers.{stay[int(number)]}.{part}" if not head and rest else weight

    blocks, rows, read = files.blocks, files.rows, files.read
    return replace(
        files,
        config=replace(files.config, num_hidden_layers=len(stay)),
        outlines={w: files.outlines[original(w)] for w in files.outlines if _layer(w) < len(stay)},
        read=lambda weight: read(original(weight)),
        blocks=None if blocks is None else lambda weight: blocks(original(weight)),
        rows=None if rows is None else lambda weight, part: rows(original(weight), part),
        forget=lambda weights, part: None,
    )


def _layer(weight: str) -> int:
    return int(weight.split(".")[2]) if weight.startswith("model.layers.") else -1


class Group:
    """Trees of one draft model, or of two, at one temperature, over rows that they share."""

    def __init__(self, target: RowStore, drafts: Sequence[RowStore | None], temperature: float) -> None:
        self.target, self.drafts, self.temperature = target, drafts, temperature
        self.trees: dict[Key, DraftTree] = {}

    def arrays(self) -> dict[str, np.ndarray]:
        """rows: [R, M, W] of the target and each draft model; the trees, whose tokens are columns of their parents' rows; lost: see `joined`.

        A draft model that is None is a point mass at the child that it drew.
        """
        children: dict[tuple[int, ...], dict[int, set[int]]] = {}
        for tree in self.trees.values():
            for n in range(1, len(tree.tokens)):
                drawn = children.setdefault(tree.prefixes[tree.parents[n]], {})
                drawn.setdefault(tree.sources[n], set()).add(tree.tokens[n])
        number = {prefix: i for i, prefix in enumerate(children)}
        rows, columns, lost = list[np.ndarray](), list[dict[int, int]](), list[float]()
        for prefix, by_source in children.items():
            full = [self.target.probs(prefix, self.temperature)]
            for source, draft in enumerate(self.drafts):
                full.append(
                    _point_mass(by_source.get(source, set()), full[0]) if draft is None else self._draft_row(draft, prefix)
                )
            few, column, moved = joined(full, set().union(*by_source.values()))
            rows.append(few)
            columns.append(column)
            lost.append(moved)
        width = max(row.shape[1] for row in rows)
        wide = np.zeros((len(rows), len(rows[0]), width), np.float32)
        for i, row in enumerate(rows):
            wide[i, :, : row.shape[1]] = row
        arrays: dict[str, np.ndarray] = {"rows": wide, "lost": np.array(lost)}
        for (kind, paths), tree in self.trees.items():
            tokens = [0] + [columns[number[tree.prefixes[u]]][t] for t, u in zip(tree.tokens[1:], tree.parents[1:], strict=True)]
            at = [number.get(prefix, -1) for prefix in tree.prefixes]
            arrays[f"{kind}/{paths}"] = np.array([tokens, tree.parents, tree.paths, tree.depths, at, tree.sources])
        return arrays

    def _draft_row(self, draft: RowStore, prefix: tuple[int, ...]) -> np.ndarray:
        return draft.probs(prefix, self.temperature)


def _point_mass(tokens: set[int], like: np.ndarray) -> np.ndarray:
    row = np.zeros_like(like)
    row[list(tokens)] = 1.0
    return row


def measure(
    context: Context, target: RowStore, drafts: Mapping[str, RowStore], temperatures: Sequence[float], seed: int, file: Path
) -> None:
    """Draw all trees behind a context, score them with the target in as few forward passes as fit, and write the file.

    Draft models that the file has already are left out. The first draft model also drafts beside the second one, and beside an n-gram lookup in the context.
    """
    arrays: dict[str, np.ndarray] = (
        dict(np.load(file))
        if file.exists()
        else {
            "answer": np.array(context.answer),
            "text": np.array(context.text),
            "token_ids": np.array(context.token_ids),
        }
    )
    target.open(context.token_ids)
    groups: dict[tuple[str, float], Group] = {}
    first, *others = drafts
    for name in missing_drafts(drafts, arrays):
        rows = drafts[name]
        rows.open(context.token_ids)
        for (T, kind, paths), tree in draw_trees(rows, name, temperatures, seed).items():
            groups.setdefault((name, T), Group(target, [rows], T)).trees[kind, paths] = tree
        for T in temperatures:
            chain = _path(groups[name, T].trees["iid", 4], 0)
            for kind, distinct in (("iid spares", False), ("distinct spares", True)):
                groups[name, T].trees[kind, 4] = with_spares(rows, name, T, seed, chain, distinct)
    copied = lookup(context.token_ids)
    for T in temperatures if (first, temperatures[0]) in groups else ():
        chain = _path(groups[first, T].trees["iid", 4], 0)
        for other in others[:1]:
            second = _path(groups[other, T].trees["iid", 4], 0)
            pair = groups[f"{first} + {other}", T] = Group(target, [drafts[first], drafts[other]], T)
            pair.trees["independent", 2] = side_by_side(chain, second)
        beside = groups[f"{first} + {LOOKUP}", T] = Group(target, [drafts[first], None], T)
        beside.trees["independent", 2] = side_by_side(chain, copied)
    for group in groups.values():
        inner = [tree.prefixes[n] for tree in group.trees.values() for n in tree.inner()]
        target.fill(inner)
        for draft in group.drafts:
            if draft is not None:
                draft.fill(inner)
    for (name, T), group in groups.items():
        arrays |= {f"{name}|{T}|{key}": value for key, value in group.arrays().items()}
    partial = file.with_suffix(".part")
    with partial.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]
    partial.rename(file)
    file.with_suffix(".json").unlink(missing_ok=True)


def missing_drafts(drafts: Iterable[str], stored: Iterable[str]) -> list[str]:
    """Draft models of which a file of rows has none. stored: names of its arrays."""
    measured = {name.split("|")[0] for name in stored}
    return [name for name in drafts if name not in measured]


def stored_context(file: Path) -> Context:
    """The context whose rows a file has."""
    with np.load(file) as stored:
        return Context(str(stored["text"]), int(stored["answer"]), tuple(stored["token_ids"].tolist()))


def _path(tree: DraftTree, path: int) -> list[int]:
    return [t for t, p, d in zip(tree.tokens, tree.paths, tree.depths, strict=True) if p == path and d > 0]
