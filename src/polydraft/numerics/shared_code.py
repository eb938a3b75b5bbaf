"""Calls that compiled code hands to other threads, as two addresses: of the code, and of its arguments.

A function of any arguments becomes one of five integers, which is the same for all; its arguments lie on the stack of the calling function, or where
a program stores them.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_UNITS_OF = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)


@intrinsic
def call_units(typingctx, code, arguments, begin, end, thread):
    """Do what `shared_code` gave the address of."""

    def emit(context, builder, signature, args):
        builder.call(builder.inttoptr(args[0], _UNITS_OF.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


@intrinsic
def shared_code(typingctx, function, arguments):
    """What `threads.share` runs: the addresses of code that calls function(arguments, begin, end, thread), and of the arguments, on the stack of the
    calling function; numbers and arrays, read again by each unit. `function` raises nothing, as nobody would see it: what it allocates is small."""
    argument_types = arguments, types.int64, types.int64, types.int64
    typingctx.resolve_function_type(function, argument_types, {})
    called = function.dispatcher.overloads[argument_types]

    def emit(context, builder, signature, args):
        context.add_linking_libs([called.library])
        kind = context.get_value_type(arguments)
        place = _on_stack(context, builder, arguments, args[1])
        code = ir.Function(
            builder.module, _UNITS_OF, builder.module.get_unique_name(f"units.{called.fndesc.mangled_name}")
        )
        code.linkage = "internal"
        body = ir.IRBuilder(code.append_basic_block("entry"))
        value = _read(body, body.inttoptr(code.args[0], kind.as_pointer()), kind)
        context.call_internal_no_propagate(body, called.fndesc, called.signature, (value, *code.args[1:]))
        body.ret_void()
        return context.make_tuple(
            builder, signature.return_type, [builder.ptrtoint(x, ir.IntType(64)) for x in (code, place)]
        )

    return types.UniTuple(types.int64, 2)(function, arguments), emit


@intrinsic
def put_arguments(typingctx, arguments, address):
    """Write arguments where an address points, for code that is called often; returns how many bytes they take. An address of 0 writes nothing.

    Arrays are written without who owns them: that object ends with this call, and code that counted its owners later would free it again.
    """

    def emit(context, builder, signature, args):
        kind = context.get_value_type(arguments)
        with builder.if_then(builder.icmp_signed("!=", args[1], ir.Constant(ir.IntType(64), 0))):
            _write_borrowed(builder, arguments, args[0], builder.inttoptr(args[1], kind.as_pointer()))
        return ir.Constant(ir.IntType(64), context.get_abi_sizeof(kind))

    return types.int64(arguments, types.int64), emit


def _on_stack(context, builder, kind, value):
    place = cgutils.alloca_once(builder, context.get_value_type(kind))
    _write(builder, value, place)
    return place


def _read(builder, pointer, kind):
    """A value, leaf by leaf: what is not used is not read."""
    if not isinstance(kind, ir.LiteralStructType):
        return builder.load(pointer)
    value = ir.Constant(kind, ir.Undefined)
    for i, part in enumerate(kind.elements):
        value = builder.insert_value(
            value, _read(builder, cgutils.gep_inbounds(builder, pointer, 0, i), part), i
        )
    return value


def _write(builder, value, pointer):
    if not isinstance(value.type, ir.LiteralStructType):
        builder.store(value, pointer)
        return
    for i in range(len(value.type.elements)):
        _write(builder, builder.extract_value(value, i), cgutils.gep_inbounds(builder, pointer, 0, i))


def _write_borrowed(builder, kind, value, pointer):
    """`_write`, with nothing in the place of an array's owner and of its Python object, which numba then does not count. kind: of numba."""
    if not isinstance(kind, (types.BaseTuple, types.Array)):
        builder.store(value, pointer)
        return
    kinds: Any = kind
    for i in range(len(kinds.types) if isinstance(kind, types.BaseTuple) else len(value.type.elements)):
        part = builder.extract_value(value, i)
        place = cgutils.gep_inbounds(builder, pointer, 0, i)
        if isinstance(kind, types.BaseTuple):
            _write_borrowed(builder, kinds.types[i], part, place)
        else:
            builder.store(ir.Constant(part.type, None) if i < 2 else part, place)
