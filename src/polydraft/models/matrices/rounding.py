"""What rows are rounded to before a product, where the format says so: signed bytes with a scale for each block, or bfloat16.

Rounding is row by row, so that a row's bits are its own.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from polydraft.models.matrices.formats import BLOCK, ROUNDED
from polydraft.models.matrices.products import EXACT, HALVES
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

_SIZE = ROUNDED.itemsize
_HALVES_SIZE = 2 * BLOCK


@intrinsic
def _quantize_block(typingctx, x, rounded):
    """Signed bytes of BLOCK activations, the largest 127 times the scale; x, rounded: the addresses of both."""

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[0].type)
        parts = range(BLOCK // LANES)
        source, target = (builder.inttoptr(address, BYTE.as_pointer()) for address in args)

        def put(name, value, offset=0):
            code.store(value, code.at(target, (ROUNDED.fields or {})[name][1] + offset))

        values = [code.load(code.at(source, 4 * LANES * k), FLOATS) for k in parts]
        sizes = [builder.and_(builder.bitcast(v, INTS), code.ints(0x7FFFFFFF)) for v in values]
        largest = builder.bitcast(code.across("umax", sizes), FLOAT)
        zero = ir.Constant(FLOAT, 0.0)
        most = ir.Constant(FLOAT, 127.0)
        inverse = code.spread(
            builder.select(builder.fcmp_ordered(">", largest, zero), builder.fdiv(most, largest), zero)
        )
        rounding = code.floats(WHOLE)
        scaled = [builder.bitcast(builder.fadd(builder.fmul(v, inverse), rounding), INTS) for v in values]
        codes = [builder.sub(v, code.ints(WHOLE_BITS)) for v in scaled]
        for k in parts:
            put("codes", builder.trunc(codes[k], ir.VectorType(BYTE, LANES)), k * LANES)
        scale = builder.fdiv(largest, most)
        half = len(codes) // 2
        halves = [code.across("add", codes[:half]), code.across("add", codes[half:])]
        total = builder.add(*halves)
        put("scale", scale)
        put("sum", builder.fmul(scale, builder.sitofp(total, FLOAT)))
        for k, number in enumerate((total, *halves)):
            start = builder.sub(ir.Constant(INT, WHOLE_BITS), builder.shl(number, ir.Constant(INT, 7)))
            put("halves" if k else "start", start, 4 * max(0, k - 1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _halve_block(typingctx, x, halves):
    """BLOCK activations as the nearest bfloat16, halves to even; x, halves: the addresses of both."""

    def emit(context, builder, signature, args):
        code = VectorCode(builder, args[0].type)
        source, target = (builder.inttoptr(address, BYTE.as_pointer()) for address in args)
        for k in range(BLOCK // LANES):
            bits = code.load(code.at(source, 4 * LANES * k), INTS)
            is_odd = builder.and_(builder.lshr(bits, code.ints(16)), code.ints(1))
            nearest = builder.add(builder.add(bits, code.ints(0x7FFF)), is_odd)
            halves = builder.trunc(builder.lshr(nearest, code.ints(16)), ir.VectorType(ir.IntType(16), LANES))
            code.store(halves, code.at(target, 2 * LANES * k))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@inner
def quantize_rows(x, n, rounding, rounded, begin, end):
    """Write the rounded rows begin .. end-1, n activations each; nothing where the product takes them as they are.

    rounding: EXACT, HALVES or BYTES, see `products.rounding_of`.

    rounded: [rows, bytes], see `rounded_bytes`.
    """
    if rounding == EXACT:
        return
    whole = n // BLOCK
    size = _HALVES_SIZE if rounding == HALVES else _SIZE
    for t in range(begin, end):
        row = x[t]
        out = rounded[t]
        last = out[len(out) - 4 * BLOCK :].view(np.float32)
        for i in range(BLOCK if n > whole * BLOCK else 0):
            last[i] = row[whole * BLOCK + i] if whole * BLOCK + i < n else np.float32(0)
        for k in range(-(-n // BLOCK)):
            block = row.ctypes.data + 4 * k * BLOCK if k < whole else last.ctypes.data
            place = out.ctypes.data + k * size
            if rounding == HALVES:
                _halve_block(block, place)
            else:
                _quantize_block(block, place)


def rounded_bytes(n: int) -> int:
    """Bytes of a row of n activations, whatever they are rounded to.

    Example:
        >>> rounded_bytes(64) >= 2 * ROUNDED.itemsize
        True
    """
    return -(-n // BLOCK) * max(_SIZE, _HALVES_SIZE) + 4 * BLOCK
