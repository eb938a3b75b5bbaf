"""Products of a few rows with a packed matrix, made of tiles; what the rows are rounded to before, where the format says so.

Weights are read once from memory for all rows of a pass, front to back. Each output is one chain over the inputs, and rounding is
row by row: a row's result has the same bits whatever other rows are in the pass, and whoever computes its panel.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from polydraft.models.compiled.formats import BLOCK
from polydraft.models.compiled.tiles import ROWS, tile
from polydraft.models.compiled.vectors import LANES, PANEL

__all__ = ["matmul", "product", "round_rows"]

_ROUNDING = np.float32(1.5 * 2**23)
_ROUNDING_BITS = _ROUNDING.view(np.int32)
"""Added to a number below 2^22, its last bit is 1: the sum is rounded to a whole number, halves to even."""

_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11 = tile


@njit
def product(x, xo, xs, w, wo, stride, panels, n, y, yo, ys, width, rows):
    """y[r, j width + c] = sum_i x[r, i] w[j, i, c] over i < n, every panel read once from memory.

    xo, wo, yo: where the first element lies in the flat array.  xs, ys: from row to row.  stride: from panel to panel.
    n: inputs, a multiple of 4; blocks where w is of blocks.  width: outputs of a panel.
    """
    groups = (rows + ROWS - 1) // ROWS
    for j in range(panels):
        wj, t = wo + j * stride, 0
        for g in range(groups):
            r = (rows - t + groups - g - 1) // (groups - g)
            xt, yt = xo + t * xs, yo + t * ys + j * width
            if r == 1:
                _1(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 2:
                _2(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 3:
                _3(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 4:
                _4(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 5:
                _5(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 6:
                _6(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 7:
                _7(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 8:
                _8(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 9:
                _9(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 10:
                _10(x, xt, xs, w, wj, y, yt, ys, n)
            else:
                _11(x, xt, xs, w, wj, y, yt, ys, n)
            t += r


def _rounds(w, rounded):
    """Whether products with these weights take activations that were rounded; both as numba's types."""
    return rounded.dtype != types.float32 and isinstance(w.dtype, types.Record) == isinstance(rounded.dtype, types.Record)


def matmul(x, w, rounded, y, begin, end, rows):
    """Panels begin .. end-1 of y[:rows] = x[:rows] @ W.T for packed W.

    x: [*, >= I] float32.  rounded: the same rows as `round_rows` left them.  y: [*, all outputs of the panels].
    """


@overload(matmul)
def _matmul(x, w, rounded, y, begin, end, rows):
    blocks = isinstance(w.dtype, types.Record)
    width = LANES if blocks else PANEL
    pairs = w.ndim == 4
    if _rounds(w, rounded):

        def run(x, w, rounded, y, begin, end, rows):
            steps = w.shape[1] * 2 if pairs else w.shape[1]
            stride = w[0].size
            product(
                rounded, np.int64(0), rounded.shape[1], w, begin * stride, stride, end - begin, steps, y, begin * width, y.shape[1], width, rows
            )  # fmt: skip
    else:

        def run(x, w, rounded, y, begin, end, rows):
            steps = w.shape[1] * 2 if pairs else w.shape[1]
            stride = w[0].size
            product(
                x,
                np.int64(0),
                x.shape[1],
                w,
                begin * stride,
                stride,
                end - begin,
                steps,
                y,
                begin * width,
                y.shape[1],
                width,
                rows,
            )

    return run


@njit(error_model="numpy")
def _round_block(x, begin, size, out):
    """Signed bytes of `size` activations from `begin` on, the largest 127 times the scale; the rest of the block is zero.

    Largest and sum are of integers, and rounding is an addition, so that all three loops are vectors without a fast-math flag.
    """
    bits, most, total = x.view(np.uint32), np.uint32(0), np.int32(0)
    for i in range(size):
        most = np.uint32(max(most, bits[begin + i] & np.uint32(0x7FFFFFFF)))
    largest = np.uint32(most).view(np.float32)
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for i in range(size):
        code = np.int32(np.float32(x[begin + i] * inverse + _ROUNDING).view(np.int32) - _ROUNDING_BITS)
        out.codes[i] = code
        total = np.int32(total + code)
    for i in range(size, BLOCK):
        out.codes[i] = 0
    out.scale = largest / np.float32(127.0)
    out.sum, out.minus_8, out.minus_128 = out.scale * np.float32(total), np.int32(-8) * total, np.int32(-128) * total


def round_rows(x, n, w, rounded, begin, end):
    """Round rows begin .. end-1, n activations each, as the product with w takes them; nothing where it takes them as they are."""


@overload(round_rows)
def _round_rows(x, n, w, rounded, begin, end):
    if not _rounds(w, rounded):
        return lambda x, n, w, rounded, begin, end: None
    if isinstance(w.dtype, types.Record):

        def run(x, n, w, rounded, begin, end):
            for t in range(begin, end):
                for k in range((n + BLOCK - 1) // BLOCK):
                    _round_block(x[t], k * BLOCK, min(n - k * BLOCK, BLOCK), rounded[t, k])
    else:

        def run(x, n, w, rounded, begin, end):
            for t in range(begin, end):
                bits = x[t].view(np.uint32)
                for i in range(n):  # to the nearest, halves to even
                    rounded[t, i] = (bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)

    return run
