"""The compiled tries of traversal verification, see `verifiers.traversal`."""

import numpy as np

from polydraft.core import DraftSampling
from polydraft.numerics.compiled_code import njit
from polydraft.verifiers.walks.rows import accepted_weight, copy_normalised, reject, reject_point, without
from polydraft.verifiers.walks.visits import visit_trees


@njit(cache=True, error_model="numpy")
def _was_drawn(turn, x, q, sampling):
    """Whether the token that is tried in this turn was drawn from q; else it is a point mass."""
    return sampling != DraftSampling.POINT_MASS.value and (
        sampling != DraftSampling.GREEDY_PLUS_ONE.value or (turn == 0 and q[x] > 0.0)
    )


@njit(cache=True, error_model="numpy")
def try_next(u, at):
    """The next draw to visit at context u, of equal ones the first, and its weight; draw -1 after the last: at.weight[u] is that of u itself then.

    The draw of the turn before, if there was one, is rejected.
    """
    n = at.counts[u]
    p = at.p[u]
    q = at.untried[at.depth[u]]
    sampling = at.sampling
    tokens = at.tokens[at.kids[u, :n]]
    if sampling == DraftSampling.GREEDY_PLUS_ONE.value:  # the sampled one first
        tokens = np.roll(tokens, 1)
        if at.turn[u] == 0:
            for x in tokens[1:]:
                without(q, x)
    while True:
        turn = at.turn[u]
        w = at.weight[u]
        if turn > 0:
            x = tokens[turn - 1]
            w = at.weight[u] = (
                reject(at.sync, w, p, q) if _was_drawn(turn - 1, x, q, sampling) else reject_point(w, p, x)
            )
            if sampling == DraftSampling.WITHOUT_REPLACEMENT.value:
                without(q, x)
        if turn == n:
            return -1, 0.0
        draw = (turn - 1) % n if sampling == DraftSampling.GREEDY_PLUS_ONE.value else turn
        x = tokens[turn]
        if sampling == DraftSampling.INDEPENDENT.value and turn > 0:
            copy_normalised(at.q[at.rows[at.kids[u, draw]]], q)
        at.turn[u] += 1
        if not (tokens[:turn] == x).any():
            return draw, accepted_weight(w, p[x], q[x] if _was_drawn(turn, x, q, sampling) else 1.0)


@njit(cache=True, error_model="numpy")
def walk(trees):
    """See `walks.visits.visit_trees`."""
    visit_trees(try_next, False, trees)
