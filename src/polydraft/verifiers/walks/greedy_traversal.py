"""The compiled tries of greedy traversal verification, see `verifiers.greedy_traversal`."""

import math

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, num_pieces, share_row
from polydraft.verifiers.walks.rows import accepted_weight, compiled, copy_normalised, reject, total
from polydraft.verifiers.walks.visits import visit_trees

PER_OCTAVE = 16.0
HALF = 128
GATE = 0.2
"""Buckets of an octave, buckets on either side of p = q, and the acceptance that is missing, over n, below which all tokens share one."""
BUCKETS = 2 * HALF + 1
FRACTION_BITS = 23
SQRT_HALF = 0x3F3504F3
"""Of a float32, and the bits of one."""
LOG2 = tuple(2.0 / math.log(2.0) / k for k in (1, 3, 5, 7))
"""log2(m) is the sum of these times s^k, s = (m - 1)/(m + 1)."""
_UNTRIED, _INSIDE, _TRIED, _DONE = range(4)


@compiled
def _overlap(arguments, begin, end, thread):
    p, q, sums = arguments
    for start in range(begin, end, PIECE):
        s = 0.0
        last = min(start + PIECE, end)
        target = p[start:last]
        draft = q[start:last]
        for t in range(target.size):
            s += min(target[t], draft[t])
        sums[start // PIECE] = s


@compiled
def _fill_buckets(arguments, begin, end, thread):
    p, q, buckets, ratio = arguments
    p = p[begin:end]
    q = q[begin:end]
    buckets = buckets[begin:end]
    ratio = ratio[begin:end]
    whole = np.float32(1.0)
    half = np.float32(0.5)
    low = np.float32(-HALF)
    high = np.float32(HALF)
    bits = ratio.view(np.int32)
    fraction = np.int32(FRACTION_BITS)
    c1 = np.float32(LOG2[0])
    c3 = np.float32(LOG2[1])
    c5 = np.float32(LOG2[2])
    c7 = np.float32(LOG2[3])
    for t in range(p.size):
        ratio[t] = np.float32(p[t]) / np.float32(q[t]) if p[t] * q[t] > 0.0 else np.float32(0.0)
    for t in range(p.size):
        exponent = (bits[t] - np.int32(SQRT_HALF)) >> fraction
        buckets[t] = exponent
        bits[t] -= exponent << fraction
    for t in range(p.size):
        s = (ratio[t] - whole) / (ratio[t] + whole)
        z = s * s
        octaves = np.float32(buckets[t]) + s * (c1 + z * (c3 + z * (c5 + z * c7)))
        step = np.floor(np.float32(PER_OCTAVE) * octaves + half)
        buckets[t] = np.int32(min(max(step, low), high)) + np.int32(HALF)


@compiled
def order_by_ratio(sync, p, q, n, buckets, ratio):
    """Bucket of every token, rint(16 log2(p/q)) about the middle one; all in one where there is one draw or the gate is closed.

    In float32 and by a series, so that it runs in vector registers: any function of the rows is a legal order.
    """
    sums = np.empty(num_pieces(p.size))
    arguments = p, q, sums
    share_row(sync, shared_code(_overlap, arguments), arguments, p.size)
    if n == 1 or total(sums) > 1.0 - GATE / n:
        buckets[:] = 0
    else:
        arguments = p, q, buckets, ratio
        share_row(sync, shared_code(_fill_buckets, arguments), arguments, p.size)


@compiled
def _sum_buckets(arguments, begin, end, thread):
    q, buckets, mass = arguments
    for start in range(begin, end, PIECE):
        here = mass[start // PIECE]
        last = min(start + PIECE, end)
        masses = q[start:last]
        places = buckets[start:last]
        for t in range(masses.size):
            if masses[t] > 0.0:
                here[places[t]] += masses[t]


@compiled
def _weigh_buckets(arguments, begin, end, thread):
    q, buckets, weight, distribution = arguments
    q = q[begin:end]
    buckets = buckets[begin:end]
    distribution = distribution[begin:end]
    for t in range(q.size):
        distribution[t] = q[t] * weight[buckets[t]]


@compiled
def _first_of_highest(sync, q, n, buckets, distribution):
    """distribution of the first draw, in draw order, of the highest bucket that holds one of n draws."""
    mass = np.zeros((num_pieces(q.size), BUCKETS))
    arguments = q, buckets, mass
    share_row(sync, shared_code(_sum_buckets, arguments), arguments, q.size)
    weight = np.zeros(BUCKETS)
    lo = 0.0
    s = 0.0
    for j in range(BUCKETS):
        inside = total(mass[:, j])
        if inside > 0.0:
            hi = lo + inside
            for i in range(n):
                weight[j] += hi**i * lo ** (n - 1 - i)
            s += inside * weight[j]
            lo = hi
    weight /= s
    more = q, buckets, weight, distribution
    share_row(sync, shared_code(_weigh_buckets, more), more, q.size)


@compiled
def _restrict(q, buckets, low, high, out):
    """out = q on the buckets low <= b < high, renormalised; all zero where nothing is left."""
    s = 0.0
    for t in range(q.size):
        out[t] = q[t] if low <= buckets[t] < high else 0.0
        s += out[t]
    if s > 0.0:
        scale = 1.0 / s
        for t in range(q.size):
            out[t] *= scale


@njit(cache=True, error_model="numpy")
def _group(u, at):
    """Neighbours in draw order that go on equally deep, of which some are left: their first and the one behind their last; n, n where none is."""
    heights = at.heights[at.kids[u]]
    n = at.counts[u]
    begin = 0
    while begin < n:
        end = begin
        done = True
        while end < n and heights[end] == heights[begin]:
            done = done and at.status[u, end] == _DONE
            end += 1
        if not done:
            return begin, end
        begin = end
    return n, n


@njit(cache=True, error_model="numpy")
def _settle(u, draw, at):
    """The rejection of a draw, of its copies too; what is to be tried then of its bucket, or below it."""
    n = at.counts[u]
    d = at.depth[u]
    status = at.status[u]
    tokens = at.tokens[at.kids[u]]
    x = tokens[draw]
    left_inside = False
    at.weight[u] = reject(at.sync, at.weight[u], at.p[u], at.tried[d])
    for j in range(n):
        if status[j] != _UNTRIED and tokens[j] == x:
            status[j] = _DONE
        left_inside = left_inside or status[j] == _INSIDE
    at.untried[d, x] = 0.0
    bucket = np.int64(at.buckets[d, x])
    lowest = np.int64(0)  # of one type: else `_restrict` would be compiled twice
    if left_inside:
        _restrict(at.untried[d], at.buckets[d], bucket, bucket + 1, at.tried[d])
    elif (status[:n] == _UNTRIED).any():
        _restrict(at.untried[d], at.buckets[d], lowest, bucket, at.untried[d])


@njit(cache=True, error_model="numpy")
def _open_bucket(u, begin, end, at):
    """The draws of a group that lie in the highest bucket, and the distribution of the first of them."""
    d = at.depth[u]
    status = at.status[u]
    tokens = at.tokens[at.kids[u]]
    untried = at.untried[d]
    order = at.buckets[d]
    count = np.int64(0)
    highest = -1
    for j in range(begin, end):
        count += status[j] == _UNTRIED
    if count == end - begin and begin > 0:  # a new group
        copy_normalised(at.q[at.rows[at.kids[u, 0]]], untried)
    order_by_ratio(at.sync, at.p[u], untried, count, order, at.tried[d])
    _first_of_highest(at.sync, untried, count, order, at.tried[d])
    for j in range(begin, end):
        highest = max(highest, order[tokens[j]]) if status[j] == _UNTRIED else highest
    for j in range(begin, end):
        if status[j] == _UNTRIED and order[tokens[j]] == highest:
            status[j] = _INSIDE


@njit(cache=True, error_model="numpy")
def try_next(u, at):
    """See `walks.traversal.try_next`."""
    status = at.status[u]
    tokens = at.tokens[at.kids[u]]
    if at.turn[u] == 0:
        status[:] = _UNTRIED
    while True:
        for j in range(at.counts[u]):
            if status[j] == _TRIED:
                _settle(u, j, at)
        begin, end = _group(u, at)
        if begin == end:
            return -1, 0.0
        draw = -1
        for j in range(end - 1, begin - 1, -1):
            draw = j if status[j] == _INSIDE else draw
        if draw < 0:
            _open_bucket(u, begin, end, at)
            continue
        x = tokens[draw]
        status[draw] = _TRIED
        at.turn[u] += 1
        if not (tokens[:begin] == x).any():
            return draw, accepted_weight(at.weight[u], at.p[u, x], at.tried[at.depth[u], x])


@njit(cache=True, error_model="numpy")
def walk(trees):
    """See `walks.visits.visit_trees`."""
    visit_trees(try_next, False, trees)
