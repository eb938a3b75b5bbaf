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
