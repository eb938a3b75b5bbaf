"""Numbers that threads share, for compiled code: read, written and changed as a whole, in an order that all threads agree on.

array: of int64; i: a place of it. A store is seen by whoever then loads it, with all that was written before it.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _pointer(context, builder, signature, args):
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def load(typingctx, array, i):
    def emit(context, builder, signature, args):
        return builder.load_atomic(_pointer(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.intp), emit


@intrinsic
def store(typingctx, array, i, value):
    def emit(context, builder, signature, args):
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), emit


@intrinsic
def add(typingctx, array, i, value):
    """The sum."""

    def emit(context, builder, signature, args):
        before = builder.atomic_rmw("add", _pointer(context, builder, signature, args), args[2], "seq_cst")
        return builder.add(before, args[2])

    return types.int64(array, types.intp, types.int64), emit


@intrinsic
def swap(typingctx, array, i, old, new):
    """Whether array[i] was `old` and now is `new`."""

    def emit(context, builder, signature, args):
        exchange = builder.cmpxchg(
            _pointer(context, builder, signature, args), args[2], args[3], "seq_cst", "monotonic"
        )
        return builder.extract_value(exchange, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), emit


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a waiting loop, where it has a word for that."""

    def emit(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit
