"""The walk of flow verification (`verifiers.flow`): softmax, transport and visits of a round in one compiled call, in linear time and memory.

    pieces     by k pointers into the row, each at its own (u + j)/k: the one whose token ends first moves on
    scaling    a sweep over the pieces for each step, equal tokens of a tuple counted once
    fill       a sweep for each draw over tuples sorted by q

From the start that is used E never exceeds w p by more than LEAST (`tests/exactness/test_flow.py`), so that the cap phi is left to the readable
form; tokens without mass have a = 0. Rows are float32 and sums float64. Visits end where the stop's uniform falls: rows beyond that are not looked at.
"""

import numpy as np
from numba import njit

from polydraft.verifiers.walks.rows import compiled, reweight, total
from polydraft.verifiers.walks.visits import visit_trees

LEAST, MOST, STEPS = 1e-12, 1e4, 4
"""As in `verifiers.flow`."""


@njit(cache=True, error_model="numpy")
def _pieces(q, k, work):
    """Fill widths and tuples; returns how many pieces there are. Sums are those of the draws."""
    tuples, widths, whole, last = work.tuples, work.widths, 0.0, 0
    for x in range(q.size):
        whole += np.float64(q[x])
        last = x if q[x] > 0.0 else last
    scale, below, j = k / whole, 0.0, 0
    at, sum_ends, sums = np.empty(k, np.int64), np.empty(k), np.empty(k)
    for x in range(last + 1):
        below += np.float64(q[x])
        while j < k and (below * scale > j or x == last):
            at[j], sums[j], sum_ends[j] = x, below, below * scale - j
            j += 1
        if j == k:
            break
    u, m = 0.0, 0
    while True:
        j, end = 0, sum_ends[0]
        for i in range(k):
            tuples[i, m] = at[i]
            if sum_ends[i] < end:
                j, end = i, sum_ends[i]
        x = at[j] + 1
        if end >= 1.0 or x > last:
            widths[m] = 1.0 - u
            return m + 1
        widths[m] = max(end - u, 0.0)
        u = max(end, u)
        while q[x] == 0.0:
            x += 1
        sums[j] += np.float64(q[x])
        sum_ends[j], at[j] = sums[j] * scale - j, x
        m += 1


@compiled
def _denominators(a, tuples, count, left):
    """left = 1 + sum of a over the distinct tokens of each tuple; they rise, so that equal ones are neighbours."""
    for m in range(count):
        left[m] = 1.0 + a[tuples[0, m]]
    for j in range(1, len(tuples)):
        for m in range(count):
            left[m] += a[tuples[j, m]] if tuples[j, m] != tuples[j - 1, m] else 0.0


@compiled
def _invert(widths, count, left, share):
    for m in range(count):
        left[m] = 1.0 / left[m]
        share[m] = widths[m] * left[m]


@compiled
def _times(a, E):
    for x in range(a.size):
        E[x] *= a[x]


@njit(cache=True, error_model="numpy")
def _scatter(tuples, share, count, E):
    """E = sum of the shares of the tuples that hold a token."""
    k = tuples.shape[0]
    E[:] = 0.0
    for m in range(count):
        s = share[m]
        E[tuples[0, m]] += s
        for j in range(1, k):
            if tuples[j, m] != tuples[j - 1, m]:
                E[tuples[j, m]] += s


@njit(cache=True, error_model="numpy")
def _expected(k, count, work):
    """E of the shares a / (1 + sum of a over the tuple); `left` is what they leave, 1 / (1 + sum)."""
    tuples = work.tuples[:k]
    _denominators(work.a, tuples, count, work.spare)
    _invert(work.widths, count, work.spare, work.share)
    _scatter(tuples, work.share, count, work.E)
    _times(work.a, work.E)


@compiled
def _begin(w, p, k, q, whole, a):
    """a of the start."""
    for x in range(p.size):
        g, r = w * p[x], min(1.0, k * (q[x] / whole))
        a[x] = min(max(g / (r - min(g, 0.9 * r)), LEAST), MOST) if g * r > 0.0 else 0.0


@compiled
def _step(w, p, a, E):
    for x in range(p.size):
        if E[x] > 0.0:
            a[x] = min(max(a[x] * (w * p[x]) / E[x], LEAST), MOST)


@compiled
def _rest(w, p, E, rest):
    """What is left of w p."""
    for x in range(p.size):
        rest[x] = max(w * p[x] - E[x], 0.0)


@compiled
def _swap(x, y, key, other, count):
    """The lower key first; equal ones stay."""
    for m in range(count):
        a, b, low, high = x[m], y[m], key[m], other[m]
        x[m], key[m] = b if high < low else a, min(low, high)
        y[m], other[m] = a if high < low else b, max(low, high)


@njit(cache=True, error_model="numpy")
def _sort(k, q, count, work):
    """The tokens of each piece in ascending q, the first draw first among equals; by neighbours that swap."""
    for j in range(k):
        for m in range(count):
            work.keys[j, m] = q[work.tuples[j, m]]
    for turn in range(k):
        for i in range(turn % 2, k - 1, 2):
            _swap(work.tuples[i], work.tuples[i + 1], work.keys[i], work.keys[i + 1], count)


@njit(error_model="numpy")
def _insert(order, size, j, at, q):
    """Pointer j joins the first `size` ones of the order."""
    x, i = at[j], size
    while i > 0 and (q[at[order[i - 1]]] > q[x] or (q[at[order[i - 1]]] == q[x] and order[i - 1] > j)):
        order[i] = order[i - 1]
        i -= 1
    order[i] = j


@njit(cache=True, error_model="numpy")
def _offer(turn, count, work):
    """E = what is offered to each token as number `turn` of its tuples, which have given `part` = a to the number before."""
    part, offered, widths, remaining, tuples = work.a, work.E, work.widths, work.spare, work.tuples
    offered[:] = 0.0
    for m in range(count):
        if turn > 0:
            remaining[m] *= 1.0 - part[tuples[turn - 1, m]]
        offered[tuples[turn, m]] += widths[m] * remaining[m]


@compiled
def _take(rest, offered, part):
    """The part of what it is offered that each token takes, and its rest after that."""
    for x in range(rest.size):
        part[x] = min(1.0, rest[x] / offered[x]) if offered[x] > 0.0 else 0.0
        rest[x] = max(rest[x] - part[x] * offered[x], 0.0)


@njit(cache=True, error_model="numpy")
def transport(w, p, q, draws, work, order, mass, rest):
    """`verifiers.flow.transport`: places of the draws in the order of visits, their mass, and what the context emits.

    Returns how many places there are: one for each token.
    """
    k = len(draws)
    count = _pieces(q, k, work)
    _begin(w, p, k, q, total(q), work.a)
    for _ in range(STEPS):
        _expected(k, count, work)
        _step(w, p, work.a, work.E)
    _expected(k, count, work)
    _rest(w, p, work.E, rest)
    s = 1.0
    for j in range(k):
        _insert(order, j, j, draws, q)
        s += 0.0 if j > 0 and draws[j] == draws[j - 1] else work.a[draws[j]]
    size = 0
    for i in range(k):
        x = draws[order[i]]
        if i > 0 and x == draws[order[i - 1]]:
            continue
        order[size], mass[size] = order[i], work.a[x] / s
        size += 1
    _sort(k, q, count, work)
    remaining, place, copies = 1.0 / s, -1, 0
    for turn in range(k):
        _offer(turn, count, work)
        _take(rest, work.E, work.a)
        if copies == 0:
            place += 1
            for j in range(k):
                copies += draws[j] == draws[order[place]]
        copies -= 1
        share = work.a[draws[order[place]]] * remaining
        mass[place] += share
        remaining -= share
    return size


@njit(cache=True, error_model="numpy")
def try_next(u, at):
    """See `walks.traversal.try_next`; at.status has the draws in the order of the visits, -1 behind the last."""
    d, turn, order, p = at.depth[u], at.turn[u], at.status[u], at.p[u]
    rest = at.work.rest[d]
    if turn == 0:
        kids, w = at.kids[u, : at.counts[u]], at.weight[u]
        tokens, q = at.tokens[kids], at.q[at.rows[kids[0]]]
        for x in tokens:
            if not q[x] > 0.0:
                return 0, np.nan
        mass, remaining = at.shares[u], 1.0
        order[:], mass[:] = 0, 0.0
        many = transport(w, p, q, tokens, at.work, order, mass, rest)
        order[many:] = -1
        for i in range(many):
            part_here = mass[i]
            mass[i] = min(part_here / remaining, 1.0) if remaining > 0.0 else 0.0
            remaining -= part_here
    if turn < order.size and order[turn] >= 0:
        at.turn[u] += 1
        return order[turn], at.shares[u, turn]
    spare = total(rest)
    if spare > 0.0:
        p[:] = rest
    at.weight[u] = reweight(at.weight[u], spare)
    return -1, 0.0


@njit(cache=True, error_model="numpy")
def walk(trees):
    """See `walks.visits.visit_trees`."""
    visit_trees(try_next, True, trees)
