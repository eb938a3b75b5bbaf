"""A block diffusion drafter on disk, see `heads`: a few layers of the Llama family that read blocks of masks, and what the target's states enter by.

config.json          a Llama configuration, `block_size` (masks of a block), `diffusion_layers` (of the target, whose states are injected)
model.safetensors    fc, hidden_norm: from states to what keys and values are made of; mask: its embedding; layers.*, norm
"""

from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.models.checkpoint import layer_shapes

__all__ = ["DiffusionCheckpoint"]


class DiffusionCheckpoint(HeadCheckpoint):
    """A block diffusion drafter."""

    kind = "diffusion"
    LAYERS = "diffusion_layers"

    @property
    def block(self) -> int:
        """Masks of a block, the most that it was trained with."""
        return int(self.config.block_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a drafter of this configuration has."""
        h, layer = self.config.hidden_size, layer_shapes(self.config)
        vectors = {"fc.weight": (h, len(self.layers) * h), "hidden_norm.weight": (h,), "norm.weight": (h,), "mask": (h,)}
        return vectors | {f"layers.{i}.{name}": s for i in range(self.config.num_hidden_layers) for name, s in layer.items()}
