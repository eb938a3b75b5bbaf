"""The compiled tries of greedy traversal verification of draws without replacement, see `verifiers.greedy_traversal_wor`."""

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, num_pieces, share_row
from polydraft.sampling.truncation import first_place, highest
from polydraft.verifiers.walks.greedy_traversal import BUCKETS, order_by_ratio
from polydraft.verifiers.walks.rows import accepted_weight, compiled, reject, scale, total, without
from polydraft.verifiers.walks.visits import visit_trees


@compiled
def _others(q):
    """The likeliest token, and the sum of the others."""
    top = first_place(q, highest(q))
    before = q[:top]
    behind = q[top + 1 :]
    return top, total(before) + total(behind)


@compiled
def _sum_others(arguments, begin, end, thread):
    q, buckets, top, whole, C, A = arguments
    for start in range(begin, end, PIECE):
        mass = C[start // PIECE]
        ratio = A[start // PIECE]
        last = min(start + PIECE, end)
        masses = q[start:last]
        places = buckets[start:last]
        for t in range(masses.size):
            if masses[t] > 0.0 and t != top - start:
                mass[places[t]] += masses[t]
                ratio[places[t]] += masses[t] / (whole - masses[t])


@compiled
def _fill_higher(arguments, begin, end, thread):
    q, buckets, whole, C, A, out = arguments
    q = q[begin:end]
    buckets = buckets[begin:end]
    out = out[begin:end]
    for t in range(q.size):
        out[t] = (
            q[t] * (max(C[buckets[t]] - q[t], 0.0) / (whole - q[t]) + A[buckets[t]]) if q[t] > 0.0 else 0.0
        )


@njit(cache=True, error_model="numpy")
def _higher(sync, q, buckets, out):
    """q1."""
    top, rest = _others(q)
    whole = rest + q[top]
    sums = np.zeros((2, num_pieces(q.size), BUCKETS))
    arguments = q, buckets, top, whole, sums[0], sums[1]
    share_row(sync, shared_code(_sum_others, arguments), arguments, q.size)
    C = sums[0].sum(0)
    A = sums[1].sum(0)
    A[buckets[top]] += q[top] / rest
    C = C.cumsum()
    A = A.cumsum() - A
    mass_at_top = C[buckets[top]]
    C[buckets[top] :] += q[top]
    arguments = q, buckets, whole, C, A, out
    share_row(sync, shared_code(_fill_higher, arguments), arguments, q.size)
    out[top] = q[top] * (mass_at_top / rest + A[buckets[top]])
    scale(out, 1.0 / total(out))


@compiled
def _fill_lower(arguments, begin, end, thread):
    q, buckets, whole, bucket, factor, out = arguments
    q = q[begin:end]
    buckets = buckets[begin:end]
    out = out[begin:end]
    for t in range(q.size):
        below = 1.0 / (whole - q[t]) if buckets[t] < bucket else 0.0
        out[t] = q[t] * (factor + below) if buckets[t] <= bucket else 0.0


@njit(cache=True, error_model="numpy")
def _lower(sync, q, buckets, first, out):
    """q2 given the higher token."""
    top, rest = _others(q)
    whole = rest + q[top]
    bucket = buckets[first]
    factor = 1.0 / rest if first == top else 1.0 / (whole - q[first])
    arguments = q, buckets, whole, bucket, factor, out
    share_row(sync, shared_code(_fill_lower, arguments), arguments, q.size)
    if buckets[top] < bucket:
        out[top] = q[top] * (factor + 1.0 / rest)
    out[first] = 0.0
    scale(out, 1.0 / total(out))


@njit(cache=True, error_model="numpy")
def try_next(u, at):
    """See `walks.traversal.try_next`; at.status has the draws in the order of the tries."""
    n = at.counts[u]
    d = at.depth[u]
    turn = at.turn[u]
    order = at.status[u]
    p = at.p[u]
    untried = at.untried[d]
    tried = at.tried[d]
    tokens = at.tokens[at.kids[u]]
    if turn > 0:
        is_pair = turn - 1 >= n - 2
        at.weight[u] = reject(at.sync, at.weight[u], p, tried if is_pair else untried)
        if not is_pair:
            without(untried, tokens[order[turn - 1]])
    if turn == n:
        return -1, 0.0
    if turn == n - 2:
        order_by_ratio(at.sync, p, untried, 2, at.buckets[d], tried)
        order[turn] = turn + (at.buckets[d, tokens[turn + 1]] > at.buckets[d, tokens[turn]])
        order[turn + 1] = 2 * n - 3 - order[turn]
        _higher(at.sync, untried, at.buckets[d], tried)
    elif turn == n - 1:
        _lower(at.sync, untried, at.buckets[d], tokens[order[turn - 1]], tried)
    else:
        order[turn] = turn
    at.turn[u] += 1
    x = tokens[order[turn]]
    return order[turn], accepted_weight(at.weight[u], p[x], tried[x] if turn >= n - 2 else untried[x])


@njit(cache=True, error_model="numpy")
def walk(trees):
    """See `walks.visits.visit_trees`."""
    visit_trees(try_next, False, trees)
