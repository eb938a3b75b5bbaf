"""Numbers of 16 and of 8 bits in NumPy arrays, whose types are those of `ml_dtypes`, and arrays that have a shape and a type alone."""

import ml_dtypes
import numpy as np
from jaxtyping import Float32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = {"e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}


def as_float32(x: np.ndarray) -> Float32[np.ndarray, "..."]:
    """The same numbers in float32; not copied where they are. A shift widens bfloat16, as the cast of `ml_dtypes` takes twelve times as long.

    Example:
        >>> as_float32(np.array([1.5, -2.0], BFLOAT16)).tolist()
        [1.5, -2.0]
    """
    if x.dtype == BFLOAT16:
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32, copy=False)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest numbers in bfloat16, halves to even.

    Example:
        >>> as_bfloat16(np.array([1.00390625, 1.01171875])).tolist()
        [1.0, 1.015625]
    """
    return x if x.dtype == BFLOAT16 else as_float32(x).astype(BFLOAT16)


def outline(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of this shape and type that holds one number: slices and views of it have the shapes of those of a whole one.

    Example:
        >>> outline((4, 1 << 40), BFLOAT16)[::2].T.shape
        (1099511627776, 2)
    """
    return np.broadcast_to(np.zeros((), dtype), shape)
