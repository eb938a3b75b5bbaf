"""Packed matrices, and their products with a few rows, made of tiles.

Weights are read once from memory for all rows of a forward pass, front to back. Each output is one chain over the inputs: a row's result
has the same bits whatever other rows are in the forward pass, and whoever computes its panel.

Code is compiled for each pair of a format and what activations are rounded to, and called by its address: to a forward pass, which is
compiled once, all formats are one type.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from polydraft.models.matrices.formats import BLOCK, BLOCKS, DTYPES, ROUNDED, format_name, pack, unpack
from polydraft.models.matrices.tiles import (
    BLOCK_SIZES,
    FEW_SIZES,
    MANY,
    SIZES,
    adding_tile,
    block_tile,
    cache_tile,
    number_tile,
    run_tile,
    weights_of_output,
)
from polydraft.models.matrices.vectors import LANES, PANEL, aligned
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import cfunc

_FLOAT = np.dtype(np.float32)
_HALVED = np.dtype(np.uint16)
EXACT, HALVES, BYTES, BY_PROMPT = range(4)
"""What activations are rounded to: nothing, bfloat16, or signed bytes with a scale for each block; the numbers stand in packed files. By prompt:
bfloat16 where rows are of a prompt, else bytes."""
_TAKEN = {EXACT: _FLOAT, BYTES: ROUNDED}


class MatrixFormat(NamedTuple):
    """What matrices are stored as, see `formats`, and what activations are rounded to before they are multiplied."""

    weights: str
    rounding: int = EXACT


FORMATS = {
    "float32": MatrixFormat("float32"),
    "bfloat16": MatrixFormat("bfloat16"),
    "int8": MatrixFormat("Q8_0", BYTES),
    "int4": MatrixFormat("Q4_0", BYTES),
}
"""By the name that users give. "int8" and "int4" are for processors' dot products; the same where there are none."""


def _product(tile):
    @inner
    def product(x, xs, w, stride, panels, n, y, ys, width, rows, stored, taken, most):
        """See `tiles.tile_of`, for any number of rows, `most` at a time, and panels, each read once from memory. stride: bytes from panel to panel."""
        groups = (rows + most - 1) // most
        for j in range(panels):
            wj = w + j * stride
            t = 0
            for g in range(groups):
                r = (rows - t + groups - g - 1) // (groups - g)
                tile(x + t * xs, xs, wj, y + t * ys + 4 * j * width, ys, r, n, stored, taken)
                t += r

    return product


_TILES = ("weights", "blocks", "runs", "cache", "sums")
_PRODUCTS = (
    (SIZES[-1], _product(number_tile)),
    (BLOCK_SIZES[-1], _product(block_tile)),
    (MANY, _product(run_tile)),
    (FEW_SIZES[-1], _product(cache_tile)),
    (FEW_SIZES[-1], _product(adding_tile)),
)
"""By `_TILES`: most rows of a tile, and the product that is made of it."""
_ARGUMENTS = 10
NUMBERS = types.int64(*[types.int64] * _ARGUMENTS)
"""Signature of what `call_product` calls."""


@intrinsic
def call_product(typingctx, address, x, xs, w, stride, panels, n, y, ys, width, rows):
    """Call what `_compiled_product` made, by its address; the others are as of `product`."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * _ARGUMENTS)
        long = types.int64
        numbers = [
            context.cast(builder, value, have, long) for value, have in zip(args, signature.args, strict=True)
        ]
        return builder.call(builder.inttoptr(numbers[0], kind.as_pointer()), numbers[1:])

    return types.int64(address, x, xs, w, stride, panels, n, y, ys, width, rows), emit


@cache
def _compiled_product(stored: np.dtype, taken: np.dtype, of: str = "weights"):
    """`product` for these dtypes, with numbers for arguments; it lives as long as the process. of: "weights", "cache" or "sums", which go on."""

    def code(x, xs, w, stride, panels, n, y, ys, width, rows):
        most, product = _PRODUCTS[place]
        product(x, xs, w, stride, panels, n, y, ys, width, rows, stored, taken, most)
        return rows

    if of == "weights" and stored.names:
        of = "runs" if taken == ROUNDED and BLOCKS[format_name(stored)].run < BLOCK else "blocks"
    place = _TILES.index(of)
    return cfunc(NUMBERS, error_model="numpy")(code)


def _address(stored: np.dtype, taken: np.dtype, of: str = "weights") -> int:
    address = _compiled_product(stored, taken, of).address
    assert address is not None
    return address


def number_product(stored: np.dtype, *, adds: bool = False, halves: bool = False) -> int:
    """The address of the product of float32 with what is stored in panels as float32, or as uint16: bfloat16. adds: to what lies there.
    halves: of bfloat16 with bfloat16, where the processor has dot products of them."""
    return _address(stored, _HALVED if halves else _FLOAT, "sums" if adds else "cache")


@cache
def _compiled_output(stored: np.dtype):
    """`weights_of_output` for a dtype, with numbers for arguments."""

    def run(w, lane, n, out):
        weights_of_output(w, lane, n, out, stored)
        return n

    return cfunc(types.int64(*[types.int64] * 4), error_model="numpy")(run)


@intrinsic
def _call_output(typingctx, address, w, lane, n, out):
    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(*[types.int64] * 5), emit


def compile_products(formats: Iterable[str] = ("float32", "bfloat16", "Q8_0", "Q4_0", "Q4_1")) -> None:
    """With weights of some formats, and activations as they are or rounded to what suits them."""
    for name in formats:
        _compiled_output(DTYPES[name])
        for activations in {_FLOAT, ROUNDED if name in BLOCKS else _FLOAT}:
            _address(DTYPES[name], activations)


SEGMENT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "format",
            "first",
            "panels",
            "offset",
            "stride",
            "width",
            "steps",
            "rounding",
            "product",
            "prompt_product",
            "output",
        )
    ]
)
"""Outputs of a matrix that have one format.

format: its number in `DTYPES`.  first, panels: of PANEL outputs each.  offset, stride: bytes, of the segment and of what computes `width`
outputs.  steps: inputs, or blocks of them.  product, output: addresses of compiled code, see `call_product` and `_call_output`.  prompt_product: of the
code that multiplies rows of a prompt, in bfloat16, or 0 where they are multiplied like others, see `matrix_unit`.
"""


SEGMENT_LAYOUT = tuple(
    name for name in SEGMENT.names or () if name not in ("product", "prompt_product", "output")
)
"""Fields that say how its panels lie, whatever process multiplies them."""


class Packed(NamedTuple):
    """Matrices of one shape in panels, whatever their formats: one type, so that what is compiled for one suits all.

    data: bytes of all panels.  segments: [matrices, segments] of SEGMENT.  panels: of a matrix, PANEL outputs each.
    panel_bytes: of the largest one.  rounding: EXACT, BYTES or BY_PROMPT: what its products need.
    """

    data: np.ndarray
    segments: np.ndarray
    panels: int
    panel_bytes: int
    rounding: int

    @classmethod
    def empty(
        cls,
        matrices: Sequence[Sequence[tuple[MatrixFormat, int]]],
        inputs: int | Sequence[int],
        *,
        multiplied: bool = True,
    ) -> "Packed":
        """Memory for matrices. matrices: of each, formats and outputs from top to bottom: whole panels, but for the last.  inputs: of all, or of each.
        multiplied: whether products read them; else only `output_row` does.

        Example:
            >>> w = Packed.empty([[(FORMATS["int4"], PANEL), (FORMATS["float32"], 3)]], 64)
            >>> w.panels, w.outputs == 2 * PANEL, w.rounding == BYTES
            (2, True, True)
        """
        segments = np.zeros((len(matrices), max(map(len, matrices))), SEGMENT)
        names = list(DTYPES)
        offset = 0
        widths = [inputs] * len(matrices) if isinstance(inputs, int) else inputs
        for row, parts, width in zip(segments, matrices, widths, strict=True):
            first = 0
            for segment, (kind, outputs) in zip(row, parts, strict=False):
                stored = DTYPES[kind.weights]
                panels = -(-outputs // PANEL)
                blocks = BLOCKS.get(kind.weights)
                steps = -(-width // blocks.inputs) if blocks else width
                lanes = LANES if blocks else PANEL
                stride = steps * stored.itemsize * (1 if blocks else PANEL)
                activations = _TAKEN[kind.rounding]
                segment["format"] = names.index(kind.weights)
                segment["first"] = first
                segment["panels"] = panels
                segment["offset"] = offset
                segment["stride"] = stride
                segment["width"] = lanes
                segment["steps"] = steps
                segment["rounding"] = kind.rounding
                segment["product"] = _address(stored, activations) if multiplied else 0
                segment["output"] = _compiled_output(stored).address
                first += panels
                offset += -(-stride * panels * (PANEL // lanes) // 64) * 64
        panel_bytes = segments["stride"] * (PANEL // np.maximum(segments["width"], 1))
        numbers = segments["panels"].sum(1).max(), panel_bytes.max(), segments["rounding"].max()
        return cls(aligned(offset, dtype=np.uint8, huge=True), segments, *map(int, numbers))

    @classmethod
    def none(cls) -> "Packed":
        """No matrices."""
        return cls(np.zeros(0, np.uint8), np.zeros((0, 1), SEGMENT), 0, 1, EXACT)

    @property
    def reads_numbers(self) -> bool:
        """Whether a product reads activations as they are."""
        used = self.segments[self.segments["panels"] > 0]
        return bool((used["rounding"] == EXACT).any())

    @property
    def outputs(self) -> int:
        """Of a matrix, whole panels."""
        return self.panels * PANEL

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return self.data.nbytes

    @property
    def formats(self) -> set[str]:
        """Names of the formats that occur."""
        names = list(DTYPES)
        return {names[kind] for kind in self.segments["format"][self.segments["panels"] > 0]}

    def panels_of(self, k: int, part: int = 0) -> np.ndarray:
        """The panels of a segment of the k-th matrix, to be written or read, see `formats`."""
        segment = self.segments[k, part]
        stored = list(DTYPES.values())[segment["format"]]
        steps = int(segment["steps"])
        panels = int(segment["panels"] * PANEL // segment["width"])
        shape = (steps,) if stored.names else (steps // 2, PANEL, 2) if stored == _HALVED else (steps, PANEL)
        begin = int(segment["offset"])
        return self.data[begin : begin + int(segment["stride"]) * panels].view(stored).reshape(panels, *shape)

    def like(self, outputs: int) -> "Packed":
        """Memory for other outputs of the only matrix, of one format and the same inputs; all zero."""
        (segment,) = self.segments[0].copy()
        segment["panels"] = outputs // PANEL
        segment["offset"] = 0
        return self._replace(
            data=aligned(outputs // PANEL * self.panel_bytes, dtype=np.uint8),
            segments=np.array([[segment]]),
            panels=outputs // PANEL,
        )

    def followed_by(self, panels: int, others: "Packed") -> "Packed":
        """The first panels of the only matrix and, behind them, those of another one, whose memory the caller owns."""
        segments = np.concatenate([self.segments, others.segments], 1)
        segments[0, 0]["panels"] = panels
        segments[0, 1]["first"] = panels
        segments[0, 1]["offset"] += others.data.ctypes.data - self.data.ctypes.data
        return self._replace(segments=segments, panels=panels + others.panels)

    def behind(self, outputs: int) -> "Packed":
        """Matrices of one format without their first outputs, whole panels of them, in the same memory.

        Example:
            >>> packed([np.ones((3 * PANEL, 8))], FORMATS["float32"]).behind(PANEL).panels
            2
        """
        segments = self.segments.copy()
        panels = outputs // PANEL
        segments["panels"] -= panels
        segments["offset"] += panels * self.panel_bytes
        return self._replace(segments=segments, panels=self.panels - panels)

    def matrix(self, k: int, outputs: int, inputs: int) -> Float[np.ndarray, "O I"]:
        """The k-th, in float32."""
        parts = range(int((self.segments[k]["panels"] > 0).sum()))
        whole = [
            unpack(self.panels_of(k, part), int(self.segments[k, part]["panels"]) * PANEL, inputs)
            for part in parts
        ]
        return np.concatenate(whole)[:outputs]


def copy_outputs(source: Packed, outputs: np.ndarray, target: Packed, places: np.ndarray) -> None:
    """Copy outputs of the only matrix to places of another one, both of one format."""
    ours = source.panels_of(0)
    theirs = target.panels_of(0)
    fields = ours.dtype.names
    width = LANES if fields else PANEL
    lane = -2 if ours.dtype == _HALVED else -1
    for read, write in [(ours[field], theirs[field]) for field in fields] if fields else [(ours, theirs)]:
        by_output = np.moveaxis(read, lane, 1)[outputs // width, outputs % width]
        np.moveaxis(write, lane, 1)[places // width, places % width] = by_output


def packed(matrices: Sequence[Float[np.ndarray, "O I"]], kind: MatrixFormat) -> Packed:
    """Matrices of one shape, rounded to a format.

    Example:
        >>> packed([np.zeros((3, 8))], FORMATS["bfloat16"]).outputs == PANEL
        True
    """
    outputs, inputs = matrices[0].shape
    w = Packed.empty([[(kind, outputs)]] * len(matrices), inputs)
    for k, matrix in enumerate(matrices):
        pack(matrix, w.panels_of(k))
    return w


@inner
def matmul(x, w, k, rounded, y, begin, end, rows, of_prompt):
    """Panels begin .. end-1 of y[:rows] = x[:rows] @ W.T for the k-th of packed matrices.

    x: [*, >= I] float32.  rounded: the same rows as `quantize_rows` left them.  y: [*, all outputs of the panels].  of_prompt: whether they are rows of one.
    """
    matmul_to(x, w, k, rounded, np.int64(y.ctypes.data), 4 * y.shape[1], begin, end, rows, of_prompt)


@inner
def matmul_to(x, w, k, rounded, address, ys, begin, end, rows, of_prompt):
    """`matmul` to an address, where rows are `ys` bytes apart."""
    for part in range(w.segments.shape[1]):
        segment = w.segments[k, part]
        first = max(begin, segment.first)
        last = min(end, segment.first + segment.panels)
        if first < last:
            activations, xs = (
                (x.ctypes.data, 4 * x.shape[1])
                if segment.rounding == EXACT
                else (rounded.ctypes.data, rounded.shape[1])
            )
            ratio = PANEL // segment.width
            panel = w.data.ctypes.data + segment.offset + (first - segment.first) * ratio * segment.stride
            product = segment.product
            if of_prompt and segment.prompt_product != 0:
                product = segment.prompt_product
            call_product(
                product,
                activations,
                xs,
                panel,
                segment.stride,
                (last - first) * ratio,
                segment.steps,
                address + 4 * first * PANEL,
                ys,
                segment.width,
                rows,
            )


@inner
def rounding_of(rounding, of_prompt):
    """What the activations of a product are rounded to. rounding: of its matrix.  of_prompt: whether the rows are of a prompt."""
    if rounding == BY_PROMPT:
        return HALVES if of_prompt else BYTES
    return rounding


@inner
def output_row(w, k, output, out):
    """The weights of one output of the k-th of packed matrices, in float32: out, [>= I]."""
    panel = output // PANEL
    for part in range(w.segments.shape[1]):
        segment = w.segments[k, part]
        if segment.first <= panel < segment.first + segment.panels:
            place = output - segment.first * PANEL
            at = w.data.ctypes.data + segment.offset + place // segment.width * segment.stride
            _call_output(segment.output, at, place % segment.width, segment.steps, out.ctypes.data)
