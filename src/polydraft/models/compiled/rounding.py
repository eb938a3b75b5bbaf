"""What rows are rounded to before a product, where the format says so: bfloat16, or signed bytes with a scale for each block.

Rounding is row by row, so that a row's bits are its own.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from polydraft.models.compiled.formats import BLOCK
from polydraft.models.compiled.vectors import BYTE, FLOAT, FLOATS, INT, INTS, LANES, VectorCode

__all__ = ["round_rows", "rounds"]

_ROUNDING = 1.5 * 2**23
_ROUNDING_BITS = int(np.float32(_ROUNDING).view(np.int32))
"""Added to a number below 2^22, its last bit is 1: the sum is rounded to a whole number, halves to even."""


def rounds(w, rounded):
    """Whether products with these weights take activations that were rounded; both as numba's types."""
    return rounded.dtype != types.float32 and isinstance(w.dtype, types.Record) == isinstance(rounded.dtype, types.Record)


@intrinsic
def _round_block(typingctx, x, begin, rounded, block):
    """Signed bytes of BLOCK activations, x.flat[begin:], the largest 127 times the scale; they become rounded.flat[block]."""

    def emit(context, builder, signature, args):
        code, kind, parts = VectorCode(builder, args[1].type), signature.args[2].dtype, range(BLOCK // LANES)
        source, target = (code.data(context, signature.args[i], args[i])[0] for i in (0, 2))
        source, target = code.at(source, args[1], 4), code.at(target, args[3], kind.size)

        def put(name, value, offset=0):
            code.store(value, code.at(target, kind.offset(name) + offset))

        values = [code.load(code.at(source, 4 * LANES * k), FLOATS) for k in parts]
        sizes = [builder.and_(builder.bitcast(v, INTS), code.ints(0x7FFFFFFF)) for v in values]
        largest = builder.bitcast(code.across("umax", sizes), FLOAT)
        zero, most = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
        inverse = code.spread(builder.select(builder.fcmp_ordered(">", largest, zero), builder.fdiv(most, largest), zero))
        rounding = code.floats(_ROUNDING)
        scaled = [builder.bitcast(builder.fadd(builder.fmul(v, inverse), rounding), INTS) for v in values]
        codes = [builder.sub(v, code.ints(_ROUNDING_BITS)) for v in scaled]
        for k in parts:
            put("codes", builder.trunc(codes[k], ir.VectorType(BYTE, LANES)), k * LANES)
        total, scale = code.across("add", codes), builder.fdiv(largest, most)
        put("scale", scale)
        put("sum", builder.fmul(scale, builder.sitofp(total, FLOAT)))
        for middle in (8, 128):
            put(f"minus_{middle}", builder.mul(total, ir.Constant(INT, -middle)))
        return context.get_dummy_value()

    return types.void(x, types.intp, rounded, types.intp), emit


def round_rows(x, n, w, rounded, begin, end):
    """Round rows begin .. end-1, n activations each, as the product with w takes them; nothing where it takes them as they are."""


@overload(round_rows)
def _round_rows(x, n, w, rounded, begin, end):
    if not rounds(w, rounded):
        return lambda x, n, w, rounded, begin, end: None
    if isinstance(w.dtype, types.Record):

        def run(x, n, w, rounded, begin, end):
            whole = n // BLOCK
            for t in range(begin, end):
                first = t * rounded.shape[1]
                for k in range(whole):
                    _round_block(x, t * x.shape[1] + k * BLOCK, rounded, first + k)
                if n > whole * BLOCK:
                    last = np.zeros(BLOCK, np.float32)
                    last[: n - whole * BLOCK] = x[t, whole * BLOCK : n]
                    _round_block(last, 0, rounded, first + whole)
    else:

        def run(x, n, w, rounded, begin, end):
            for t in range(begin, end):
                bits = x[t].view(np.uint32)
                for i in range(n):  # to the nearest, halves to even
                    rounded[t, i] = (bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)

    return run
