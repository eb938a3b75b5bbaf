"""Rows and draft shapes for `polydraft.testing`: those of the oracle file, drafts that grow, and one that grows wrongly."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydraft.core import DraftSampling, TreeShape
from polydraft.testing import Counts, Grown, Path, by_position, enumerate_drafts, sibling_draws


@dataclass
class Markov:
    """Rows that depend on the last token alone, as in the oracle file."""

    p: np.ndarray
    q: np.ndarray
    root: int

    @property
    def V(self) -> int:
        return len(self.p)

    def row(self, which: str, path: Path) -> np.ndarray:
        return (self.p if which == "p" else self.q)[path[-1] if path else self.root]


def stopped_inside(tables: Any, distribution: DraftSampling) -> list[Grown]:
    """Wrong: of two children of the root the second is drawn only after a look at the first, and not where that is the likeliest."""
    q = tables.row("q", ())
    found = dict[Path, float]()
    for probability, (first, *more) in sibling_draws(distribution, [q] * 2, 2):
        draws = (first,) if first == q.argmax() else (first, *more)
        found[draws] = found.get(draws, 0.0) + probability
    return [Grown(w, [0, *x], [-1, *[0] * len(x)], [(), *((t,) for t in x)], []) for x, w in found.items()]


def with_spares(
    tables: Any,
    depth: int,
    choose: Callable[[Path], Iterable[int]],
    keep: Callable[[Path], bool] = lambda path: True,
    *,
    again: bool = False,
) -> list[Grown]:
    """Chains, behind each of which spare siblings are drawn: at the nodes, the root 0, that `choose` says after a look at the whole chain.

    keep: wrong, a spare whose path does not pass is dropped.  again: wrong, spares come from q itself, the elder's token included.
    """
    chains = enumerate_drafts(
        tables, DraftSampling.WITHOUT_REPLACEMENT, by_position(-1, *range(depth)), depth
    )
    every = list[Grown]()
    for chain in chains:
        drafts = [chain]
        for n in choose(chain.paths[-1]):
            path = chain.paths[n]
            elder = chain.paths[n + 1][-1]
            rest = (
                tables.row("q", path) * (np.arange(tables.V) != elder) if not again else tables.row("q", path)
            )
            if rest.sum() > 0:
                drafts = [_spare(d, n, int(x), rest, keep) for d in drafts for x in np.flatnonzero(rest)]
        every += drafts
    return every


def _spare(d: Grown, n: int, x: int, rest: np.ndarray, keep: Callable[[Path], bool]) -> Grown:
    path = (*d.paths[n], x)
    probability = d.probability * rest[x] / rest.sum()
    if not keep(path):
        return replace(d, probability=probability)
    tokens = [*d.tokens, x]
    parents = [*d.parents, n]
    places = [*d.places, (*d.places[n], 1)]
    return replace(
        d, probability=probability, tokens=tokens, parents=parents, paths=[*d.paths, path], places=places
    )


def by_depth(*counts: int) -> Counts:
    """The same number of children at every node of a depth."""
    return lambda d, n: counts[len(d.paths[n])] if len(d.paths[n]) < len(counts) else 0


def looks_back(d: Grown, n: int) -> int:
    """A growth that depends on sampled values but never looks ahead: two at the root, then by the token reached."""
    return 2 if n == 0 else (1, 2, 0, 1, 0)[d.tokens[n]]


def across(d: Grown, n: int) -> int:
    """A growth across branches: two at the root, one below its first child, two below its second where that one is token 0, else none.

    So copies of one context are given their draws in turn, and how many come last depends on the first of them.
    """
    if n == 2:
        return (
            2 if 0 in (token for token, parent in zip(d.tokens, d.parents, strict=True) if parent == 1) else 0
        )
    return 2 - n if n < 2 else 0


def ragged(*lengths: int) -> Counts:
    """Paths from the root of these lengths."""
    return lambda d, n: int(len(d.places[n]) < lengths[d.places[n][0]]) if n else len(lengths)


SHAPES: dict[TreeShape, list[tuple[str, Counts, int]]] = {
    TreeShape.CHAIN: [("chain of 2", by_depth(1, 1), 2)],
    TreeShape.PATHS: [
        ("2 paths of 2", by_depth(2, 1), 2),
        ("3 paths of 1", by_depth(3), 1),
    ],
    TreeShape.PRODUCT: [("2 x 2", by_depth(2, 2), 2), ("trunk, then 2", by_depth(1, 2), 2)],
    TreeShape.GROWN: [("grown", looks_back, 2), ("grown across branches", across, 2)],
    TreeShape.RAGGED: [("3 and 1", ragged(3, 1), 3)],
    TreeShape.BY_POSITION: [
        ("3, then 2", by_position(-1, 0, 0, 0, 1, 1), 2),
        ("a chain and two leaves", by_position(-1, 0, 0, 1, 1, 3), 3),
    ],
}
