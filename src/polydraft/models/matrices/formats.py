"""How matrices lie in memory: numbers, or blocks of integer codes, in panels of outputs, so that a forward pass reads them once, front to back.

format                 an array [panels, ...] of                                                weight
float32                [inputs, PANEL]                                                          as it is
bfloat16               [inputs / 2, PANEL, 2] as uint16: two inputs of an output side by side   as it is
Q4_0, Q5_0, Q8_0       [blocks] of 32 inputs                                                    d (code - middle)
Q4_1, Q5_1             [blocks] of 32 inputs                                                    d code + m
Q2_K, Q4_K, Q5_K       [blocks] of 256 inputs                                                   d scale code - dmin min
Q3_K, Q6_K             [blocks] of 256 inputs                                                   d scale (code - middle)
IQ4_NL, IQ4_XS         [blocks] of 32 and 256 inputs                                            d table[code], d scale table[code]
MXFP4                  [blocks] of 32 inputs                                                    2^(exponent - 128) table[code]

Blocks are those of GGUF files, number for number: d, m and dmin are float16, and only the 6-bit scales of K-quants are widened to bytes.
A block of a panel holds LANES outputs; its codes are words of four inputs of one output, so that a vector is one word of every output.
What lies behind the last output is zero. `ROUNDED` is a block of activations as integer products take them: see `rounding`.
Format of the blocks in files: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.models.matrices.vectors import LANES, PANEL, aligned
from polydraft.numerics.floats import BFLOAT16, as_bfloat16, as_float32

BLOCK = 32
"""Inputs of a sub-block: activations that share a scale."""
TOGETHER = 64
"""Panels that are packed at a time: what is rounded on the way then stays in the caches."""
SAMPLED = 8 * TOGETHER
"""Of so many panels the first TOGETHER are held against what was written: all of them would take as long as packing does."""
ROUNDED = np.dtype(
    [
        ("scale", np.float32),
        ("sum", np.float32),
        ("start", np.int32),
        ("halves", np.int32, (2,)),
        ("codes", np.int8, (BLOCK,)),
    ]
)
"""BLOCK activations, scale code each; sum: of them; start: WHOLE_BITS - 128 (sum of codes); halves: the same of the first 16 and of the others."""
NUMBERS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}


class Plane(NamedTuple):
    """Where some bits of the codes lie: word `first + words period + group` of a block, shifted right by `shift + shifts period`.

    bits: of a code.  place: for sub-block s of a period and a group of four inputs, its word and shift in the first period.
    words, shifts: what each period adds to both.
    """

    bits: int
    place: Callable[[int, int], tuple[int, int]]
    words: int
    shifts: int = 0


class BlockFormat(NamedTuple):
    """A format of blocks.

    inputs: of a block.  run: inputs that share a scale.  period: sub-blocks after which the places of codes repeat.
    low, high: planes of the codes; high bits stand above the low ones.
    exponent: whether the scale is a power of two.  scale: dtype of the small integer that d is multiplied by, one a run, or None.
    minimum: what is added to a weight: "m", or "mins" (-dmin min), or None.  middle: what is subtracted from a code.  table: what a code stands for.
    """

    inputs: int
    low: Plane
    high: Plane | None = None
    run: int = BLOCK
    period: int = 1
    scale: type[np.integer] | None = None
    minimum: str | None = None
    middle: int = 0
    table: tuple[int, ...] | None = None
    exponent: bool = False

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.low.bits + (self.high.bits if self.high else 0)

    @property
    def periods(self) -> int:
        """In a block."""
        return self.inputs // (BLOCK * self.period)

    @property
    def dtype(self) -> np.dtype:
        """A block of LANES outputs."""
        fields: list[tuple] = [
            ("exponent", np.uint8, (LANES,)) if self.exponent else ("d", np.uint16, (LANES,))
        ]
        if self.minimum == "m":
            fields.append(("m", np.uint16, (LANES,)))
        elif self.minimum:
            fields.append(("dmin", np.uint16, (LANES,)))
        if self.scale is not None:
            fields.append(("scales", self.scale, (self.inputs // self.run, LANES)))
        if self.minimum == "mins":
            fields.append(("mins", np.uint8, (self.inputs // self.run, LANES)))
        if self.high:
            fields.append(("high", np.uint32, (self.inputs * self.high.bits // 32, LANES)))
        fields.append((self.codes, np.uint32, (self.inputs * self.low.bits // 32, LANES)))
        return np.dtype(fields)

    @property
    def codes(self) -> str:
        """Name of the field of the low plane: no two formats have the same fields."""
        return "indices" if self.table else "codes"


def _halves(_: int, group: int) -> tuple[int, int]:
    return group % 4, 4 * (group // 4)


_FOUR = Plane(4, _halves, 4)
"""The first 16 inputs of a sub-block in the low halves of bytes, the others in the high ones."""
_FOUR_OF_K = Plane(4, lambda s, group: (group, 4 * s), 8)
_TWO_OF_K = Plane(2, lambda s, group: (group, 2 * s), 8)
_FIFTH = Plane(1, lambda _, group: (0, group), 1)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCKS = {
    "Q4_0": BlockFormat(32, _FOUR, middle=8),
    "Q4_1": BlockFormat(32, _FOUR, minimum="m"),
    "Q5_0": BlockFormat(32, _FOUR, _FIFTH, middle=16),
    "Q5_1": BlockFormat(32, _FOUR, _FIFTH, minimum="m"),
    "Q8_0": BlockFormat(32, Plane(8, lambda _, group: (group, 0), 8), middle=128),
    "Q2_K": BlockFormat(256, _TWO_OF_K, run=16, period=4, scale=np.uint8, minimum="mins"),
    "Q3_K": BlockFormat(
        256, _TWO_OF_K, Plane(1, lambda s, group: (group, s), 0, 4), run=16, period=4, scale=np.int8, middle=4
    ),
    "Q4_K": BlockFormat(256, _FOUR_OF_K, period=2, scale=np.uint8, minimum="mins"),
    "Q5_K": BlockFormat(
        256, _FOUR_OF_K, Plane(1, lambda s, group: (group, s), 0, 2), period=2, scale=np.uint8, minimum="mins"
    ),
    "Q6_K": BlockFormat(
        256,
        Plane(4, lambda s, group: (8 * (s % 2) + group, 4 * (s // 2)), 16),
        Plane(2, lambda s, group: (group, 2 * s), 8),
        run=16,
        period=4,
        scale=np.int8,
        middle=32,
    ),
    "IQ4_NL": BlockFormat(32, _FOUR, table=_IQ4),
    "IQ4_XS": BlockFormat(256, _FOUR, scale=np.int8, table=_IQ4),
    "MXFP4": BlockFormat(
        32, _FOUR, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), exponent=True
    ),
}
"""Formats of blocks by their names in GGUF files. Codes of Q8_0 are stored without sign, as dot products take them."""
DTYPES = {**NUMBERS, **{name: block.dtype for name, block in BLOCKS.items()}}
"""What panels are arrays of, by the name of a format."""


def format_name(dtype: np.dtype) -> str:
    """The format of panels of this dtype.

    Example:
        >>> format_name(np.dtype(np.uint16))
        'bfloat16'
    """
    return next(name for name, panel_dtype in DTYPES.items() if panel_dtype == dtype)


def panels_for(outputs: int, inputs: int, name: str) -> np.ndarray:
    """Memory for a matrix of this shape in a format.

    Example:
        >>> panels_for(PANEL + 1, 64, "bfloat16").shape == (2, 32, PANEL, 2), panels_for(LANES, 64, "Q4_0").shape
        (True, (2, 2))
    """
    count = -(-outputs // PANEL)
    if name in NUMBERS:
        shape = (count, *((inputs // 2, PANEL, 2) if name == "bfloat16" else (inputs, PANEL)))
    else:
        shape = count * PANEL // LANES, -(-inputs // BLOCKS[name].inputs)
    return aligned(*shape, dtype=DTYPES[name], huge=True)


def pack(weight: Float[np.ndarray, "O I"], out: np.ndarray) -> tuple[float, float]:
    """Write a weight matrix into its panels, rounded to their format; returns sum |W - W'|^2 and sum |W|^2, W' what was written, or zeros
    where the format is the weight's own. Of a large matrix both sums are estimates from a sample of its rows.

    Example:
        >>> out = panels_for(2, 2, "bfloat16")
        >>> pack(np.array([[1.0, 2.0], [3.0, 4.0]]), out), unpack(out, 2, 2).tolist()
        ((0.0, 30.0), [[1.0, 2.0], [3.0, 4.0]])
    """
    name = format_name(out.dtype)
    lost = 0.0
    total = 0.0
    num_sampled = 0
    width = PANEL if name in NUMBERS else LANES
    for begin in range(0, len(out), TOGETHER):
        rows = weight[begin * width : (begin + TOGETHER) * width]
        some = out[begin : begin + TOGETHER]
        if name in BLOCKS:
            pack_blocks(rounded_blocks(rows, name), some)
        elif name == "bfloat16":
            _place(as_bfloat16(rows).view(np.uint16), some, 2)
        else:
            _place(as_float32(rows), some, 1)
        if begin % SAMPLED == 0 and name != ("bfloat16" if weight.dtype == BFLOAT16 else "float32"):
            numbers = as_float32(rows)
            lost += float(np.square(numbers - unpack(some, *rows.shape)).sum())
            total += float(np.square(numbers).sum())
            num_sampled += len(rows)
    scale = len(weight) / num_sampled if num_sampled else 0.0
    return scale * lost, scale * total


def _place(values: np.ndarray, out: np.ndarray, together: int) -> None:
    """One strided copy of rows [O, I] into panels [P, I / together, PANEL, together], zeros behind the last row."""
    inputs = values.shape[1]
    panels = out.reshape(-1, inputs // together, PANEL, together)
    full = len(values) // PANEL
    by_panel = values[: full * PANEL].reshape(full, PANEL, inputs // together, together)
    panels[:full] = by_panel.transpose(0, 2, 1, 3)
    if rest := len(values) - full * PANEL:
        panels[full] = 0
        panels[full, :, :rest] = (
            values[full * PANEL :].reshape(rest, inputs // together, together).transpose(1, 0, 2)
        )


_RAW: dict[str, list[tuple]] = {
    "Q4_0": [("d", np.uint16), ("codes", "<u4", (4,))],
    "Q4_1": [("d", np.uint16), ("m", np.uint16), ("codes", "<u4", (4,))],
    "Q5_0": [("d", np.uint16), ("high", np.uint8, (4,)), ("codes", "<u4", (4,))],
    "Q5_1": [("d", np.uint16), ("m", np.uint16), ("high", np.uint8, (4,)), ("codes", "<u4", (4,))],
    "Q8_0": [("d", np.uint16), ("codes", "<u4", (8,))],
    "Q2_K": [("scales", np.uint8, (16,)), ("codes", "<u4", (16,)), ("d", np.uint16), ("dmin", np.uint16)],
    "Q3_K": [("high", "<u4", (8,)), ("codes", "<u4", (16,)), ("scales", np.uint8, (12,)), ("d", np.uint16)],
    "Q4_K": [("d", np.uint16), ("dmin", np.uint16), ("scales", np.uint8, (12,)), ("codes", "<u4", (32,))],
    "Q5_K": [
        ("d", np.uint16),
        ("dmin", np.uint16),
        ("scales", np.uint8, (12,)),
        ("high", "<u4", (8,)),
        ("codes", "<u4", (32,)),
    ],
    "Q6_K": [("codes", "<u4", (32,)), ("high", "<u4", (16,)), ("scales", np.int8, (16,)), ("d", np.uint16)],
    "IQ4_NL": [("d", np.uint16), ("indices", "<u4", (4,))],
    "IQ4_XS": [
        ("d", np.uint16),
        ("scales_high", "<u2"),
        ("scales", np.uint8, (4,)),
        ("indices", "<u4", (32,)),
    ],
    "MXFP4": [("exponent", np.uint8), ("indices", "<u4", (4,))],
}
"""Blocks of one output as they lie in files; codes as words of four bytes."""


def raw_blocks(name: str) -> np.dtype:
    """One block of one output as GGUF files have it; there the codes of Q8_0 are signed.

    Example:
        >>> raw_blocks("Q4_1").itemsize, raw_blocks("Q6_K").itemsize
        (20, 210)
    """
    return np.dtype(_RAW[name])


def _spread_fifth_bits() -> np.ndarray:
    """[4, 256]: what byte j of a Q5 block's high bits, of inputs 8j .. 8j + 7, adds to the word in which bit g of byte b is of input 4g + b."""
    value = np.arange(256, dtype=np.uint32)
    word = np.zeros(256, np.uint32)
    for b in range(4):
        word |= ((value >> b & 1) | (value >> (4 + b) & 1) << 1) << np.uint32(8 * b)
    return np.stack([word << np.uint32(2 * j) for j in range(4)])


FIFTH_BITS = _spread_fifth_bits()


def block_scales(fields: np.ndarray) -> np.ndarray:
    """The scale of each block in float32: d, or 2^(exponent - 128), as MXFP4 says it (OCP Microscaling Formats, version 1.0, section 5.4.1).

    Example:
        >>> blocks = np.zeros(3, raw_blocks("MXFP4"))
        >>> blocks["exponent"] = 129, 128, 0
        >>> block_scales(blocks).tolist() == [2.0, 1.0, 2.0**-128]
        True
    """
    if "exponent" not in (fields.dtype.names or ()):
        return fields["d"].view(np.float16).astype(np.float32)
    exponents = fields["exponent"].astype(np.uint32)
    return np.where(exponents < 2, np.uint32(1 << 21) << exponents, (exponents - 1) << np.uint32(23)).view(
        np.float32
    )


def small_integers(raw: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """Scales and minimums of K-quants [O, K, runs], which files have in four or six bits."""
    scales = raw["scales"]
    if name == "Q6_K":
        return {"scales": scales}
    if name == "Q2_K":
        return {"scales": scales & 15, "mins": scales >> 4}
    if name == "IQ4_XS":
        low = np.stack([scales & 15, scales >> 4], -1).reshape(*scales.shape[:2], 8)
        high = raw["scales_high"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        return {"scales": (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)}
    first = scales[..., :4]
    second = scales[..., 4:8]
    third = scales[..., 8:]
    if name == "Q3_K":
        low = np.concatenate([first & 15, second & 15, first >> 4, second >> 4], -1)
        high = np.concatenate([third >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        return {"scales": (low | high << 4).astype(np.int8) - np.int8(32)}
    return {
        "scales": np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1),
        "mins": np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1),
    }


def pack_blocks(raw: np.ndarray, out: np.ndarray) -> None:
    """Write blocks [O, K] of single outputs, see `raw_blocks`, into panels [P, K]; what lies behind the last output is zero."""
    full = len(raw) // LANES
    _pack_whole(raw[: full * LANES], out[:full])
    if full < len(out):
        rest = np.zeros(((len(out) - full) * LANES, raw.shape[1]), raw.dtype)
        rest[: len(raw) - full * LANES] = raw[full * LANES :]
        _pack_whole(rest, out[full:])


def _pack_whole(raw: np.ndarray, out: np.ndarray) -> None:
    P, K = out.shape
    name = format_name(out.dtype)
    values: dict[str, np.ndarray] = {
        field: raw[field] for field in out.dtype.names or () if field in (raw.dtype.names or ())
    }
    if "scales" in values:
        values |= small_integers(raw, name)
    if "high" in values and values["high"].dtype == np.uint8:
        bits = values["high"]
        values["high"] = np.bitwise_or.reduce([FIFTH_BITS[j][bits[..., j]] for j in range(4)])[..., None]
    for field, value in values.items():
        if value.ndim == 2:
            out[field] = value.reshape(P, LANES, K).transpose(0, 2, 1)
        else:
            out[field] = value.reshape(P, LANES, K, value.shape[2]).transpose(0, 2, 3, 1)
    if name == "Q8_0":
        out["codes"] ^= np.uint32(0x80808080)


def _codes(panels: np.ndarray, block: BlockFormat) -> np.ndarray:
    """[P, K, sub-blocks, groups, LANES, 4]: codes as bytes."""
    P, K = panels.shape
    codes = np.zeros((P, K, block.inputs // BLOCK, 8, LANES), np.uint32)
    for field, plane, place in ((block.codes, block.low, 0), ("high", block.high, block.low.bits)):
        if plane is None:
            continue
        mask = np.uint32(((1 << plane.bits) - 1) * 0x01010101)
        for s in range(block.inputs // BLOCK):
            period, of_period = divmod(s, block.period)
            for group in range(8):
                word, shift = plane.place(of_period, group)
                words = panels[field][:, :, word + plane.words * period]
                codes[:, :, s, group] |= (
                    words >> np.uint32(shift + plane.shifts * period) & mask
                ) << np.uint32(place)
    return codes[..., None].view(np.uint8)


def unpack(panels: np.ndarray, outputs: int, inputs: int) -> Float[np.ndarray, "O I"]:
    """The matrix that lies in panels, in float32: the very numbers of the `gguf` package.

    Example:
        >>> blocks = panels_for(1, 32, "Q4_0")
        >>> _ = pack(np.array([[-8.0, 3.2, *[0.0] * 30]]), blocks)
        >>> unpack(blocks, 1, 3).tolist()
        [[-8.0, 3.0, 0.0]]
    """
    name = format_name(panels.dtype)
    if name in NUMBERS:
        together = panels.shape[-1] if name == "bfloat16" else 1
        bits = panels.astype(np.uint32) << 16 if together > 1 else panels
        numbers = bits.view(np.float32).reshape(len(panels), -1, PANEL, together).transpose(0, 2, 1, 3)
        numbers = numbers.reshape(len(panels) * PANEL, -1)
    else:
        numbers = _unpacked_blocks(panels, BLOCKS[name])
    return np.ascontiguousarray(numbers[:outputs, :inputs])


def _unpacked_blocks(panels: np.ndarray, block: BlockFormat) -> np.ndarray:
    P, K = panels.shape
    codes = _codes(panels, block).transpose(0, 4, 1, 2, 3, 5).reshape(P * LANES, K, -1, block.run)

    def by_run(field: str) -> np.ndarray:
        """[outputs, K, runs, 1] of a number of each run, or of the block."""
        values = block_scales(panels)[:, :, None] if field == "d" else panels[field]
        values = (
            values.view(np.float16).astype(np.float32)[:, :, None]
            if values.dtype == np.uint16
            else values.astype(np.float32)
        )
        return values.transpose(0, 3, 1, 2).reshape(P * LANES, K, -1, 1)

    scale = by_run("d") * by_run("scales") if block.scale is not None else by_run("d")
    if block.table:
        numbers = scale * np.array(block.table, np.float32)[codes]
    else:
        numbers = scale * (codes.astype(np.float32) - np.float32(block.middle))
    if block.minimum == "m":
        numbers = numbers + by_run("m")
    elif block.minimum:
        numbers = numbers - by_run("dmin") * by_run("mins")
    return numbers.reshape(P * LANES, -1)


def rounded_blocks(rows: Float[np.ndarray, "O I"], name: str) -> np.ndarray:
    """Blocks [O, K] of a matrix, as `raw_blocks`, in Q8_0, Q4_0 or Q4_1: the scale lets the largest weight of a block be 127, or -8,
    times it; in Q4_1 the lowest weight has code 0 and the largest 15.
    """
    w = np.pad(as_float32(rows), ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(len(rows), -1, BLOCK)
    raw = np.zeros(w.shape[:2], raw_blocks(name))
    middle = 8 if name == "Q4_0" else 0
    last = 127 if name == "Q8_0" else 15
    if name == "Q8_0":
        scale = np.abs(w).max(-1, keepdims=True) / np.float32(127)
    elif name == "Q4_0":
        low = w.min(-1, keepdims=True)
        high = w.max(-1, keepdims=True)
        # zeros have the scale 0, and not -0
        scale = np.where(high >= -low, high, low) / np.float32(-8) + np.float32(0)
    else:
        minimum = w.min(-1, keepdims=True).astype(np.float16)
        scale = (w.max(-1, keepdims=True) - minimum.astype(np.float32)) / np.float32(15)
        raw["m"] = minimum[..., 0].view(np.uint16)
        w = w - minimum.astype(np.float32)
    half = scale.astype(np.float16)
    raw["d"] = half[..., 0].view(np.uint16)
    codes = w / np.where(half == 0, np.float32(1), half.astype(np.float32))
    np.rint(codes, out=codes)
    codes += np.float32(middle)
    np.clip(codes, -127 if last == 127 else 0, last, out=codes)
    whole = codes.astype(np.int8).view(np.uint8)
    packed = whole if last == 127 else whole[..., : BLOCK // 2] | whole[..., BLOCK // 2 :] << 4
    raw["codes"] = np.ascontiguousarray(packed).view("<u4")
    return raw
