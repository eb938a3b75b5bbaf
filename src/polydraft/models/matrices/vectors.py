"""The processor's vectors: memory that suits them, and code for them in LLVM's own language."""

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

from polydraft.errors import CapacityError
from polydraft.numerics.exponential import ROUNDING

_CHOSEN: str | None = getattr(config, "CPU_FEATURES", None)
FEATURES = {
    name[1:]: name[0] == "+"
    for name in (get_host_cpu_features() if _CHOSEN is None else _CHOSEN).split(",")
    if name
}
"""What numba compiles for: the processor's, or those of `NUMBA_CPU_FEATURES`."""
LANES = 16 if FEATURES.get("avx512f") else 8
"""Floats in one vector."""
PANEL = 2 * LANES
"""Outputs that a tile computes at once."""
_HUGE = 2**21
_MADVISE: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None
BYTE = ir.IntType(8)
INT = ir.IntType(32)
FLOAT = ir.FloatType()
INTS = ir.VectorType(INT, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)


class _Bfloat(ir.HalfType):
    """bfloat16, which llvmlite has no name for."""

    def __str__(self) -> Any:
        return "bfloat"


BFLOATS = ir.VectorType(_Bfloat(), 2 * LANES)
WHOLE = float(ROUNDING)
WHOLE_BITS = int(ROUNDING.view(np.int32))
"""A number below 2^22 plus WHOLE is rounded to a whole number, and its bits are WHOLE_BITS plus that."""


def instruction_set() -> str:
    """Which vectors the kernels run on, for reports.

    Example:
        >>> instruction_set() in ("AVX-512", "AVX2", "NEON", "baseline")
        True
    """
    names = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    return next((name for feature, name in names.items() if FEATURES.get(feature)), "baseline")


def aligned(*shape: int, dtype: np.dtype | type[np.generic] = np.float32, huge: bool = False) -> np.ndarray:
    """Zeros that begin on a cache line; the system hands out a page when it is first written.

    huge: in pages of two MiB where the system has them, for arrays that are read from end to end again and again: small pages
    would push everything else out of the table in which the processor finds pages. Else in small pages: a first token in each of a
    hundred parts of a cache would fill as many huge ones with zeros, while everybody waits.

    Example:
        >>> aligned(3, 5).ctypes.data % 64, aligned(1024, 1024, huge=True).ctypes.data % 64
        (0, 0)
    """
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None and 4 * size >= _HUGE:
        # MAP_NORESERVE: what is not written yet is not promised, as a cache of many long texts may have more room than there is memory
        flags = (
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" and not huge else 0)
        )
        try:
            pages = mmap.mmap(-1, size + _HUGE, flags=flags)
        except OSError as error:
            raise CapacityError(
                f"{size / 2**30:.2f} GiB could not be reserved ({error.strerror}). Lower max_model_len or max_num_seqs."
            ) from error
        with suppress(OSError):  # a system built without them
            pages.madvise(advice)
        raw = np.frombuffer(pages, np.uint8)
        start = _HUGE if huge else 64
    else:
        raw = np.zeros(size + 64, np.uint8)
        start = 64
    start = -raw.ctypes.data % start
    return raw[start : start + size].view(dtype).reshape(shape)


def give_back(array: np.ndarray) -> None:
    """Give the system back the whole pages of a contiguous array of `aligned`; what was there is lost.

    Example:
        >>> cache = aligned(1024, 1024)
        >>> cache[:] = 1
        >>> give_back(cache[256:512])
        >>> bool(cache[255].all() and cache[512].all())
        True
    """
    if _MADVISE is None or not array.flags.c_contiguous:
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        _MADVISE(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class VectorCode:
    """What compiled functions are written with in LLVM's own language, through numba; pointers are to bytes."""

    def __init__(self, builder, index):
        self.builder = builder
        self.index = index

    def data(self, context, array_type, array):
        """Pointer to the first element of an array, and the size of an element."""
        kind = array_type.dtype
        size = kind.size if isinstance(kind, types.Record) else kind.bitwidth // 8
        return self.builder.bitcast(
            context.make_array(array_type)(context, self.builder, array).data, BYTE.as_pointer()
        ), size

    def number(self, value):
        return ir.Constant(self.index, value)

    def at(self, pointer, *offset):
        """pointer + product of the factors given."""
        total = offset[0] if isinstance(offset[0], ir.Value) else self.number(offset[0])
        for factor in offset[1:]:
            total = self.builder.mul(total, self.number(factor))
        return self.builder.gep(pointer, [total])

    def load(self, pointer, kind):
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)

    def call(self, name, *arguments, result=None):
        kind = ir.FunctionType(result or arguments[0].type, [x.type for x in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def fma(self, a, b, c):
        return self.call(f"llvm.fma.v{LANES}f32", a, b, c)

    def store(self, value, pointer):
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=1)

    def loop(self, n, step):
        return cgutils.for_range_slice(self.builder, self.number(0), n, self.number(step))

    def spread(self, value):
        """One number in all lanes."""
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        lane = ir.Constant(INT, 0)
        single = self.builder.insert_element(nothing, value, lane)
        return self.builder.shuffle_vector(single, nothing, ir.Constant(INTS, [0] * LANES))

    def ints(self, value):
        return ir.Constant(INTS, [value] * LANES)

    def shorts(self, value):
        return ir.Constant(ir.VectorType(ir.IntType(16), 2 * LANES), [value] * 2 * LANES)

    def as_bytes(self, ints):
        return self.builder.bitcast(ints, ir.VectorType(BYTE, 4 * LANES))

    def by_quarters(self, operation, total, *bytes_of):
        """operation(four integers, 16 bytes ...) -> four integers, for each four lanes."""
        quarters = []
        for begin in range(0, LANES, 4):
            lanes = ir.Constant(ir.VectorType(INT, 4), list(range(begin, begin + 4)))
            first, *others = (self.builder.shuffle_vector(v, v, lanes) for v in (total, *bytes_of))
            quarters.append(
                operation(first, *(self.builder.bitcast(v, ir.VectorType(BYTE, 16)) for v in others))
            )
        lanes = ir.Constant(INTS, list(range(LANES)))
        return self.builder.shuffle_vector(quarters[0], quarters[1], lanes)

    def floats(self, value):
        return ir.Constant(FLOATS, [float(value)] * LANES)

    def across(self, operation, vectors):
        """One number of all lanes of some vectors of integers."""
        joined = vectors[0]
        for v in vectors[1:]:
            joined = (
                self.builder.add(joined, v)
                if operation == "add"
                else self.call(f"llvm.{operation}.v{LANES}i32", joined, v)
            )
        return self.call(f"llvm.vector.reduce.{operation}.v{LANES}i32", joined, result=INT)
