"""Expected tokens per step of every verifier on the trees of measured contexts, whose verification is integrated: only drafts are random."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.methods import registry
from studies.several_drafts.draws import MAX_DEPTH
from studies.theory import efficiency

__all__ = ["RULES", "Case", "Values", "bound", "distinct_nodes", "drafted", "evaluate", "read_values", "restricted"]

RULES: Mapping[str, tuple[DraftSampling, tuple[str, ...]]] = {
    "chain": (DraftSampling.IID, ("speculative", "block")),
    "iid": (DraftSampling.IID, ("recursive", "kseq", "importance", "multipath", "traversal", "greedy_traversal")),
    "without_replacement": (DraftSampling.WITHOUT_REPLACEMENT, ("recursive_wor", "traversal", "greedy_traversal_wor")),
    "greedy_plus_one": (DraftSampling.GREEDY_PLUS_ONE, ("greedy_plus_one", "traversal")),
    "systematic": (DraftSampling.SYSTEMATIC, ("flow",)),
    "iid spares": (DraftSampling.IID, ("single_with_spares", "traversal")),
    "distinct spares": (DraftSampling.WITHOUT_REPLACEMENT, ("single_with_spares", "traversal")),
    "independent": (DraftSampling.INDEPENDENT, ("recursive", "importance", "traversal")),
}
"""Kind of tree -> how its siblings were drawn, and verifiers that are exact for it."""
BATCH = 8
"""Contexts that are verified together."""
PARENT, PATH, DEPTH, AT, SOURCE = range(1, 6)
"""Rows of a stored tree, behind its tokens: AT is the place of a node's distributions."""


class Case(NamedTuple):
    """Draft model or models, temperature, kind of tree, paths, depth and verifier of one value."""

    draft: str
    temperature: float
    kind: str
    paths: int
    depth: int
    verifier: str


class Values(NamedTuple):
    """What one context yields. tokens: per step, by case.  nodes: distinct ones by depth, root first, of (draft, temperature, kind, paths).
    overlap: of target and draft distribution at the root, by (draft, temperature).  lost: how much joined columns change such a sum on the mean, by draft."""

    answer: int
    text: str
    tokens: dict[Case, float]
    nodes: dict[tuple[str, float, str, int], list[float]]
    overlap: dict[tuple[str, float], float]
    lost: dict[str, float]


def restricted(stored: np.ndarray, paths: Sequence[int], depth: int) -> np.ndarray:
    """Some paths of a tree, cut to a depth: what a smaller budget would have drawn."""
    stays = (stored[DEPTH] <= depth) & (np.isin(stored[PATH], paths) | (stored[DEPTH] == 0))
    number = np.cumsum(stays) - 1
    part = stored[:, stays].copy()
    part[PARENT] = np.where(part[PARENT] >= 0, number[part[PARENT]], -1)
    return part


def drafted(
    trees: Sequence[np.ndarray], rows: Sequence[np.ndarray], sampling: DraftSampling, shape: TreeShape
) -> tuple[Draft, torch.Tensor]:
    """A batch of stored trees as a draft, and the target's distributions at their nodes; of leaves, which no verdict's mean depends on, any."""
    B, N, W = len(trees), max(tree.shape[1] for tree in trees), max(row.shape[2] for row in rows)
    tokens, parents, number = np.zeros((B, N), np.int64), np.full((B, N), -1), np.full((B, N), -1)
    p, q = np.zeros((B, N, W)), np.zeros((B, N, W))
    for b, (tree, own) in enumerate(zip(trees, rows, strict=True)):
        n, width = tree.shape[1], own.shape[2]
        tokens[b, :n], parents[b, :n] = tree[0], tree[PARENT]
        p[b, :n, :width] = own[np.maximum(tree[AT], 0), 0]
        p[b, n:] = p[b, 0]
        place: dict[tuple[int, int], int] = {}
        for child in range(1, n):
            drawn_from = int(tree[AT, tree[PARENT, child]]), int(tree[SOURCE, child])
            number[b, child] = place.setdefault(drawn_from, len(place))
        for (at, source), row in place.items():
            q[b, row, :width] = own[at, 1 + source]
        q[b, len(place) :, 0] = 1.0
    tree = TokenTree.of(tokens, parents)
    used = int(number.max()) + 1
    return Draft(
        tree, sampling, shape, torch.from_numpy(q[:, : max(used, 1)].copy()), torch.from_numpy(number)
    ), torch.from_numpy(p)


def bound(tree: np.ndarray, rows: np.ndarray, paths: int, *, systematic: bool = False) -> list[float]:
    """Tokens per step that no verifier of so many iid paths exceeds on the mean, by depth from 1 on.

    A node v is accepted with T(v) <= min(T(parent) p, 1 - (1 - q(path))^K), as it is drawn no more often. The sum of T over a depth is that over the
    children of all nodes above, estimated by those drawn, each over q(path).  tree: of iid paths.  systematic: of so many paths at equal steps, which
    draw a node with min(1, K q(path)) at most.
    """

    def drawn_once(q: np.ndarray) -> np.ndarray:
        return np.minimum(paths * q, 1.0) if systematic else -np.expm1(paths * np.log1p(-np.minimum(q, 1 - 1e-16)))

    num_paths, depth = int(tree[PATH].max()) + 1, int(tree[DEPTH].max())
    totals = np.zeros(depth)
    for path in range(num_paths):
        reach, drawn, parent = 1.0, 1.0, 0
        for n in np.flatnonzero((tree[PATH] == path) & (tree[DEPTH] > 0)):
            p, q = rows[tree[AT, parent], :2].astype(np.float64)
            below = np.minimum(reach * p, drawn_once(drawn * q))
            totals[tree[DEPTH, n] - 1] += below.sum() / drawn / num_paths
            reach, drawn, parent = below[tree[0, n]], drawn * q[tree[0, n]], n
    return (1 + totals.cumsum()).tolist()


def _sizes(kind: str, paths: int) -> Iterator[tuple[str, int, list[range]]]:
    """(kind, number of paths, which paths) of the restrictions of a stored tree; of iid paths as many as are disjoint."""
    if kind == "iid":
        yield "chain", 1, [range(path, path + 1) for path in range(paths)]
    nested = kind in ("iid", "without_replacement", "iid spares", "distinct spares")
    for k in range(2 if nested else paths, paths + 1):
        yield kind, k, [range(i, i + k) for i in range(0, paths - k + 1, k)] if kind == "iid" else [range(k)]


def _shape(kind: str) -> TreeShape:
    return TreeShape.CHAIN if kind == "chain" else TreeShape.BY_POSITION if "spares" in kind else TreeShape.PATHS


def evaluate(files: Sequence[Path]) -> list[Values]:
    """The values of some contexts, verified together."""
    contexts = [np.load(file) for file in files]
    values = [Values(int(c["answer"]), str(c["text"]), {}, {}, {}, _lost(c)) for c in contexts]
    for stored in contexts[0].files:
        if "/" not in stored:
            continue
        draft, temperature, key = stored.split("|")
        T, kind, width = float(temperature), key.split("/")[0], int(key.split("/")[1])
        rows = [c[f"{draft}|{temperature}|rows"] for c in contexts]
        trees = [c[stored] for c in contexts]
        for one, tree, own in zip(values, trees, rows, strict=True):
            one.overlap[draft, T] = float(np.minimum(own[0, 0], own[0, 1]).sum())
            if kind == "iid":
                for k in range(1, width + 1):
                    for depth, value in enumerate(bound(tree, own, k), 1):
                        one.tokens[Case(draft, T, "bound", k, depth, "bound")] = value
        for small, k, choices in _sizes(kind, width):
            for one, tree in zip(values, trees, strict=True):
                counts = [distinct_nodes(restricted(tree, paths, MAX_DEPTH)) for paths in choices]
                one.nodes[draft, T, small, k] = np.mean(counts, 0).tolist()
            for depth in range(1, MAX_DEPTH + 1):
                sampling, verifiers = RULES[small]
                parts = [restricted(tree, paths, depth) for paths in choices for tree in trees]
                draft_trees, p = drafted(parts, rows * len(choices), sampling, _shape(small))
                for name in verifiers:
                    tokens = efficiency.expected_tokens(draft_trees, registry.verifier(name)(draft_trees, p))
                    for one, value in zip(values, tokens.reshape(len(choices), -1).mean(0).tolist(), strict=True):
                        one.tokens[Case(draft, T, small, k, depth, name)] = value
    return values


def _lost(context: Mapping[str, np.ndarray]) -> dict[str, float]:
    by_draft: dict[str, list[np.ndarray]] = {}
    for name in context:
        if name.endswith("|lost"):
            by_draft.setdefault(name.split("|")[0], []).append(context[name])
    return {draft: float(np.concatenate(parts).mean()) for draft, parts in by_draft.items()}


def distinct_nodes(tree: np.ndarray) -> list[int]:
    """By depth, root first; copies of a context are one row of a forward pass."""
    prefixes: list[tuple[int, ...]] = [()]
    for token, parent in tree[:2, 1:].T.tolist():
        prefixes.append((*prefixes[parent], token))
    depths = [len(prefix) for prefix in set(prefixes)]
    return np.bincount(depths, minlength=MAX_DEPTH + 1).tolist()


def read_values(folder: Path) -> list[Values]:
    """The values of all contexts of a folder; those that are new are computed, and written beside the rows."""
    files = sorted(folder.glob("*.npz"))
    missing = [file for file in files if not file.with_suffix(".json").exists()]
    for begin in range(0, len(missing), BATCH):
        batch = missing[begin : begin + BATCH]
        for file, value in zip(batch, evaluate(batch), strict=True):
            plain = value._asdict() | {
                part: [[*key, number] for key, number in getattr(value, part).items()] for part in ("tokens", "nodes", "overlap")
            }
            file.with_suffix(".json").write_text(json.dumps(plain), encoding="utf-8")
    return [_from_plain(json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))) for file in files]


def _from_plain(plain: dict[str, list[list[object]]]) -> Values:
    parts = {part: {tuple(entry[:-1]): entry[-1] for entry in plain[part]} for part in ("tokens", "nodes", "overlap")}
    parts["tokens"] = {Case(*case): value for case, value in parts["tokens"].items()}  # type: ignore[arg-type]
    return Values(**(plain | parts))  # type: ignore[arg-type]
