"""The processor's vectors, and memory that suits them."""

import mmap
from contextlib import suppress

import llvmlite.binding
import numpy as np

__all__ = ["FEATURES", "LANES", "PANEL", "aligned", "instruction_set"]

FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8
"""Floats in one vector."""
PANEL = 2 * LANES
"""Outputs that a tile computes at once."""
_HUGE = 2**21


def instruction_set() -> str:
    """Which vectors the kernels run on, for reports.

    Example:
        >>> instruction_set() in ("AVX-512", "AVX2", "NEON", "baseline")
        True
    """
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    return next((name for feature, name in known.items() if FEATURES.get(feature)), "baseline")


def aligned(*shape: int, dtype: np.dtype | type[np.generic] = np.float32, huge: bool = False) -> np.ndarray:
    """Zeros that begin on a cache line; the system hands out a page when it is first written.

    huge: in pages of two MiB where the system has them, for arrays that are read from end to end again and again: small pages
    would push everything else out of the table in which the processor finds pages.

    Example:
        >>> aligned(3, 5).ctypes.data % 64, aligned(1024, 1024, huge=True).ctypes.data % 64
        (0, 0)
    """
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge and advice is not None and 4 * size >= _HUGE:
        pages = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system built without them
            pages.madvise(advice)
        raw, start = np.frombuffer(pages, np.uint8), _HUGE
    else:
        raw, start = np.zeros(size + 64, np.uint8), 64
    start = -raw.ctypes.data % start
    return raw[start : start + size].view(dtype).reshape(shape)
