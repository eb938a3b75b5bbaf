"""What all models of torch in slots have beside the tensors that pass `door`: where they are, and what they compute in."""

import torch

from polydraft.models.memory import weight_bytes
from polydraft.models.slots import SlotModel


class TorchModel(SlotModel):
    """A model of torch in slots. `device` and `dtype` are those of its weights; `weight_bytes` counts them."""

    device: torch.device
    dtype: torch.dtype
    same_bits = False

    @property
    def num_threads(self) -> int:
        """Torch's."""
        return torch.get_num_threads()

    def take_module(self, module: torch.nn.Module) -> None:
        """Be where a module is."""
        weights = next(module.parameters())
        self.take_place(weights.device, weights.dtype)
        self.weight_bytes = weight_bytes(module)

    def take_place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Be on a device, and compute in a number format."""
        self.device = device
        self.dtype = dtype
        self.on_device = device.type != "cpu"
        self.number_format = str(dtype).removeprefix("torch.")
