"""Products of a few rows with a packed matrix, made of tiles.

Weights are read once from memory for all rows of a pass, front to back. Each output is one chain over the inputs: a row's result
has the same bits whatever other rows are in the pass, and whoever computes its panel.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from polydraft.models.compiled.rounding import rounds
from polydraft.models.compiled.tiles import ROWS, tile
from polydraft.models.compiled.vectors import LANES, PANEL

__all__ = ["matmul", "product"]

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


def matmul(x, w, rounded, y, begin, end, rows):
    """Panels begin .. end-1 of y[:rows] = x[:rows] @ W.T for packed W.

    x: [*, >= I] float32.  rounded: the same rows as `round_rows` left them.  y: [*, all outputs of the panels].
    """


@overload(matmul)
def _matmul(x, w, rounded, y, begin, end, rows):
    blocks = isinstance(w.dtype, types.Record)
    width = LANES if blocks else PANEL
    pairs = w.ndim == 4
    if rounds(w, rounded):

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
