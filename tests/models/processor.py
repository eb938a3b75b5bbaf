"""`python -m tests.models.processor`: which vectors products run on, the bits of their results, and what the same code is on an ARM processor."""

import hashlib
import json

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core.registry import cpu_target

from polydraft.models.compiled.layers import multiply
from polydraft.models.matrices import dot_products, tiles
from polydraft.models.matrices.formats import BLOCKS, DTYPES, ROUNDED
from polydraft.models.matrices.products import BYTES, EXACT, MatrixFormat, packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import LANES, instruction_set
from tests.models.blocks import packed_blocks, random_blocks

FORMATS = {
    "bfloat16": MatrixFormat("bfloat16"),
    **{name: MatrixFormat(name, BYTES) for name in ("Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "IQ4_NL")},
}
ROWS = 7
INPUTS = 512
OUTPUTS = 70
ARM = "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod"


@njit(cache=True)
def _run(x, w, rounded, y, rows):
    multiply(x, w, 0, rounded, y, rows)


def _numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """In [-1, 1), the same on every processor, as those of `torch.randn` are not."""
    return 2 * rng.random(shape, np.float32) - 1


def bits(kind: MatrixFormat) -> str:
    """A digest of a product's bits: the code of the largest weight and of the largest activation of a block among them."""
    rng = np.random.default_rng(0)
    x = _numbers(rng, ROWS, INPUTS)
    if kind.weights in BLOCKS:
        w = packed_blocks(kind.weights, kind.rounding, [random_blocks(kind.weights, OUTPUTS, INPUTS)])
    else:
        w = packed([_numbers(rng, OUTPUTS, INPUTS)], kind)
    y = np.zeros((ROWS, w.outputs), np.float32)
    _run(x, w, np.zeros((ROWS, rounded_bytes(INPUTS)), np.uint8), y, ROWS)
    return hashlib.sha256(y[:, :OUTPUTS].tobytes()).hexdigest()


def emitted(kind: MatrixFormat) -> ir.Module:
    """The code of a tile of three rows."""
    activations = np.dtype(np.float32) if kind.rounding == EXACT else ROUNDED
    long = types.int64
    stored = [types.DType(from_dtype(dtype)) for dtype in (DTYPES[kind.weights], activations)]
    made = tiles.tile_of(3)
    signature, emit = made._defn(cpu_target.typing_context, *[long] * 7, *stored)  # pyright: ignore[reportAttributeAccessIssue]
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(cpu_target.target_context, builder, signature, [*function.args, None, None])
    builder.ret_void()
    return module


def on_arm(kind: MatrixFormat) -> str:
    """The assembly of a tile for a processor with NEON and its dot products."""
    triple, name, features = ARM
    module = emitted(kind)
    module.triple = triple
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return (
        llvm.Target.from_triple(triple)
        .create_target_machine(name, features)
        .emit_assembly(llvm.parse_assembly(str(module)))
    )


if __name__ == "__main__":
    found = {"vectors": instruction_set(), "lanes": LANES, "dots": dot_products.DOTS_BYTES}
    found |= {"bits": {name: bits(kind) for name, kind in FORMATS.items()}}
    dot_products.DOTS_BYTES = "dotprod"
    dot_products.LOOK_UP = None
    print(
        json.dumps(
            found
            | {
                "arm": {name: on_arm(kind).count("sdot") for name, kind in FORMATS.items()}
                if LANES == 8
                else {}
            }
        )
    )
