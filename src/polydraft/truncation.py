"""Which tokens of a row stay: top-k, top-p and min-p in one compiled call, for distributions of targets and of compiled draft models.

    mass   exp(logit - largest logit), in float32; a token that does not stay has mass 0

top-p is a search among the tokens that the rule could keep: those whose mass is so small that all of a vocabulary of such tokens may go
are dropped first, the others are thrown into buckets by their masses, and only the bucket where the sum passes the limit is put in order.
"""

import numpy as np
from numba import njit

from polydraft.exponential import exp
from polydraft.threads import PIECE, num_threads, share_kept, shared_code

__all__ = ["drop_tail", "highest", "keep_top", "sift", "total_mass", "truncate"]

_f32 = np.float32
LANES = 64
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
    top, whole = np.empty(LANES, x.dtype), x.size // LANES * LANES
    for j in range(LANES):
        top[j] = -np.inf
    for i in range(0, whole, LANES):
        for j in range(LANES):
            top[j] = x[i + j] if x[i + j] > top[j] else top[j]
    for i in range(whole, x.size):
        top[0] = x[i] if x[i] > top[0] else top[0]
    for j in range(1, LANES):  # `top.max()` would compile for half a second
        top[0] = top[j] if top[j] > top[0] else top[0]
    return top[0]


@njit(cache=True)
def first_place(x, value):
    """The first place of a value, -1 where there is none; spans of a fixed length are compared in vector lanes."""
    whole = x.size // LANES * LANES
    for start in range(0, whole, LANES):
        count = 0
        for i in range(LANES):
            count += x[start + i] == value
        if count:
            whole = start
            break
    for i in range(whole, x.size):
        if x[i] == value:
            return i
    return -1


@njit(cache=True)
def keep_top(x, count, nothing):
    """x = nothing below its count-th largest; equals stay. `np.partition` finds it, too, and takes some three seconds to compile."""
    heap, first = np.arange(count), np.int64(0)  # the least on top; a literal 0 would compile `sift` twice
    for j in range(count // 2 - 1, -1, -1):
        sift(heap, x, j, count)
    least = x[heap[0]]
    for i in range(count, x.size):
        if x[i] > least:
            heap[0] = i
            sift(heap, x, first, count)
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
    heap, first = ids[:size], np.int64(0)
    for j in range(size // 2 - 1, -1, -1):
        sift(heap, masses, j, size)
    while size > (border == top):  # the largest token always stays
        token = heap[0]
        below += masses[token]
        if below > limit:
            break
        size -= 1
        heap[0] = heap[size]
        sift(heap, masses, first, size)
        masses[token] = 0


@njit(cache=True, error_model="numpy")
def _masses(x, top, out):
    """out = exp(x - top), 0 where it is less than anything that counts; whether x holds no NaN."""
    faults, lowest = 0, top - _f32(87.0)
    for i in range(x.size):
        out[i] = exp(x[i] - top) if x[i] > lowest else _f32(0.0)
        faults += x[i] != x[i]
    return faults == 0


@njit(cache=True, error_model="numpy")
def _truncate_row(x, out, rule, masses, ids):
    """`truncate` for one row; whether it was sound. rule: temperature, top_k, share and min_p."""
    temperature, top_k, share, min_p = rule
    for i in range(x.size):
        out[i] = x[i] / temperature
    top = highest(out)
    if not -np.inf < top < np.inf or not _masses(out, top, masses):
        return False
    if 0 < top_k < x.size:
        keep_top(out, top_k, _f32(-np.inf))
        if share > 0.0:
            _masses(out, top, masses)
    if share > 0.0:
        drop_tail(masses, share, ids)
    least = max(_f32(min_p), _f32(1e-37) if share > 0.0 else _f32(0.0))
    if least > 0.0:
        for i in range(x.size):
            out[i] = out[i] if masses[i] >= least else _f32(-np.inf)
    return True


@njit(cache=True, error_model="numpy")
def _truncate_rows(arguments, begin, end, thread):
    x, out, temperatures, top_k, shares, min_p, sound, masses, ids = arguments
    for r in range(begin, end):
        sound[r] = _truncate_row(x[r], out[r], (temperatures[r], top_k[r], shares[r], min_p[r]), masses[thread], ids[thread])


@njit(cache=True, error_model="numpy", nogil=True)
def truncate(sync, x, out, temperatures, top_k, shares, min_p):
    """out = x / temperature of rows [R, V], -inf for tokens that top_k [R] (0: all), top-p and min_p [R] remove; which rows were sound.

    Rows that are not keep all tokens. shares: [R] of the mass that top-p may remove, 0: none.  A caller has entered `threads.ROWS`.
    """
    (R, V), threads = x.shape, num_threads(sync)
    sound, masses, ids = np.zeros(R, np.bool_), np.empty((min(R, threads), V), _f32), np.empty((min(R, threads), V), np.int32)
    arguments = x, out, temperatures, top_k, shares, min_p, sound, masses, ids
    share_kept(sync, min(R, threads), shared_code(_truncate_rows, arguments), arguments, R, max(1, PIECE // V))
    return sound
