"""How often the nodes of several drafters turn out right, and which of them to take: what a mixture learns and decides.

s  source      a(s, d, g)  how often nodes of source s, at depth d, of score grade g, were right once their parent was
r(s)           accepted over expected nodes of s: corrects the scores of a source where a cell has seen little
v              value of a node: the product along its path of the best source's estimate (for nodes that more than one
               source proposes, 1 - prod(1 - a)^AGREEMENT of the others)
"""

import threading
from collections.abc import Sequence

import numpy as np
from numba import njit

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, add_ranked, limits, new_cells, plant
from polydraft.errors import InvalidInputError

__all__ = ["Calibration"]

DEPTHS, GRADES = 4, 8
GRADE_ENDS = np.array([0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 0.95])
PRIOR_WEIGHT = 4.0
PRIOR_RATIO = 0.6
AGREEMENT = 0.5


class Calibration:
    """How often each source's nodes were right. One belongs to each request, unless it is given to the drafter.

    decay: weight of a round relative to the one after it.

    Example:
        >>> calibration = Calibration(1)
        >>> round(calibration.estimate(0, depth=1, score=1.0), 2)
        0.6
        >>> for _ in range(20):
        ...     calibration.learn(0, depth=1, score=1.0, right=False)
        >>> round(calibration.estimate(0, depth=1, score=1.0), 2)
        0.02
    """

    def __init__(self, num_sources: int, decay: float = 0.99) -> None:
        if not 0 < decay <= 1:
            raise InvalidInputError(f"decay={decay} was given; expected 0 < decay <= 1.")
        self.decay, self.lock = decay, threading.RLock()
        self.cells = np.zeros((2, num_sources, DEPTHS, GRADES))  # right, tried
        self.totals = np.zeros((2, num_sources))  # right, expected

    def estimate(self, source: int, *, depth: int, score: float) -> float:
        """Chance that a node of this source is right if its parent is. depth: from 1."""
        return float(_estimate(self.cells, self.totals, source, depth, score))

    def learn(self, source: int, *, depth: int, score: float, right: bool) -> None:
        """One node whose parent was right."""
        with self.lock:
            _learn(self.cells, self.totals, source, depth, score, right)

    def learn_round(self, nodes: tuple[np.ndarray, ...], emitted: Sequence[int]) -> None:
        """All nodes that were proposed before these tokens came out."""
        with self.lock:
            _learn_round(self.cells, self.totals, self.decay, *nodes, np.array(emitted, np.int64))

    def select(self, nodes: tuple[np.ndarray, ...], budget: Budget) -> tuple[np.ndarray, ...]:
        """(token, parent, source, value) of the nodes taken, most valuable first; parents index them, -1 is the root."""
        with self.lock:
            return _select(self.cells, self.totals, *nodes, *limits(budget))

    def grow(
        self, root: int, nodes: tuple[np.ndarray, ...], budget: Budget, eos: np.ndarray
    ) -> tuple[GrownTree, tuple[np.ndarray, ...]]:
        """The tree of what `select` takes, and (token, parent, source) of that."""
        tree = new_cells(budget), eos
        with self.lock:
            size, *taken = _grow(tree, root, self.cells, self.totals, *nodes, *limits(budget))
        return GrownTree.grown(tree, size), tuple(taken)


@njit(cache=True)
def _grade(score):
    g = 0
    while g < len(GRADE_ENDS) and score >= GRADE_ENDS[g]:
        g += 1
    return g


@njit(cache=True)
def _estimate(cells, totals, s, depth, score):
    d, g = min(depth, DEPTHS) - 1, _grade(score)
    ratio = (totals[0, s] + PRIOR_WEIGHT * PRIOR_RATIO) / (totals[1, s] + PRIOR_WEIGHT)
    prior = min(max(score * ratio, 0.005), 0.98)
    return (cells[0, s, d, g] + PRIOR_WEIGHT * prior) / (cells[1, s, d, g] + PRIOR_WEIGHT)


@njit(cache=True)
def _learn(cells, totals, s, depth, score, right):
    d, g = min(depth, DEPTHS) - 1, _grade(score)
    cells[1, s, d, g] += 1
    totals[1, s] += score
    if right:
        cells[0, s, d, g] += 1
        totals[0, s] += 1


@njit(cache=True)
def _learn_round(cells, totals, decay, token, parent, source, score, emitted):
    cells *= decay
    totals *= decay
    level = np.full(len(token), -1, np.int64)  # depth of the nodes whose path is what was emitted
    for i in range(len(token)):
        above = 0 if parent[i] < 0 else level[parent[i]]
        if 0 <= above < len(emitted):
            right = token[i] == emitted[above]
            _learn(cells, totals, source[i], above + 1, score[i], right)
            if right:
                level[i] = above + 1


@njit(cache=True)
def _select(cells, totals, token, parent, source, score, max_nodes, max_depth, width):
    # merge equal prefixes; the nodes of each source come after their parents
    count = len(token)
    node = np.empty(count, np.int64)  # merged node of each candidate
    first = np.empty(count, np.int64)  # candidate that made each merged node
    above, depth = np.empty(count, np.int64), np.empty(count, np.int64)
    best, misses, credit = np.empty(count), np.empty(count), np.empty(count, np.int64)
    size = 0
    for i in range(count):
        up = -1 if parent[i] < 0 else node[parent[i]]
        level = 1 if up < 0 else depth[up] + 1
        p = _estimate(cells, totals, source[i], level, score[i])
        n = -1
        if source[i] > 0:  # the first source's nodes are distinct
            for m in range(up + 1, size):
                if above[m] == up and token[first[m]] == token[i]:
                    n = m
                    break
        if n < 0:
            n = size
            size += 1
            first[n], above[n], depth[n] = i, up, level
            best[n], misses[n], credit[n] = p, 1.0, source[i]
        elif p > best[n]:
            misses[n] *= (1 - best[n]) ** AGREEMENT
            best[n], credit[n] = p, source[i]
        else:
            misses[n] *= (1 - p) ** AGREEMENT
        node[i] = n
    value = np.empty(size)
    for n in range(size):
        value[n] = (1 - (1 - best[n]) * misses[n]) * (1.0 if above[n] < 0 else value[above[n]])
    # take them, most valuable first
    place, inner, paths, num = np.full(size, -1, np.int64), np.zeros(size, np.bool_), 0, 0
    out_token, out_parent = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64)
    out_source, out_value = np.empty(max_nodes, np.int64), np.empty(max_nodes)
    while num < max_nodes:
        take = -1
        for n in range(size):
            if place[n] >= 0 or depth[n] > max_depth or (above[n] >= 0 and place[above[n]] < 0):
                continue
            if take >= 0 and value[n] <= value[take]:
                continue
            if paths < width or (above[n] >= 0 and not inner[above[n]]):
                take = n
        if take < 0:
            break
        up = above[take]
        paths += up < 0 or inner[up]
        if up >= 0:
            inner[up] = True
        place[take] = num
        out_token[num], out_parent[num] = token[first[take]], -1 if up < 0 else place[up]
        out_source[num], out_value[num] = credit[take], value[take]
        num += 1
    return out_token[:num], out_parent[:num], out_source[:num], out_value[:num]


@njit(cache=True)
def _grow(tree, root, cells, totals, token, parent, source, score, max_nodes, max_depth, width):
    plant(tree, root, max_nodes, max_depth, width)
    taken = _select(cells, totals, token, parent, source, score, max_nodes, max_depth, width)
    return add_ranked(tree, taken[0], taken[1], taken[3]), taken[0], taken[1], taken[2]
