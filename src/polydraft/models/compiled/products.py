"""Packed matrices, and their products with a few rows, made of tiles.

Weights are read once from memory for all rows of a pass, front to back. Each output is one chain over the inputs: a row's result
has the same bits whatever other rows are in the pass, and whoever computes its panel.

Code is compiled for each pair of a format and what activations are rounded to, and called by its address: to a pass, which is
compiled once, all formats are one type.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from polydraft.models.compiled.formats import BLOCKS, ROUNDED, pack, panels_for, unpack
from polydraft.models.compiled.tiles import ROWS, tile
from polydraft.models.compiled.vectors import LANES, PANEL

__all__ = [
    "BFLOATS",
    "BYTES",
    "EXACT",
    "FORMATS",
    "Format",
    "Packed",
    "call_product",
    "compile_products",
    "matmul",
    "number_product",
    "packed",
]

_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11 = tile


class Format(NamedTuple):
    """What matrices are stored as, and what activations are rounded to before they are multiplied; float32: they are not."""

    weights: np.dtype
    activations: np.dtype


_FLOAT, _HALVED = np.dtype(np.float32), np.dtype(np.uint16)
FORMATS = {
    "float32": Format(_FLOAT, _FLOAT),
    "bfloat16": Format(_HALVED, _FLOAT),
    "bfloat16-dot": Format(_HALVED, _HALVED),
    "int8": Format(BLOCKS["Q8_0"], ROUNDED),
    "int4": Format(BLOCKS["Q4_0"], ROUNDED),
}
"""By the name that users give. "bfloat16-dot", "int8" and "int4" are for processors' dot products; the same where there are none."""
EXACT, BFLOATS, BYTES = range(3)
"""What activations are rounded to: nothing, bfloat16, or signed bytes with a scale for each block."""


@njit
def product(x, xs, w, stride, panels, n, y, ys, width, rows, stored, taken):
    """See `tiles.tile_of`, for any number of rows and panels, each read once from memory. stride: bytes from panel to panel."""
    groups = (rows + ROWS - 1) // ROWS
    for j in range(panels):
        wj, t = w + j * stride, 0
        for g in range(groups):
            r = (rows - t + groups - g - 1) // (groups - g)
            xt, yt = x + t * xs, y + t * ys + 4 * j * width
            if r == 1:
                _1(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 2:
                _2(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 3:
                _3(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 4:
                _4(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 5:
                _5(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 6:
                _6(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 7:
                _7(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 8:
                _8(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 9:
                _9(xt, xs, wj, yt, ys, n, stored, taken)
            elif r == 10:
                _10(xt, xs, wj, yt, ys, n, stored, taken)
            else:
                _11(xt, xs, wj, yt, ys, n, stored, taken)
            t += r


_ARGUMENTS = 10
_NUMBERS = types.int64(*[types.int64] * _ARGUMENTS)


@cache
def _compiled_product(stored: np.dtype, taken: np.dtype):
    """`product` for these dtypes, with numbers for arguments; kept as long as the process lives."""

    def run(x, xs, w, stride, panels, n, y, ys, width, rows):
        product(x, xs, w, stride, panels, n, y, ys, width, rows, stored, taken)
        return rows

    return cfunc(_NUMBERS, cache=True, error_model="numpy")(run)


@intrinsic
def call_product(typingctx, address, x, xs, w, stride, panels, n, y, ys, width, rows):
    """Call what `_compiled_product` made, by its address; the others are as of `product`."""

    def emit(context, builder, signature, args):
        kind, long = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * _ARGUMENTS), types.int64
        given = [context.cast(builder, value, have, long) for value, have in zip(args, signature.args, strict=True)]
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])

    return types.int64(address, x, xs, w, stride, panels, n, y, ys, width, rows), emit


def _address(stored: np.dtype, taken: np.dtype) -> int:
    address = _compiled_product(stored, taken).address
    assert address is not None
    return address


def number_product(stored: np.dtype) -> int:
    """The address of the product of float32 with what is stored in panels as float32, or as uint16: bfloat16."""
    return _address(stored, _FLOAT)


def compile_products() -> None:
    """With weights of every format, and activations as they are or rounded to what suits it."""
    for stored, rounded in ((_FLOAT, _FLOAT), (_HALVED, _HALVED), *((blocks, ROUNDED) for blocks in BLOCKS.values())):
        for taken in (_FLOAT, rounded):
            _compiled_product(stored, taken)


class Packed(NamedTuple):
    """Matrices of one shape in panels, whatever their format: one type, so that what is compiled for one suits all.

    data: [matrices, panels, bytes of a panel].  width: outputs of a panel.  steps: inputs, or blocks of them.
    rounding: EXACT, BFLOATS or BYTES.  product: the address of compiled code, see `call_product`.
    """

    data: np.ndarray
    panels: int
    width: int
    steps: int
    rounding: int
    product: int

    @classmethod
    def of(cls, panels: np.ndarray, activations: np.dtype = _FLOAT) -> "Packed":
        """panels: [matrices, panels, ...], see `formats`.  activations: what they are rounded to, where this format can be
        multiplied with that.

        Example:
            >>> Packed.of(panels_for(PANEL + 1, 64, np.dtype(np.float32), 3))[1:5] == (2, PANEL, 64, EXACT)
            True
        """
        stored, blocks = panels.dtype, panels.dtype.names is not None
        rounding = BYTES if blocks and activations == ROUNDED else BFLOATS if stored == activations == _HALVED else EXACT
        steps = panels.shape[2] * (2 if stored == _HALVED else 1)
        data = panels.reshape(*panels.shape[:2], -1).view(np.uint8) if panels.size else np.zeros((*panels.shape[:2], 0), np.uint8)
        product = _address(stored, activations if rounding else _FLOAT)
        return cls(data, panels.shape[1], LANES if blocks else PANEL, steps, rounding, product)

    @property
    def outputs(self) -> int:
        """Of a matrix, whole panels."""
        return self.panels * self.width

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return self.data.nbytes

    def matrix(self, k: int, outputs: int, inputs: int) -> Float[Tensor, "O I"]:
        """The k-th, in float32."""
        each = self.data.shape[2] // (self.width * self.steps)
        known = (_FLOAT, _HALVED) if self.width == PANEL else BLOCKS.values()
        stored = next(dtype for dtype in known if dtype.itemsize == each * (LANES if dtype.names else 1))
        shape = (
            (self.steps // 2, PANEL, 2) if stored == _HALVED else (self.steps, PANEL) if self.width == PANEL else (self.steps,)
        )
        return unpack(self.data[k].view(stored).reshape(self.panels, *shape), outputs, inputs)


def packed(matrices: Sequence[Float[Tensor, "O I"]], kind: Format) -> Packed:
    """Matrices of one shape, rounded to a format.

    Example:
        >>> import torch
        >>> packed([torch.zeros(3, 8)], FORMATS["bfloat16"]).outputs == PANEL
        True
    """
    outputs, inputs = matrices[0].shape
    panels = panels_for(outputs, inputs, kind.weights, len(matrices))
    for matrix, out in zip(matrices, panels, strict=True):
        pack(matrix, out)
    return Packed.of(panels, kind.activations)


@njit
def matmul(x, w, k, rounded, y, begin, end, rows):
    """Panels begin .. end-1 of y[:rows] = x[:rows] @ W.T for the k-th of packed matrices.

    x: [*, >= I] float32.  rounded: the same rows as `round_rows` left them.  y: [*, all outputs of the panels].
    """
    matmul_to(x, w, k, rounded, y.ctypes.data, 4 * y.shape[1], begin, end, rows)


@njit
def matmul_to(x, w, k, rounded, address, ys, begin, end, rows):
    """`matmul` to an address, where rows are `ys` bytes apart."""
    stride = w.data.shape[2]
    taken, xs = (x.ctypes.data, 4 * x.shape[1]) if w.rounding == EXACT else (rounded.ctypes.data, rounded.shape[1])
    panel = w.data.ctypes.data + (k * w.panels + begin) * stride
    call_product(w.product, taken, xs, panel, stride, end - begin, w.steps, address + 4 * begin * w.width, ys, w.width, rows)
