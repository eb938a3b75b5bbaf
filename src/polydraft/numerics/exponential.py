"""Arithmetic for compiled loops in vector registers whose bits are written in the source: fused multiply-add, and exp made of it.

A flag that lets LLVM contract or reorder leaves the rounding to whatever a loop was inlined into: the same function gave other
bits where it was compiled than where it was loaded. So every fused operation is called by name, and no flag is set.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from polydraft.numerics.compiled_code import njit

LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
ROUNDING = np.float32(1.5 * 2**23)
"""Added to a number below 2^22 and taken away again, that becomes a whole number, halves to even."""
_EXP = tuple(np.float32(1 / d) for d in (1, 2, 6, 24, 120, 720, 5040))


@intrinsic
def fma(typingctx, a, b, c):
    """a b + c of float32, rounded once."""

    def emit(context, builder, signature, args):
        number = ir.FloatType()
        fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(number, [number] * 3), "llvm.fma.f32"
        )
        return builder.call(fused, args)

    return types.float32(types.float32, types.float32, types.float32), emit


@njit(forceinline=True, error_model="numpy")
def exp(x):
    """exp of a float32 within 2 ulp between -87 and 88, constant beyond; it calls nothing, so that loops over it are vectorised."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    k = fma(x, LOG2_E, ROUNDING) - ROUNDING
    r = fma(k, -_LN2_HIGH, x)
    r = fma(k, -_LN2_LOW, r)
    p = _EXP[6]
    p = fma(p, r, _EXP[5])
    p = fma(p, r, _EXP[4])
    p = fma(p, r, _EXP[3])
    p = fma(p, r, _EXP[2])
    p = fma(p, r, _EXP[1])
    p = fma(p, r, _EXP[0])
    p = fma(p, r, np.float32(1.0))
    power = (np.int32(k) + np.int32(127)) << np.int32(23)
    return p * np.int32(power).view(np.float32)
