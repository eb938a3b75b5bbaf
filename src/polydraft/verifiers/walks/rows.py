"""Compiled loops over vocabulary rows: rows are float32 or float64, all arithmetic is float64.

    p  target row      q  what a tried token was drawn from      w  weight: P(a context may be accepted at all)

A token x that was drawn from q and is tried at a context of weight w is accepted with probability min(1, w p(x)/q(x)).
After a rejection S = sum max(0, w p - q) is what the target still lacks, out of S + 1 - w that is left.

What takes more than 10 us at a vocabulary of 150,000 is shared by threads, piece by piece of a row; a caller of these enters `threads.ROWS`. Each
loop is a function of its own: so compiled, it uses vector registers, as long as what it writes is not also another of its arguments.
"""

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, num_pieces, share_row

compiled = njit(
    cache=True, error_model="numpy", fastmath={"reassoc"}
)  # sums may be reordered into vector registers


@compiled
def total(row: np.ndarray) -> float:
    """sum(row)."""
    s = 0.0
    for t in range(row.size):
        s += row[t]
    return s


@compiled
def _surplus(a: float, p: np.ndarray, b: float, q: np.ndarray) -> float:
    s = 0.0
    for t in range(p.size):
        s += max(a * p[t] - b * q[t], 0.0)
    return s


@compiled
def _sum_surplus(arguments, begin, end, thread):
    a, p, b, q, sums = arguments
    for start in range(begin, end, PIECE):
        last = min(start + PIECE, end)
        sums[start // PIECE] = _surplus(a, p[start:last], b, q[start:last])


@compiled
def surplus(sync: np.ndarray, a: float, p: np.ndarray, b: float, q: np.ndarray) -> float:
    """sum max(0, a p - b q)."""
    sums = np.empty(num_pieces(p.size))
    arguments = a, p, b, q, sums
    share_row(sync, shared_code(_sum_surplus, arguments), arguments, p.size)
    return total(sums)


@compiled
def scale(row: np.ndarray, factor: float) -> None:
    """row = factor row, in place."""
    for t in range(row.size):
        row[t] *= factor


@compiled
def scaled(row: np.ndarray, factor: float, out: np.ndarray) -> None:
    """out = factor row."""
    for t in range(row.size):
        out[t] = row[t] * factor


@compiled
def copy_normalised(row: np.ndarray, out: np.ndarray) -> None:
    """out = row / sum(row); zeros where there is nothing."""
    s = total(row)
    scaled(row, 1.0 / s if s > 0.0 else 0.0, out)


@compiled
def accepted_weight(w: float, px: float, qx: float) -> float:
    """Weight of the tried token's context; NaN where the draft gave it no mass, which no draw can do."""
    if not qx > 0.0:
        return np.nan
    return 1.0 if w * px >= qx else w * px / qx


@compiled
def reweight(w: float, s: float) -> float:
    """Weight after a rejection: S / (S + 1 - w); 1 where nothing can be left."""
    return 1.0 if s == 0.0 and w == 1.0 else s / (s + (1.0 - w))


@compiled
def _fill_residual(arguments, begin, end, thread):
    w, p, q, factor = arguments
    p = p[begin:end]
    q = q[begin:end]
    for t in range(p.size):
        p[t] = max(w * p[t] - q[t], 0.0) * factor


@compiled
def reject(sync: np.ndarray, w: float, p: np.ndarray, q: np.ndarray) -> float:
    """The rejection of a token drawn from q: p becomes the normalised residual (p where that is empty); the new weight."""
    s = surplus(sync, w, p, 1.0, q)
    if s > 0.0:
        arguments = w, p, q, 1.0 / s
        share_row(sync, shared_code(_fill_residual, arguments), arguments, p.size)
    return reweight(w, s)


@compiled
def reject_point(w: float, p: np.ndarray, x: int) -> float:
    """The same for a token that was not drawn: p is without it; the new weight."""
    p[x] = 0.0
    s = total(p)
    if s > 0.0:
        scale(p, 1.0 / s)
    return reweight(w, w * s)


@compiled
def without(q: np.ndarray, x: int) -> None:
    """q without token x, summed anew; all zero where nothing else is left."""
    q[x] = 0.0
    s = total(q)
    if s > 0.0:
        scale(q, 1.0 / s)


@compiled
def _fill_leftover(arguments, begin, end, thread):
    a, p, b, q, out = arguments
    p = p[begin:end]
    q = q[begin:end]
    out = out[begin:end]
    for t in range(p.size):
        out[t] = max(a * p[t] - b * q[t], 0.0)


@compiled
def leftover(sync: np.ndarray, w: float, p: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    """out ~ (w p - q)+ with p and q normalised first; p where that is empty."""
    a = w / total(p)
    b = 1.0 / total(q)
    if surplus(sync, a, p, b, q) == 0.0:
        a = 1.0
        b = 0.0
    arguments = a, p, b, q, out
    share_row(sync, shared_code(_fill_leftover, arguments), arguments, p.size)
