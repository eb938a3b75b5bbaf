"""Which tokens of a row stay: top-k, top-p and min-p in one compiled call, for laws of targets and of compiled draft models.

    mass   exp(logit - largest logit), in float32; a token that does not stay has mass 0

top-p is a search among the tokens that the rule could keep: those whose mass is so small that all of a vocabulary of such tokens may go
are dropped first, the others are thrown into buckets by their masses, and only the bucket where the sum passes the limit is put in order.
"""

import numpy as np
from numba import njit

from polydraft.exponential import exp

__all__ = ["drop_tail", "highest", "keep_top", "sift", "total_mass", "truncate"]

_f32 = np.float32
_BUCKETS = 1 << 12
_BITS_OF_A_BUCKET = 18
"""Of a mass in (0, 1], as the bits of a float32: 32 buckets for each power of two, 4,065 in all."""


@njit(cache=True)
def sift(heap, x, at, size):
    """Let heap[at] sink: the token to remove first, smallest x and then highest id, comes to lie on top."""
    while 2 * at + 1 < size:
        low = 2 * at + 1
        if low + 1 < size:
            a, b = heap[low + 1], heap[low]
            low += x[a] < x[b] or (x[a] == x[b] and a > b)
        a, b = heap[low], heap[at]
        if not (x[a] < x[b] or (x[a] == x[b] and a > b)):
            return
        heap[low], heap[at] = b, a
        at = low


@njit(cache=True)
def highest(x):
    """max(x) without a look at NaN; the comparisons run in vector lanes."""
    top, whole = np.empty(16, x.dtype), x.size // 16 * 16
    for j in range(16):
        top[j] = -np.inf
    for i in range(0, whole, 16):
        for j in range(16):
            top[j] = x[i + j] if x[i + j] > top[j] else top[j]
    for i in range(whole, x.size):
        top[0] = x[i] if x[i] > top[0] else top[0]
    for j in range(1, 16):  # `top.max()` would compile for half a second
        top[0] = top[j] if top[j] > top[0] else top[0]
    return top[0]


@njit(cache=True)
def keep_top(x, count, nothing):
    """x = nothing below its count-th largest; equals stay. `np.partition` finds it, too, and takes some three seconds to compile."""
    heap = np.arange(count)  # the least on top
    for j in range(count // 2 - 1, -1, -1):
        sift(heap, x, j, count)
    least = x[heap[0]]
    for i in range(count, x.size):
        if x[i] > least:
            heap[0] = i
            sift(heap, x, 0, count)
            least = x[heap[0]]
    for i in range(x.size):
        x[i] = nothing if x[i] < least else x[i]


@njit(cache=True)
def total_mass(x):
    """sum(x) in float64, which rounds to the same float32 in whatever order; the additions run in vector lanes."""
    sums = np.zeros(8)
    whole = x.size // 8 * 8
    for i in range(0, whole, 8):
        for j in range(8):
            sums[j] += x[i + j]
    for i in range(whole, x.size):
        sums[0] += x[i]
    return sums.sum()


@njit(cache=True)
def _bucket(mass):
    return _f32(mass).view(np.int32) >> _BITS_OF_A_BUCKET


@njit(cache=True, error_model="numpy")
def drop_tail(masses, share, ids):
    """masses = 0 for the smallest whose sum is at most this share of all, of equals the highest id first; at least one stays.

    masses: the largest is 1.  ids: [V] room for numbers of tokens.
    """
    total = total_mass(masses)
    limit = min(share, 1.0) * total
    slight, below, count, top = _f32(limit / masses.size), 0.0, 0, 0
    for i in range(masses.size):
        ids[count] = i
        count += masses[i] >= slight
    sums, mass = np.zeros(_BUCKETS), 0.0
    for j in range(count):
        k = _bucket(masses[ids[j]])
        sums[k] += masses[ids[j]]
        mass += masses[ids[j]]
        top = max(top, k)
    below, border, size = max(total - mass, 0.0), 0, 0
    while border < top and below + sums[border] <= limit:
        below += sums[border]
        border += 1
    for i in range(masses.size):
        masses[i] = masses[i] if masses[i] >= slight else _f32(0.0)
    for j in range(count):  # the heap takes the places of those that were looked at
        token = ids[j]
        k = _bucket(masses[token])
        if k < border:
            masses[token] = 0
        elif k == border:
            ids[size] = token
            size += 1
    heap = ids[:size]
    for j in range(size // 2 - 1, -1, -1):
        sift(heap, masses, j, size)
    while size > (border == top):  # the largest token always stays
        token = heap[0]
        below += masses[token]
        if below > limit:
            break
        size -= 1
        heap[0] = heap[size]
        sift(heap, masses, 0, size)
        masses[token] = 0


@njit(cache=True, error_model="numpy")
def _masses(x, top, out):
    """out = exp(x - top), 0 where it is less than anything that counts; whether x holds no NaN."""
    faults, lowest = 0, top - _f32(87.0)
    for i in range(x.size):
        out[i] = exp(x[i] - top) if x[i] > lowest else _f32(0.0)
        faults += x[i] != x[i]
    return faults == 0


@njit(cache=True, error_model="numpy", nogil=True)
def truncate(x, top_k, shares, min_p):
    """x = -inf for tokens of rows [R, V] that top_k [R] (0: all), top-p and min_p [R] remove; which rows were sound, others are left as they are.

    shares: [R] of the mass that top-p may remove, 0: none.
    """
    R, V = x.shape
    sound, masses, ids = np.zeros(R, np.bool_), np.empty(V, _f32), np.empty(V, np.int32)
    for r in range(R):
        row = x[r]
        top = highest(row)
        sound[r] = -np.inf < top < np.inf and _masses(row, top, masses)
        if not sound[r]:
            continue
        if 0 < top_k[r] < V:
            keep_top(row, top_k[r], _f32(-np.inf))
            _masses(row, top, masses)
        if shares[r] > 0.0:
            drop_tail(masses, shares[r], ids)
        least = max(_f32(min_p[r]), _f32(1e-37) if shares[r] > 0.0 else _f32(0.0))
        if least > 0.0:
            for i in range(V):
                row[i] = row[i] if masses[i] >= least else _f32(-np.inf)
    return sound
