"""The walk of flow verification (`verifiers.flow`): softmax, transport and visits of a round in one compiled call, in linear time and memory.

    pieces     by k pointers into the row, each at its own (u + j)/k: the one whose token ends first moves on
    scaling    a sweep over the pieces for each step, equal tokens of a tuple counted once
    fill       a sweep for each draw over tuples sorted by q

From the start that is used E never exceeds w p by more than LEAST (`tests/exactness/test_flow.py`), so that the cap phi is left to the readable
form; tokens without mass have a = 0. Rows are float32 and sums float64. Visits end where the stop's uniform falls: rows beyond that are not looked at.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from polydraft.verifiers.fast.rows import compiled, keep, leftover, reweight, soften, surplus, total

FAULTY = -2
LEAST, MOST, STEPS = 1e-12, 1e4, 4
"""As in `verifiers.flow`."""


class Work(NamedTuple):
    """Room for one context; M = V + k pieces, V the vocabulary's size.

    tuples [k, M]: the draws of each piece.  widths, left, share [M]: its probability, what its tuple has left, and the product of both.
    keys [k, M]: q of the draws, to sort by.  a, E [V]: as in `verifiers.flow`.
    """

    tuples: np.ndarray
    keys: np.ndarray
    widths: np.ndarray
    left: np.ndarray
    share: np.ndarray
    a: np.ndarray
    E: np.ndarray


def room(V: int, k: int) -> Work:
    """For contexts of up to k draws."""
    M = V + k
    return Work(np.empty((k, M), np.int32), np.empty((k, M)), np.empty(M), np.empty(M), np.empty(M), np.empty(V), np.empty(V))


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
    _denominators(work.a, tuples, count, work.left)
    _invert(work.widths, count, work.left, work.share)
    _scatter(tuples, work.share, count, work.E)
    _times(work.a, work.E)


@compiled
def _begin(c, p, k, q, whole, a):
    """a of the start; c p = w p."""
    for x in range(p.size):
        g, r = c * p[x], min(1.0, k * (q[x] / whole))
        a[x] = min(max(g / (r - min(g, 0.9 * r)), LEAST), MOST) if g * r > 0.0 else 0.0


@compiled
def _step(c, p, a, E):
    for x in range(p.size):
        if E[x] > 0.0:
            a[x] = min(max(a[x] * (c * p[x]) / E[x], LEAST), MOST)


@compiled
def _rest(c, p, E, rest):
    """What is left of w p."""
    for x in range(p.size):
        rest[x] = max(c * p[x] - E[x], 0.0)


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
    part, offered, widths, remaining, tuples = work.a, work.E, work.widths, work.left, work.tuples
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
def transport(w, p, scale, q, draws, work, order, mass, rest):
    """`verifiers.flow.transport` for the target's distribution p * scale: places of the draws in the order of visits, their mass, and what the context emits.

    Returns how many places there are: one for each token.
    """
    k, c = len(draws), w * scale
    count = _pieces(q, k, work)
    _begin(c, p, k, q, total(q), work.a)
    for _ in range(STEPS):
        _expected(k, count, work)
        _step(c, p, work.a, work.E)
    _expected(k, count, work)
    _rest(c, p, work.E, rest)
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
def walk_row(logits, q, nodes, p, rest, work, until, extra_probs):
    """Stop node of one row of a batch, with the distribution of its extra token in `extra_probs`; FAULTY where what was looked at is.

    nodes: rows, tokens, first (earliest copy of each node), kids and counts (draws of each context), depth.  until: the stop's uniform.
    p, rest: [depths, V], room for the contexts that are being visited.
    """
    rows, tokens, first, kids, counts, depth = nodes
    N, k = kids.shape
    weight, scale, spare = np.zeros(N), np.zeros(N), np.zeros(N)
    child, into, many = np.zeros((N, k), np.int64), np.zeros((N, k)), np.zeros(N, np.int64)
    turn, above = np.zeros(N, np.int64), np.full(N, -1)
    order, mass = np.zeros(k, np.int64), np.zeros(k)
    weight[0], alive, u, enters = 1.0, 1.0, 0, True
    while True:
        w, n, mine, row = weight[u], counts[u], p[depth[u]], q[max(rows[kids[u, 0]], 0)]
        if enters:
            scale[u] = 1.0 / soften(logits[u], mine)
            if not scale[u] > 0.0:
                return FAULTY
            for j in range(n):
                if not row[tokens[kids[u, j]]] > 0.0:
                    return FAULTY
            if n == 1:
                x, many[u], child[u, 0] = tokens[kids[u, 0]], 1, first[kids[u, 0]]
                into[u, 0] = keep(w, mine[x] * scale[u], row[x])
            elif n > 1:
                many[u] = transport(w, mine, scale[u], row, tokens[kids[u, :n]], work, order, mass, rest[depth[u]])
                spare[u], remaining = total(rest[depth[u]]), 1.0
                for i in range(many[u]):
                    child[u, i], into[u, i] = first[kids[u, order[i]]], min(mass[i] / remaining, 1.0) if remaining > 0.0 else 0.0
                    remaining -= mass[i]
        if turn[u] < many[u]:
            c = child[u, turn[u]]
            weight[c] = into[u, turn[u]]
            turn[u] += 1
            enters = weight[c] > 0.0
            if enters:
                above[c], u = u, c
            continue
        a = w
        if n == 1:
            a = reweight(w, surplus(w * scale[u], mine, 1.0, row))
        elif n > 1:
            a = reweight(w, spare[u])
        alive *= 1.0 - a
        if 1.0 - alive > until or u == 0:
            if n == 1:
                leftover(w, mine, row, extra_probs)
            elif n > 1 and spare[u] > 0.0:
                extra_probs[:] = rest[depth[u]]
            else:
                extra_probs[:] = mine
            return u
        u, enters = above[u], False
