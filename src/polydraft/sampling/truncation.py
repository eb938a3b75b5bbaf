"""The distribution of a row of logits under temperature, top-k, top-p and min-p: of targets, row by row as a walk visits them, and of compiled draft models.

    mass   exp((logit - largest logit) / temperature), in float32; a token that does not stay has mass 0

Top-k and top-p are searches among candidates: tokens that a bound does not exclude. That of top-k is the k-th largest of the largest logits
of some spans of the row. For top-p those are dropped first whose masses are so small that all such tokens may go; the others are thrown into
buckets by their masses, and only the bucket where the sum crosses the limit is put in order. All threads take pieces of the row.
"""

from typing import Any

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, num_pieces, share_row

_f32 = np.float32
LANES = 64
"""Tokens that are compared at a time: a whole number of vectors on any processor."""
SAMPLING = np.dtype(
    [
        ("temperature", float),
        ("top_k", np.int64),
        ("top_p", float),
        ("min_p", float),
        ("min_path_prob", float),
    ]
)
"""Sampling parameters of a request; top_k 0: all.  min_path_prob: of a drafted tree, path probability of its nodes."""
_ROUNDING = float(np.finfo(_f32).eps) / 2
"""Of a sum of masses: those that are equal up to rounding count as equal."""
_STEEPEST = float(np.finfo(_f32).max)
"""Largest inverse of a temperature: 0 times it is 0, where 0 times infinity is no number."""
_LOWEST = _f32(-87.0)
"""Powers below it have mass 0."""
_BUCKETS = 1 << 12
_BITS_OF_A_BUCKET = 18
"""Of a mass in (0, 1], as the bits of a float32: 32 buckets for each power of two, 4,065 in all."""
_SLIGHT = (1.0, 4.0, 16.0, 64.0)
"""Times the mass that may go over the number of tokens: bounds of masses that may all go. The first always holds."""

_summing = njit(cache=True, fastmath={"reassoc"})
"""Sums may be reordered into vector registers."""


@njit(cache=True)
def sift(heap, x, at, size):
    """Let heap[at] sink: the token to remove first, smallest x and then highest id, comes to lie on top."""
    while 2 * at + 1 < size:
        low = 2 * at + 1
        if low + 1 < size:
            a = heap[low + 1]
            b = heap[low]
            low += x[a] < x[b] or (x[a] == x[b] and a > b)
        a = heap[low]
        b = heap[at]
        if not (x[a] < x[b] or (x[a] == x[b] and a > b)):
            return
        heap[low] = b
        heap[at] = a
        at = low


@njit(cache=True)
def _lane_tops(x, top):
    """top[j] = the largest of x[j], x[LANES + j], ... without a look at NaN; the comparisons run in vector lanes."""
    whole = x.size // LANES * LANES
    for j in range(LANES):
        top[j] = -np.inf
    for i in range(0, whole, LANES):
        for j in range(LANES):
            top[j] = x[i + j] if x[i + j] > top[j] else top[j]
    for i in range(whole, x.size):
        top[i - whole] = x[i] if x[i] > top[i - whole] else top[i - whole]


@njit(cache=True)
def highest(x):
    """max(x) without a look at NaN."""
    top = np.empty(LANES, x.dtype)
    _lane_tops(x, top)
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
def _find_largest(arguments, begin, end, thread):
    x, tops, faults = arguments
    for start in range(begin, end, PIECE):
        piece = x[start : min(start + PIECE, end)]
        count = 0
        for i in range(piece.size):
            count += piece[i] != piece[i]
        tops[start // PIECE] = highest(piece)
        faults[start // PIECE] = count


@njit(cache=True)
def largest(sync, x):
    """argmax, the lowest id among equals; -1 where there is no finite largest number or a NaN. A caller has entered `threads.ROWS`."""
    tops = np.empty(num_pieces(x.size), x.dtype)
    faults = np.empty(num_pieces(x.size), np.int64)
    best = 0
    arguments = x, tops, faults
    share_row(sync, shared_code(_find_largest, arguments), arguments, x.size)
    for piece in range(tops.size):
        best = piece if tops[piece] > tops[best] else best
    if faults.any() or not -np.inf < tops[best] < np.inf:
        return -1
    return best * PIECE + first_place(x[best * PIECE : (best + 1) * PIECE], tops[best])


@njit(cache=True)
def kth_largest(x, k):
    """By a heap of k. `np.partition` finds it, too, and takes some three seconds to compile."""
    heap = np.arange(k)
    first = np.int64(0)  # the lowest on top; a literal 0 would compile `sift` twice
    for j in range(k // 2 - 1, -1, -1):
        sift(heap, x, j, k)
    for i in range(k, x.size):
        if x[i] > x[heap[0]]:
            heap[0] = i
            sift(heap, x, first, k)
    return x[heap[0]]


@njit(cache=True)
def _find_tops(arguments, begin, end, thread):
    x, tops = arguments
    for start in range(begin, end, PIECE):
        _lane_tops(x[start : min(start + PIECE, end)], tops[start // PIECE])


@njit(cache=True)
def _candidates_of(x, bound, out):
    """out = those of x that are the bound or more; how many there are."""
    count = 0
    whole = x.size // LANES * LANES
    for start in range(0, whole, LANES):
        many = 0
        for i in range(LANES):
            many += x[start + i] >= bound
        if many:
            for i in range(start, start + LANES):
                if x[i] >= bound:
                    out[count] = x[i]
                    count += 1
    for i in range(whole, x.size):
        if x[i] >= bound:
            out[count] = x[i]
            count += 1
    return count


@njit(cache=True)
def _find_candidates(arguments, begin, end, thread):
    x, bound, out, counts = arguments
    for start in range(begin, end, PIECE):
        last = min(start + PIECE, end)
        counts[start // PIECE] = _candidates_of(x[start:last], bound, out[start:last])


@njit(cache=True)
def _top_k_threshold(sync, x, k, tops, candidates):
    """The k-th largest logit. tops: largest ones of spans.  candidates: [V] room."""
    bound = _f32(-np.inf)
    counts = np.empty(num_pieces(x.size), np.int64)
    size = 0
    if k <= tops.size:
        bound = kth_largest(tops, k)
    arguments = x, bound, candidates, counts
    share_row(sync, shared_code(_find_candidates, arguments), arguments, x.size)
    for piece in range(counts.size):
        start = piece * PIECE
        for i in range(start, start + counts[piece]):
            candidates[size] = candidates[i]
            size += 1
    return kth_largest(candidates[:size], k)


@njit(cache=True, error_model="numpy")
def _exponentiate(arguments, begin, end, thread):
    x, out, top, inverse, threshold, sums = arguments
    for start in range(begin, end, PIECE):
        faults = 0
        last = min(start + PIECE, end)
        logits = x[start:last]
        masses = out[start:last]
        for i in range(logits.size):
            power = (logits[i] - top) * inverse
            masses[i] = exp(power) if power > _LOWEST and logits[i] >= threshold else _f32(0.0)
            faults += logits[i] != logits[i]
        sums[start // PIECE] = np.nan if faults else total_mass(masses)


@_summing
def total_mass(x):
    """sum(x) in float64."""
    mass = 0.0
    for i in range(x.size):
        mass += x[i]
    return mass


@_summing
def _mass_below(x, bound):
    """The sum of those that are less, in float64."""
    mass = 0.0
    for i in range(x.size):
        mass += x[i] if x[i] < bound else _f32(0.0)
    return mass


@njit(cache=True)
def _places_from(x, bound, out):
    """out = the places of those that are the bound or more; how many there are."""
    count = 0
    for i in range(x.size):
        out[count] = i
        count += x[i] >= bound
    return count


@njit(cache=True)
def _clear_below(x, bound):
    for i in range(x.size):
        x[i] = x[i] if x[i] >= bound else _f32(0.0)


@njit(cache=True)
def _sum_slight(arguments, begin, end, thread):
    masses, bounds, sums = arguments
    for start in range(begin, end, PIECE):
        for k in range(bounds.size):
            sums[k, start // PIECE] = _mass_below(masses[start : min(start + PIECE, end)], bounds[k])


@njit(cache=True)
def _drop_slight(arguments, begin, end, thread):
    masses, slight, ids, counts = arguments
    for start in range(begin, end, PIECE):
        last = min(start + PIECE, end)
        counts[start // PIECE] = _places_from(masses[start:last], slight, ids[start:last])
        _clear_below(masses[start:last], slight)


@njit(cache=True)
def _bucket(mass):
    return _f32(mass).view(np.int32) >> _BITS_OF_A_BUCKET


@njit(cache=True, error_model="numpy", forceinline=True)
def _slight(sync, masses, limit):
    """The sum of masses below a bound, at most this, and that bound: the largest of `_SLIGHT` in proportion to the limit, 0 where none is small enough."""
    pieces = num_pieces(masses.size)
    below = 0.0
    slight = _f32(0.0)
    bounds = np.empty(len(_SLIGHT), _f32)
    for k in range(bounds.size):
        bounds[k] = min(_SLIGHT[k] * limit / masses.size, 1.0)
    mass_below = np.empty((bounds.size, pieces))
    arguments = masses, bounds, mass_below
    share_row(sync, shared_code(_sum_slight, arguments), arguments, masses.size)
    for k in range(bounds.size):
        if mass_below[k].sum() <= limit:
            below = mass_below[k].sum()
            slight = bounds[k]
    return below, slight


@njit(cache=True, forceinline=True)
def _sum_buckets(masses, counts, ids, sums):
    """ids = the tokens that each piece has listed, one after another; sums = their masses by bucket. Returns their number and the highest bucket."""
    top = 0
    count = 0
    for piece in range(counts.size):
        for j in range(piece * PIECE, piece * PIECE + counts[piece]):
            token = ids[count] = ids[j] + piece * PIECE
            k = _bucket(masses[token])
            sums[k] += masses[token]
            top = max(top, k)
            count = count + 1
    return count, top


@njit(cache=True, forceinline=True)
def _clear_buckets(masses, ids, count, border):
    """masses = 0 for so many ids in buckets below the border. Returns how many are in that: they are the first of ids then."""
    size = 0
    for j in range(count):
        token = ids[j]
        k = _bucket(masses[token])
        if k < border:
            masses[token] = 0
        elif k == border:
            ids[size] = token
            size += 1
    return size


@njit(cache=True, forceinline=True)
def _drop_smallest(masses, heap, below, total, limit, least):
    """masses = 0 for the smallest of a heap of tokens while `below`, theirs included, is at most the limit. least: tokens that stay.  Returns what is left of the total."""
    size = heap.size
    first = np.int64(0)
    for j in range(size // 2 - 1, -1, -1):
        sift(heap, masses, j, size)
    while size > least:
        token = heap[0]
        below += masses[token]
        if below > limit:
            break
        total -= masses[token]
        size -= 1
        heap[0] = heap[size]
        sift(heap, masses, first, size)
        masses[token] = 0
    return total


@njit(cache=True, error_model="numpy")
def _drop_tail(sync, masses, limit, ids):
    """masses = 0 for the smallest whose sum is at most this, of equals the highest id first; one or more stay. Returns the sum of the others.

    masses: the largest is 1.  ids: [V] room for numbers of tokens.
    Most are dropped by a bound, then whole buckets of masses, and in the bucket at the border one token after another.
    """
    below, slight = _slight(sync, masses, limit)
    counts = np.empty(num_pieces(masses.size), np.int64)
    arguments = masses, slight, ids, counts
    share_row(sync, shared_code(_drop_slight, arguments), arguments, masses.size)
    sums = np.zeros(_BUCKETS)
    count, top = _sum_buckets(masses, counts, ids, sums)
    border = 0
    while border < top and below + sums[border] <= limit:
        below += sums[border]
        border += 1
    total = sums[border:].sum()
    size = _clear_buckets(masses, ids, count, border)
    least = 1 if border == top else 0  # the largest token always stays
    return _drop_smallest(masses, ids[:size], below, total, limit, least)


@njit(cache=True)
def _keep_from(arguments, begin, end, thread):
    masses, threshold, sums = arguments
    for start in range(begin, end, PIECE):
        piece = masses[start : min(start + PIECE, end)]
        _clear_below(piece, threshold)
        sums[start // PIECE] = total_mass(piece)


@njit(cache=True, forceinline=True)
def _most_likely(sync, x, out):
    """out = 1 at the largest, 0 elsewhere; their sum, or NaN where x has none."""
    place = largest(sync, x)
    out[:] = 0.0
    out[max(place, 0)] = 1.0
    return 1.0 if place >= 0 else np.nan


@njit(cache=True, forceinline=True)
def _keep_likely(sync, masses, threshold, sums):
    """masses = 0 below the threshold; the sum of the others. sums: room for that of each piece."""
    arguments = masses, threshold, sums
    share_row(sync, shared_code(_keep_from, arguments), arguments, masses.size)
    return sums.sum()


@njit(cache=True, error_model="numpy")
def _distribution(sync, x, sampling, out, ids) -> tuple[float, Any]:
    """`soften`, and the lowest logit that top-k leaves."""
    if sampling.temperature == 0.0:
        return _most_likely(sync, x, out), _f32(-np.inf)
    tops = np.empty((num_pieces(x.size), LANES), _f32)
    sums = np.empty(num_pieces(x.size))
    threshold = _f32(-np.inf)
    arguments = x, tops
    share_row(sync, shared_code(_find_tops, arguments), arguments, x.size)
    top = highest(tops.ravel())
    if not -np.inf < top < np.inf:
        return np.nan, threshold
    if 0 < sampling.top_k < x.size:
        threshold = _top_k_threshold(sync, x, sampling.top_k, tops.ravel(), ids.view(_f32))
    more = x, out, top, _f32(min(1.0 / sampling.temperature, _STEEPEST)), threshold, sums
    share_row(sync, shared_code(_exponentiate, more), more, x.size)
    mass = sums.sum()
    if sampling.top_p < 1.0 and mass > 0.0:
        mass = _drop_tail(sync, out, min(1.0 - sampling.top_p + _ROUNDING, 1.0) * mass, ids)
    if sampling.min_p > 0.0 and mass > 0.0:
        mass = _keep_likely(sync, out, _f32(sampling.min_p), sums)
    return mass, threshold


@njit(cache=True, error_model="numpy")
def soften(sync, x, sampling, out, ids):
    """out = masses of the tokens that stay; their sum, or NaN where x holds NaN or +inf or has no token left.

    sync: of `threads`; a caller has entered `threads.ROWS`.  x, out: [V] float32.  sampling: of `SAMPLING`; at temperature 0 the largest logit has mass 1.
    ids: [V] int32, room.
    """
    return _distribution(sync, x, sampling, out, ids)[0]


@njit(cache=True, error_model="numpy", nogil=True)
def soften_rows(sync, x, samplings, out):
    """out = distributions of rows [R, V], NaN for those that are faulty. samplings: [R] of `SAMPLING`; see `soften`."""
    ids = np.empty(x.shape[1], np.int32)
    for r in range(len(x)):
        scale_row(out[r], 1.0 / soften(sync, x[r], samplings[r], out[r], ids))


@njit(cache=True)
def scale_row(row, factor):
    """row = factor row, in place."""
    scale = _f32(factor)
    for i in range(row.size):
        row[i] *= scale


@njit(cache=True, error_model="numpy", nogil=True)
def truncate(sync, x, out, samplings):
    """out = x / temperature of rows [R, V], -inf for tokens that do not stay; which rows were sound. Of rows that are not all tokens stay.

    samplings: [R] of `SAMPLING`, temperatures above 0; see `soften`.
    """
    R, V = x.shape
    sound = np.empty(x.shape[0], np.bool_)
    masses = np.empty(V, _f32)
    ids = np.empty(V, np.int32)
    for r in range(R):
        sampling = samplings[r]
        temperature = _f32(samplings[r].temperature)
        mass, threshold = _distribution(sync, x[r], sampling, masses, ids)
        sound[r] = mass > 0.0
        by_mass = sound[r] and (sampling.top_p < 1.0 or sampling.min_p > 0.0)
        for i in range(V):
            stays = masses[i] > 0.0 if by_mass else x[r, i] >= threshold or not sound[r]
            out[r, i] = x[r, i] / temperature if stays else _f32(-np.inf)
    return sound
