"""Softmax over columns that come tile by tile, in powers of two: nothing of a whole row is stored (Milakov & Gimelshein 2018, arXiv 1805.02867).

    x       score of a column in units of log2
    m       top of a row: the smallest whole number that no x so far exceeds
    weight  2^(x - m), not yet divided by the row's total

As m is whole, a row that meets a larger score is scaled by a power of two, without rounding: bits do not depend on where tiles begin.
A weight below 2^-126 is zero. Weights are added in the lane of their position, modulo LANES_OF_TOTAL.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from polydraft.models.matrices.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    WHOLE,
    WHOLE_BITS,
    VectorCode,
)
from polydraft.numerics.compile_time import inner

LANES_OF_TOTAL = 16
TERMS = 32
"""Columns whose weights share a scale where they are rounded to bytes."""
VALUES = 127
"""The largest rounded weight."""
MIN_TOP = np.float32(-(2**20))
"""Of a row that has met no column."""
_MIN_EXPONENT = -126.0
_SMALLEST = -(2.0**21)


def _coefficients(degree: int) -> list[float]:
    """Of r, r^2, ... in 2^r for |r| <= 1/2: through Chebyshev's nodes, so that 2^0 is 1."""
    nodes = np.cos(np.pi * (np.arange(degree) + 0.5) / degree) / 2
    return np.polynomial.polynomial.polyfit(nodes, (np.exp2(nodes) - 1) / nodes, degree - 1).tolist()


_POWERS = _coefficients(6)
"""2^r to 2e-9."""


def _power(code, x, shift):
    """2^(x - shift), zero below 2^-126; shift is whole, and the result at most 2^127. What is no number stays none.

    x is rounded to a whole number before the shift: the rest of it has the same bits whatever the shift is.
    """
    b = code.builder
    rounding = code.floats(WHOLE)
    x = b.select(b.fcmp_ordered("<", x, code.floats(_SMALLEST)), code.floats(_SMALLEST), x)
    whole = b.fsub(b.fadd(x, rounding), rounding)
    r = b.fsub(x, whole)
    exponent = b.fsub(whole, shift)
    total = code.floats(_POWERS[-1])
    for c in (*_POWERS[-2::-1], 1.0):
        total = code.fma(total, r, code.floats(c))
    bits = b.sub(b.bitcast(b.fadd(exponent, rounding), INTS), code.ints(WHOLE_BITS - 127))
    power = b.fmul(total, b.bitcast(b.shl(bits, code.ints(23)), FLOATS))
    return b.select(b.fcmp_ordered("<", exponent, code.floats(_MIN_EXPONENT)), code.floats(0), power)


def _larger(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _top(code, x):
    """The largest lane, by whole numbers that are ordered alike."""
    b = code.builder
    bits = b.bitcast(x, INTS)
    ordered = b.xor(bits, b.and_(b.ashr(bits, code.ints(31)), code.ints(0x7FFFFFFF)))
    top = code.across("smax", [ordered])
    sign = b.and_(b.ashr(top, ir.Constant(INT, 31)), ir.Constant(INT, 0x7FFFFFFF))
    return b.bitcast(b.xor(top, sign), FLOAT)


def _pointers(builder, *addresses):
    return [builder.inttoptr(address, BYTE.as_pointer()) for address in addresses]


@intrinsic
def tile_top(typingctx, x, n):
    """The largest of n float32 at an address, n a multiple of 16."""

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[1].type)
        (source,) = _pointers(builder, args[0])
        tops = [cgutils.alloca_once_value(builder, code.floats(-np.inf)) for _ in range(0, 16, LANES)]
        with code.loop(args[1], 16) as (first, _):
            for part, top in enumerate(tops):
                value = code.load(code.at(code.at(source, first, 4), 4 * LANES * part), FLOATS)
                builder.store(_larger(builder, value, builder.load(top)), top)
        values = [builder.load(top) for top in tops]
        return _top(code, values[0] if len(values) == 1 else _larger(builder, *values))

    return types.float32(types.int64, types.int64), emit


def _softening(halves):
    """Compiled code: n scores at an address -> weights from there on, in float32 or rounded to bfloat16; they are added to lanes. n: a multiple of 16."""

    @intrinsic
    def soften(typingctx, x, n, top, lanes):
        return types.void(types.int64, types.int64, types.float32, types.int64), emit

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[1].type)
        source, lanes = _pointers(builder, args[0], args[3])
        shift = code.spread(args[2])
        places = [code.at(lanes, 4 * LANES * part) for part in range(16 // LANES)]
        totals = [cgutils.alloca_once_value(builder, code.load(place, FLOATS)) for place in places]
        with code.loop(args[1], 16) as (first, _):
            for part, total in enumerate(totals):
                index = builder.add(first, code.number(LANES * part))
                weight = _power(code, code.load(code.at(source, index, 4), FLOATS), shift)
                if halves:
                    code.store(_halved(code, weight), code.at(source, index, 2))
                else:
                    code.store(weight, code.at(source, index, 4))
                builder.store(builder.fadd(builder.load(total), weight), total)
        for place, total in zip(places, totals, strict=True):
            code.store(builder.load(total), place)
        return context.get_dummy_value()

    return soften


def _halved(code, x):
    """The nearest bfloat16, halves to even."""
    b = code.builder
    bits = b.bitcast(x, INTS)
    odd = b.and_(b.lshr(bits, code.ints(16)), code.ints(1))
    rounded = b.lshr(b.add(bits, b.add(odd, code.ints(0x7FFF))), code.ints(16))
    return b.trunc(rounded, ir.VectorType(ir.IntType(16), LANES))


soften_tile = _softening(False)
soften_to_halves = _softening(True)


@intrinsic
def block_top(typingctx, x, logs):
    """Add logarithms to TERMS scores at an address; the largest sum."""

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[0].type)
        source, logs = _pointers(builder, *args)
        top = None
        for offset in range(0, 4 * TERMS, 4 * LANES):
            place = code.at(source, offset)
            value = builder.fadd(code.load(place, FLOATS), code.load(code.at(logs, offset), FLOATS))
            code.store(value, place)
            top = value if top is None else _larger(builder, value, top)
        return _top(code, top)

    return types.float32(types.int64, types.int64), emit


@intrinsic
def soften_block(typingctx, x, inverses, top, factor, lanes):
    """TERMS sums of `block_top` at an address -> one scale and TERMS bytes there: 2^(sum - top) factor, of which each is code times scale.

    inverses: address of what each is multiplied by before it is added to lanes.
    """

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[0].type)
        source, inverses, lanes = _pointers(builder, args[0], args[1], args[4])
        shift = code.spread(args[2])
        factor = code.spread(args[3])
        rounding = code.floats(WHOLE)
        most = code.floats(VALUES)
        offsets = range(0, 4 * TERMS, 4 * LANES)
        weights = [_power(code, code.load(code.at(source, at), FLOATS), shift) for at in offsets]
        for k in range(16 // LANES):
            place = code.at(lanes, 4 * LANES * k)
            total = code.load(place, FLOATS)
            for at, weight in list(zip(offsets, weights, strict=True))[k :: 16 // LANES]:
                total = code.fma(
                    builder.fmul(weight, code.load(code.at(inverses, at), FLOATS)), factor, total
                )
            code.store(total, place)
        for at, weight in zip(offsets, weights, strict=True):
            codes = builder.bitcast(code.fma(weight, most, rounding), INTS)
            code.store(builder.trunc(codes, ir.VectorType(BYTE, LANES)), code.at(source, 4 + at // 4))
        code.store(builder.fmul(args[3], ir.Constant(FLOAT, float(np.float32(1 / VALUES)))), source)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32, types.int64), emit


@intrinsic
def powers(typingctx, x, out, n):
    """2^-x of n float32 at an address, n a multiple of 16; both are addresses."""

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[2].type)
        source, target = _pointers(builder, *args[:2])
        with code.loop(args[2], LANES) as (first, _):
            value = code.load(code.at(source, first, 4), FLOATS)
            code.store(_power(code, builder.fneg(value), code.floats(0)), code.at(target, first, 4))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@inner
def power_of_two(x):
    """2^x of a whole number up to 127, zero below -126."""
    return (
        np.int32((np.int32(x) + np.int32(127)) << np.int32(23)).view(np.float32)
        if x >= np.float32(-126)
        else np.float32(0)
    )
