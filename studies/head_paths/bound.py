"""What no verifier exceeds on the mean, estimated on the very drafts on which verifiers are evaluated.

A lossless verifier accepts a context v with a chance of T(parent) p(v) at most, and only where v was drawn, which has the chance D(v):

    T(v) = min(T(parent) p(v), D(v)),   tokens per step <= 1 + sum over v of T(v) = E[1 + sum over drawn v of T(v) / D(v)].

The last mean is over drafts. Each of its terms is 1 at most, and a draft that is easy to accept has more of them: the share of the bound that a verifier
reaches has a smaller error than either. Of a single draft a verifier may accept more than that draft's estimate, on the mean none does.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from studies.several_drafts.verified import AT, DEPTH, PARENT, PATH

__all__ = ["bound", "inclusion"]

STEP = 0.25
"""Of the logarithm of time in `inclusion`; half of it changes no value by 1e-9."""


def inclusion(q: Float[np.ndarray, " V"], tokens: Sequence[int], most: int) -> Float[np.ndarray, "n most"]:
    """Chances that each of some tokens is among the first 1, 2, .. `most` draws without replacement.

    The draws are the order in which clocks of rates q ring: the integral over the time of a token's own clock of its density and of the chance that
    fewer than K others rang before.

    Example:
        >>> inclusion(np.array([0.5, 0.3, 0.2]), [0, 2], 2).round(6).tolist()  # 0.5 + 0.3 * 5 / 7 + 0.2 * 5 / 8
        [[0.5, 0.839286], [0.2, 0.485714]]
    """
    own = np.maximum(q[list(tokens)].astype(np.float64), 1e-30)[:, None]
    times = np.exp(np.arange(np.log(1e-10), np.log(50 / own.min()), STEP))
    rang = np.zeros((len(tokens), len(times), most))  # chances that so many others rang before
    rang[:, :, 0] = 1.0
    for column in np.flatnonzero(q):
        chance = (np.array(tokens) != column)[:, None, None] * -np.expm1(-float(q[column]) * times)[None, :, None]
        moved = rang[:, :, :-1] * chance
        rang *= 1.0 - chance
        rang[:, :, 1:] += moved
    density = own * times * np.exp(-own * times) * STEP
    return np.einsum("nt,ntk->nk", density, rang.cumsum(2)).clip(own, 1.0)


def _copies(counts: Float[np.ndarray, " m"], q: float) -> Float[np.ndarray, " m"]:
    """Distribution of the number of copies of a child of probability q, from that of its parent, of draws at equal steps of one uniform."""
    below = np.zeros_like(counts)
    for copies, chance in enumerate(counts):
        few = min(int(copies * q), copies)
        below[few] += chance * (1 - (copies * q - few))
        below[min(few + 1, copies)] += chance * (copies * q - few)
    return below


def _distinct(tree: Int[np.ndarray, "6 N"]) -> Int[np.ndarray, " N"]:
    """The first node of each context."""
    first, places = np.zeros(tree.shape[1], np.int64), dict[tuple[int, int], int]()
    for n in range(1, tree.shape[1]):
        first[n] = places.setdefault((int(first[tree[PARENT, n]]), int(tree[0, n])), n)
    return first


def _drawn(kind: str, tree: Int[np.ndarray, "6 N"], q: Float[np.ndarray, " N"], rows: np.ndarray, paths: int) -> np.ndarray:
    """D(v) of every node. q: its path's probability."""
    if kind in ("chain", "iid"):
        return -np.expm1(paths * np.log1p(-np.minimum(q, 1 - 1e-16)))
    drawn = np.ones(len(q))
    if kind == "systematic":
        counts = {0: np.eye(paths + 1)[paths]}
        for n in range(1, len(q)):
            parent = int(tree[PARENT, n])
            counts[n] = _copies(counts[parent], float(rows[tree[AT, parent], 1, tree[0, n]]))
            drawn[n] = counts[n][1:].sum()
        return drawn
    several = {0} if kind == "without_replacement" else {int(n) for n in tree[PARENT, 1:]}
    for parent in several:
        children = np.flatnonzero(tree[PARENT] == parent)
        drawn[children] = q[parent] * inclusion(rows[tree[AT, parent], 1], tree[0, children].tolist(), paths)[:, -1]
    for n in range(1, len(q)):
        parent = int(tree[PARENT, n])
        if parent not in several:
            drawn[n] = drawn[parent] * rows[tree[AT, parent], 1, tree[0, n]]
    return drawn


def bound(kind: str, tree: Int[np.ndarray, "6 N"], rows: Float[np.ndarray, "R M W"]) -> list[float]:
    """Estimate, by one draft, of the tokens per step that no lossless verifier exceeds on the mean, by depth from 1 on.

    kind: how the draft was drawn, a key of `values.KINDS`.  tree, rows: as `several_drafts.measure` stores them, cut to the draft's paths.
    """
    paths, first = len(np.unique(tree[PATH, tree[DEPTH] > 0])), _distinct(tree)
    q, reached = np.ones(tree.shape[1]), np.ones(tree.shape[1])
    for n in range(1, tree.shape[1]):
        q[n] = q[tree[PARENT, n]] * rows[tree[AT, tree[PARENT, n]], 1, tree[0, n]]
    drawn, totals = _drawn(kind, tree, q, rows, paths), np.zeros(int(tree[DEPTH].max()))
    for n in range(1, tree.shape[1]):
        parent = int(tree[PARENT, n])
        reached[n] = min(reached[parent] * float(rows[tree[AT, parent], 0, tree[0, n]]), drawn[n])
        totals[tree[DEPTH, n] - 1] += reached[n] / drawn[n] if first[n] == n else 0.0
    return (1 + totals.cumsum()).tolist()
