"""What the nodes of a most probable tree are worth, by their rank: counted for each sequence from its own rounds, around a prior.

A tree of n nodes and depth D holds, in the order of falling path probability, all smaller ones: leave out what is deeper than D' and
cut after r nodes, and what is left is the tree of that budget. So one verified round tells of every budget (r, D') within its own

    kept[D' - 1, r - 1]     rounds that kept the r-th node within depth D'
    drafted, first [...]    rounds that had such a node, and where it was the first of its depth
    seen[...]               rounds that were asked for it

and the tokens, drafted nodes and passes of the draft model that a budget yields are sums over ranks of what is kept, drafted and first of what
is seen. A rank that a round left empty, as nothing there was worth drafting, counts as seen and not kept; ranks beyond a full tree are
not judged. All are drawn to the prior; for values it is scaled by what was kept over what it expected, so that ranks which were not drafted
lately move with those that were.

What the draft's own path probability of a node means for its value is counted too, by half octaves (a greedy target takes far more than the draft's
law at temperature 1 says): `Budget.least` is the path probability above which nodes have been worth their price.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polydraft.core import Budget
from polydraft.plan.acceptance import Record
from polydraft.plan.sizes import TRIED, Decided, Options
from polydraft.theory.tree_plan import grow_by_probability

__all__ = ["MOST_NODES", "SIZE", "Ranked", "assumed"]

SHAPE = 3, 12, 24
"""What is told apart: kept, drafted, first of its depth; depths; nodes."""
MOST_NODES = SHAPE[2]
BINS = 12
"""Half octaves of path probability, the first below 1."""
SIZE = math.prod(SHAPE) + BINS
"""Of a table: `SHAPE`, flat, then the values by path probability."""
STRENGTH, STRENGTH_ALL, FORGET = 8.0, 12.0, 0.85
"""Rounds that the prior counts for at every rank, and tokens for all together, of which each round leaves so much."""
DECAY = 0.98
"""What is left of a round after the next."""
EXPLORE = 16
"""Drafting rounds of which one looks a quarter more nodes (two at least) and one depth beyond: about 1% of the time."""
_TABLE = math.prod(SHAPE)


def assumed(rates: Sequence[float] | np.ndarray) -> np.ndarray:
    """[SIZE] means where only the acceptance of first children is known, by depth: each next child takes the same share of the rest, and path probabilities are right.

    Example:
        >>> assumed([0.5] * 12)[24:27].tolist()
        [0.5, 0.25, 0.25]
    """
    table = np.zeros(SHAPE)
    table[1] = 1.0
    shares = [a * (1.0 - a) ** np.arange(SHAPE[2]) for a in np.asarray(rates, np.float64)]
    for deepest in range(1, SHAPE[1] + 1):
        tokens, parents, _ = grow_by_probability(
            lambda path: shares[min(len(path), len(shares) - 1)], max_nodes=SHAPE[2], max_depth=deepest
        )
        values, depths = [1.0], [0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            depths.append(depths[parent] + 1)
            values.append(values[parent] * shares[min(depths[parent], len(shares) - 1)][token])
        table[0, deepest - 1, : len(values) - 1] = values[1:]
        table[2, deepest - 1, : len(values) - 1] = np.diff(np.maximum.accumulate(depths))
    return np.concatenate([table.ravel(), 2.0 ** (-0.25 - 0.5 * np.arange(BINS))])


def _of_ranks(kept: np.ndarray, seen: np.ndarray, prior: np.ndarray, counted: int) -> np.ndarray:
    """SHAPE: means by rank. counted: rounds so far."""
    kept, seen, prior = kept[:_TABLE].reshape(SHAPE), seen[: _TABLE // 3].reshape(SHAPE[1:]), prior[:_TABLE].reshape(SHAPE)
    usual = np.nonzero(2.0 * seen[:, 0] >= max(seen[0, 0], 1e-9))[0]
    deepest = usual[-1] if len(usual) else 0
    strength = max(STRENGTH_ALL * FORGET**counted, 0.5)
    scale = (kept[0, deepest].sum() + strength) / (seen[deepest] @ prior[0, deepest] + strength)
    expected = prior * np.array([scale, 1.0, 1.0])[:, None, None]
    return np.minimum((kept + STRENGTH * expected) / (seen + STRENGTH), 1.0)


def _of_bins(kept: np.ndarray, seen: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """[BINS]: means by path probability, which fall with it."""
    means = (kept[_TABLE:] + STRENGTH * prior[_TABLE:]) / (seen[_TABLE // 3 :] + STRENGTH)
    return np.maximum.accumulate(means[::-1])[::-1]


class Ranked:
    """The grid of most probable trees, up to `max_nodes` and `max_depth`.

    Example:
        >>> grid = Ranked(max_depth=4, max_nodes=8)
        >>> grid.budget((3, 5), grid.record(), assumed([0.5]), node_price=0.0).max_nodes
        6
    """

    ranked = True

    def __init__(self, max_depth: int = SHAPE[1], max_nodes: int = SHAPE[2]) -> None:
        sizes = [(min(w * d, max_nodes), min(d, max_depth)) for w, d in TRIED]
        self.tried = tuple(dict.fromkeys(_grown(n, d, 0.0) for n, d in sizes))
        self.max_depth, self.max_nodes = min(max_depth, SHAPE[1]), min(max_nodes, SHAPE[2])
        nodes, depths = np.arange(1, self.max_nodes + 1), np.arange(1, self.max_depth + 1)[:, None]
        self._branching, self._possible = (nodes > depths).astype(float), nodes >= depths

    def record(self, lasting: float | None = None) -> Record:
        """Of a sequence that has shown nothing yet."""
        return Record(np.zeros(SIZE), np.zeros(_TABLE // 3 + BINS), lasting=lasting)

    def options(self, record: Record, prior: np.ndarray, *, greedy: bool) -> Options:
        """What a sequence may expect of every budget, at any temperature."""
        table = _of_ranks(record.kept, record.seen, prior, record.counted)[:, : self.max_depth, : self.max_nodes].cumsum(-1)
        return Options((1.0 + table[0]) * self._possible, table[1], table[2], self._branching)

    def budget(self, size: tuple[int, int], record: Record, prior: np.ndarray, node_price: float) -> Budget:
        """Of a size on the grid, without nodes that are worth less than `node_price` tokens; now and then one that looks beyond it."""
        row, column = size
        if (record.counted + 1) % EXPLORE == 0:
            more = column + max(2, (column + 1) // 4)
            return _grown(min(more, self.max_nodes - 1) + 1, min(row + 1, self.max_depth - 1) + 1, 0.0)
        worth = _of_bins(record.kept, record.seen, prior)
        return _grown(column + 1, row + 1, 2.0 ** (-0.5 * max(1, int((worth >= node_price).sum()))))

    def count(self, record: Record, decided: Decided, prior: np.ndarray) -> None:
        """Fold in a round."""
        budget, depth = decided.budget, decided.depths
        depths, accepted = np.array(depth[1:]), np.zeros(len(depth) - 1)
        accepted[np.array(decided.path, np.int64) - 1] = 1.0
        record.fade(record.lasting or DECAY)
        kept, seen = record.kept[:_TABLE].reshape(SHAPE), record.seen[: _TABLE // 3].reshape(SHAPE[1:])
        for D in range(min(budget.max_depth, SHAPE[1])):
            within = depths <= D + 1
            found, of = accepted[within][: SHAPE[2]], depths[within][: SHAPE[2]]
            n = len(of)
            kept[0, D, :n] += found
            kept[1, D, :n] += 1.0
            kept[2, D, :n] += np.diff(np.maximum.accumulate(np.concatenate([[0], of]))) > 0
            seen[D, : max(n, budget.max_nodes) if len(depths) < budget.max_nodes else n] += 1.0
        bins = np.minimum((-2.0 * np.log2(np.maximum(decided.scores[1 : len(depth)], 1e-9))).astype(np.int64), BINS - 1)
        record.kept[_TABLE:] += np.bincount(bins, accepted, BINS)
        record.seen[_TABLE // 3 :] += np.bincount(bins, minlength=BINS)
        record.fold(len(decided.path))

    def learnt(self, record: Record, prior: np.ndarray, *, greedy: bool) -> dict[str, Any]:
        """What the rounds of all sequences say of a profile whose table was taken to be `prior`."""
        given = record.kept, record.seen, prior
        table = np.concatenate([_of_ranks(*given, record.counted).ravel(), _of_bins(*given)])
        return {"greedy_ranked" if greedy else "ranked": tuple(table.tolist())}


def _grown(nodes: int, depth: int, least: float) -> Budget:
    return Budget.grown(nodes, depth, width=max(1, math.ceil(nodes / depth)), least=least)
