"""How often the nodes of several drafters turn out right, and which of them to take: what a mixture learns and decides.

s  source      a(s, d, g)  how often nodes of source s, at depth d, of score grade g, were right once their parent was
r(s)           accepted over expected nodes of s: corrects the scores of a source where a cell has seen little
v              value of a node: the product along its path of the best source's estimate (for nodes that more than one
               source proposes, 1 - prod(1 - a)^AGREEMENT of the others)
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, add_best, is_full, limits, new_tree, plant
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

DEPTHS = 4
"""Depths that are counted apart; deeper nodes count as the last."""
GRADE_ENDS = np.array([0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 0.95])
"""Scores at which a grade ends."""
PRIOR_WEIGHT = 4.0
PRIOR_RATIO = 0.6
"""Nodes that a prior counts for, and r(s) where none was counted."""
AGREEMENT = 0.5
"""1 would take sources that propose a node for independent, 0 for one."""
CANDIDATE = np.dtype([*((name, np.int64) for name in ("token", "parent", "source")), ("score", np.float64)])
"""A proposed node; its parent is a candidate before it, or -1 for the root."""
MERGED = np.dtype(
    [
        *((name, np.int64) for name in ("token", "above", "source")),
        *((name, np.float64) for name in ("best", "misses")),
    ]
)
"""Candidates of one prefix: the node above, the source of the best estimate, and the product of how often the others miss."""


class SourceCounts(NamedTuple):
    """Decayed sums over nodes whose parent was right. right, tried: [sources, DEPTHS, grades].  total_right, expected: [sources]."""

    right: np.ndarray
    tried: np.ndarray
    total_right: np.ndarray
    expected: np.ndarray


class SourceCredit:
    """How often each source's nodes were right. One belongs to each request, unless it is given to the drafter.

    decay: weight of a step relative to the one after it.

    Example:
        >>> credit = SourceCredit(1)
        >>> round(credit.estimate(0, depth=1, score=1.0), 2)
        0.6
        >>> for _ in range(20):
        ...     credit.learn(0, depth=1, score=1.0, right=False)
        >>> round(credit.estimate(0, depth=1, score=1.0), 2)
        0.02
    """

    def __init__(self, num_sources: int, decay: float = 0.99) -> None:
        if not 0 < decay <= 1:
            raise InvalidInputError(f"decay={decay} was given; expected 0 < decay <= 1.")
        self.decay = decay
        self.lock = threading.RLock()
        cells = num_sources, DEPTHS, len(GRADE_ENDS) + 1
        self.counts = SourceCounts(
            np.zeros(cells), np.zeros(cells), np.zeros(num_sources), np.zeros(num_sources)
        )

    def estimate(self, source: int, *, depth: int, score: float) -> float:
        """Chance that a node of this source is right if its parent is. depth: from 1."""
        return float(_estimate(self.counts, source, depth, score))

    def learn(self, source: int, *, depth: int, score: float, right: bool) -> None:
        """One node whose parent was right."""
        with self.lock:
            _learn(self.counts, source, depth, score, right)

    def learn_step(self, candidates: np.ndarray, emitted: Sequence[int]) -> None:
        """All nodes that were proposed before these tokens came out. candidates: of CANDIDATE."""
        with self.lock:
            _learn_step(self.counts, self.decay, candidates, np.array(emitted, np.int64))

    def choose(
        self, root: int, candidates: np.ndarray, budget: Budget, eos: np.ndarray
    ) -> tuple[GrownTree, np.ndarray]:
        """The tree of the most valuable nodes, scored by their values, and [N] the source that each owes its estimate to.

        candidates: of CANDIDATE, those of each source after their parents.
        """
        tree = new_tree(budget, eos)
        sources = np.full(budget.max_nodes + 1, -1)
        with self.lock:
            _choose(tree, sources, root, self.counts, candidates, limits(budget))
        return GrownTree(tree), sources


@njit(cache=True)
def _grade(score):
    g = 0
    while g < len(GRADE_ENDS) and score >= GRADE_ENDS[g]:
        g += 1
    return g


@njit(cache=True)
def _estimate(counts, s, depth, score):
    d = min(depth, DEPTHS) - 1
    g = _grade(score)
    ratio = (counts.total_right[s] + PRIOR_WEIGHT * PRIOR_RATIO) / (counts.expected[s] + PRIOR_WEIGHT)
    prior = min(max(score * ratio, 0.005), 0.98)
    return (counts.right[s, d, g] + PRIOR_WEIGHT * prior) / (counts.tried[s, d, g] + PRIOR_WEIGHT)


@njit(cache=True)
def _learn(counts, s, depth, score, right):
    d = min(depth, DEPTHS) - 1
    g = _grade(score)
    counts.tried[s, d, g] += 1
    counts.expected[s] += score
    if right:
        counts.right[s, d, g] += 1
        counts.total_right[s] += 1


@njit(cache=True)
def _learn_step(counts, decay, candidates, emitted):
    counts.right[:] *= decay
    counts.tried[:] *= decay
    counts.total_right[:] *= decay
    counts.expected[:] *= decay
    level = np.full(len(candidates), -1, np.int64)  # depth of the nodes whose path is what was emitted
    for i in range(len(candidates)):
        node = candidates[i]
        above = 0 if node.parent < 0 else level[node.parent]
        if 0 <= above < len(emitted):
            right = node.token == emitted[above]
            _learn(counts, node.source, above + 1, node.score, right)
            if right:
                level[i] = above + 1


@njit(cache=True)
def _merge(merged, counts, candidates):
    """Merge equal prefixes: the node of each candidate is noted in `above` of its children; returns how many nodes there are."""
    place = np.empty(len(candidates), np.int64)
    depth = np.empty(len(candidates), np.int64)
    size = 0
    for i in range(len(candidates)):
        candidate = candidates[i]
        up = -1 if candidate.parent < 0 else place[candidate.parent]
        level = 1 if up < 0 else depth[up] + 1
        p = _estimate(counts, candidate.source, level, candidate.score)
        n = size
        if candidate.source > 0:  # the first source's nodes are distinct
            for m in range(up + 1, size):
                if merged[m].above == up and merged[m].token == candidate.token:
                    n = m
                    break
        node = merged[n]
        if n == size:
            size += 1
            depth[n] = level
            node.token = candidate.token
            node.above = up
            node.best = p
            node.misses = 1.0
            node.source = candidate.source
        else:
            node.misses *= (1 - min(p, node.best)) ** AGREEMENT
            if p > node.best:
                node.best = p
                node.source = candidate.source
        place[i] = n
    return size


@njit(cache=True)
def _choose(tree, sources, root, counts, candidates, limits):
    plant(tree, root, limits)
    merged: Any = np.empty(len(candidates), MERGED)
    size = _merge(merged, counts, candidates)
    value = np.empty(size)
    parents = np.empty(size, np.int64)
    for n in range(size):
        node = merged[n]
        value[n] = (1 - (1 - node.best) * node.misses) * (1.0 if node.above < 0 else value[node.above])
        parents[n] = 0 if node.above < 0 else -1
    while not is_full(tree):
        added, place = add_best(tree, parents, value, merged["token"], value, size)
        if added < 0:
            break
        sources[place] = merged[added].source
        for n in range(added + 1, size):
            if merged[n].above == added:
                parents[n] = place
