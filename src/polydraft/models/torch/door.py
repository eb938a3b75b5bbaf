"""The door between tensors of PyTorch and the arrays of NumPy that everything else works on.

    weights   `out` and `into` keep the bits: numbers that NumPy has no type for are those of `ml_dtypes`
    rows      `outward` widens what a model puts out to float32 or float64, which loses nothing; `inward` takes arrays to a model's device

On the CPU memory is shared; from a device it is copied through pinned memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from polydraft.core.arrays import host, like
from polydraft.numerics.floats import BFLOAT16, FLOAT8

OWN_TYPES = {getattr(torch, own_type.name): own_type for own_type in (BFLOAT16, *FLOAT8.values())}
"""Of numbers that PyTorch has and NumPy has not."""
BITS = {1: torch.uint8, 2: torch.int16}
"""Integers of so many bytes, as which both know their bits."""
WIDE = (torch.float32, torch.float64)


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


def outward(x: Shaped[Tensor, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """A tensor as an array.

    Example:
        >>> outward(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype('float32')
    """
    return host(x.float() if x.is_floating_point() and x.dtype not in WIDE else x)


def inward(x: Shaped[np.ndarray, "*shape"], model: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor on the device of a model or another tensor, in a format of its own or another.

    Example:
        >>> inward(np.zeros(2), torch.empty(0), torch.float32).dtype
        torch.float32
    """
    return like(x, torch.empty(0, device=model.device)).to(dtype)


@torch.inference_mode()
def logits_of_text(module: Any, token_ids: Sequence[int]) -> Float64[np.ndarray, "T V"]:
    """Logits of a module of transformers after each token of a text, by a forward pass over all of it."""
    ids = torch.tensor([list(token_ids)], device=module.device)
    return outward(module(ids).logits[0].double())


def states_outward(
    states: Mapping[int, Float[Tensor, "B T D"]] | Sequence[Float[Tensor, "B T D"]], layers: Sequence[int]
) -> dict[int, Float[np.ndarray, "B T D"]]:
    """Hidden states of these layers.

    Example:
        >>> list(states_outward([torch.zeros(1, 2, 3)] * 2, [1]))
        [1]
    """
    return {layer: outward(states[layer]) for layer in layers}
