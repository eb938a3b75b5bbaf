"""Float16 numbers are widened without the instruction, bit for bit, on processors that lack it."""

import ctypes

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from polydraft.models.matrices import block_code
from polydraft.models.matrices.products import BYTES, MatrixFormat
from polydraft.models.matrices.vectors import BYTE, LANES, VectorCode
from tests.models.processor import emitted

LONG = ir.IntType(64)


def machine_code(emit):
    """A function of two pointers and the engine that owns it: emit(code, source, destination)."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer()] * 2)
    function = ir.Function(module, kind, "widen")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(VectorCode(builder, LONG), *function.args)
    builder.ret_void()
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(str(module)), llvm.Target.from_default_triple().create_target_machine()
    )
    engine.finalize_object()
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
        engine.get_function_address("widen")
    ), engine


def test_every_float16_is_widened_in_integers_to_the_bits_of_its_float32():
    def emit(code, source, destination):
        with code.loop(code.number(1 << 16), LANES) as (index, _):
            halves = code.load(code.at(source, index, 2), ir.VectorType(ir.IntType(16), LANES))
            code.store(block_code.widened(code, halves), code.at(destination, index, 4))

    widen, _engine = machine_code(emit)
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.zeros(1 << 16, np.float32)
    widen(halves.ctypes.data, floats.ctypes.data)
    expected = halves.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(floats[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(floats[~numbers]).all()


def test_code_for_a_processor_without_the_instruction_calls_nothing_that_is_not_there(monkeypatch):
    q8_0 = MatrixFormat("Q8_0", BYTES)
    assert "fpext" in str(emitted(q8_0)) or not block_code.CONVERTS_HALVES
    monkeypatch.setattr(block_code, "CONVERTS_HALVES", False)
    assert "half" not in str(emitted(q8_0))
