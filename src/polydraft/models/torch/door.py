"""Where arrays and tensors of PyTorch meet: they share memory on the CPU, and numbers that NumPy has no type for are those of `ml_dtypes`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.numerics.floats import BFLOAT16, FLOAT8

OWN_TYPES = {getattr(torch, own_type.name): own_type for own_type in (BFLOAT16, *FLOAT8.values())}
"""Of numbers that PyTorch has and NumPy has not."""
BITS = {1: torch.uint8, 2: torch.int16}
"""Integers of so many bytes, as which both know their bits."""


def out(tensor: Tensor) -> np.ndarray:
    """A tensor as an array, in whose memory it is where that is the host's.

    Example:
        >>> out(torch.ones(2, dtype=torch.bfloat16))
        array([1, 1], dtype=bfloat16)
    """
    tensor = tensor.detach().cpu()
    own_type = OWN_TYPES.get(tensor.dtype)
    if own_type is None:
        return tensor.numpy()
    return tensor.view(BITS[own_type.itemsize]).numpy().view(own_type)


def into(array: np.ndarray, device: Any = "cpu") -> Tensor:
    """An array as a tensor on a device; on the CPU in the array's memory, but a copy of one that may not be written to.

    Example:
        >>> into(np.ones(2, BFLOAT16))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    array = array if array.flags.writeable else array.copy()
    own_type = next((ours for ours, theirs in OWN_TYPES.items() if theirs == array.dtype), None)
    if own_type is None:
        return torch.from_numpy(array).to(device)
    return (
        torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1"))
        .view(own_type)
        .to(device)
    )


def numpy_type(dtype: torch.dtype) -> np.dtype:
    """The type of NumPy, or of `ml_dtypes`, that is a tensor's.

    Example:
        >>> numpy_type(torch.bfloat16), numpy_type(torch.float32)
        (dtype(bfloat16), dtype('float32'))
    """
    return OWN_TYPES.get(dtype) or np.dtype(str(dtype).removeprefix("torch."))
