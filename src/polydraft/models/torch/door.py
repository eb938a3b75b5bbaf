"""The door between the tensors of models of torch and the arrays of NumPy that everything else works on.

What a model puts out lies on the host once it is through, and floating point is float32 or float64: bfloat16 and float16 are
widened, which loses nothing. On the CPU memory is shared; from a device it is copied through pinned memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from polydraft.core.arrays import host, like
from polydraft.models.slots import SlotModel

WIDE = (torch.float32, torch.float64)


def outward(x: Shaped[Tensor, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """A tensor as an array.

    Example:
        >>> outward(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype('float32')
    """
    return host(x.float() if x.is_floating_point() and x.dtype not in WIDE else x)


def bits_outward(x: Shaped[Tensor, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """A copy of a tensor as an array of its own format: of `ml_dtypes` where NumPy has none.

    Example:
        >>> bits_outward(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype(bfloat16)
    """
    copied = x.to("cpu", copy=True).contiguous()
    if x.dtype == torch.bfloat16:
        return copied.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return copied.numpy()


def bits_inward(x: Shaped[np.ndarray, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The tensor of the host that `bits_outward` made an array of.

    Example:
        >>> bits_inward(bits_outward(torch.ones(2, dtype=torch.bfloat16))).dtype
        torch.bfloat16
    """
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def inward(x: Shaped[np.ndarray, "*shape"], model: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor on the device of a model or another tensor, in a format of its own or another.

    Example:
        >>> inward(np.zeros(2), torch.empty(0), torch.float32).dtype
        torch.float32
    """
    return like(x, torch.empty(0, device=model.device)).to(dtype)


class TorchModel(SlotModel):
    """A model of torch in slots. `device` and `dtype` are those of its weights; `weight_bytes` counts them."""

    device: torch.device
    dtype: torch.dtype
    same_bits = False

    @property
    def on_device(self) -> bool:
        """See `core.Target`."""
        return self.device.type != "cpu"

    @property
    def number_format(self) -> str:
        """See `core.Target`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_threads(self) -> int:
        """Torch's."""
        return torch.get_num_threads()

    def take_module(self, module: torch.nn.Module) -> None:
        """Be where a module is."""
        weights = next(module.parameters())
        self.dtype = weights.dtype
        self.device = weights.device
        self.weight_bytes = weight_bytes(module)


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's weights.

    Example:
        >>> weight_bytes(torch.nn.Linear(3, 2))
        32
    """
    return sum(p.numel() * p.element_size() for p in module.parameters())


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
