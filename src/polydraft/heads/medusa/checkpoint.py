"""Medusa's heads on disk, see `heads`: the authors' tensor names, of what is trained here and of what others published.

    config.json          medusa_num_heads, medusa_num_layers (blocks of each head)
    model.safetensors    {k}.{l}.linear.weight and .bias: block l of head k; {k}.{blocks}.weight: output rows of head k

Where there are no output rows, all heads use `lm_head.weight`, or the target's own rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from polydraft.heads.checkpoint import HeadCheckpoint, stored

__all__ = ["MedusaCheckpoint"]


class MedusaCheckpoint(HeadCheckpoint):
    """Heads of Medusa."""

    kind = "medusa"

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """What is written here, or the authors' medusa_lm_head, whose configuration leaves out the target's widths."""
        files = stored(folder, "model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
        tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in files.items()}
        settings = {cls.LAYERS: [], "medusa_num_layers": 1, **settings}
        if "0.0.linear.weight" in tensors:
            settings = {"hidden_size": len(tensors["0.0.linear.weight"]), **settings}
        if (rows := tensors.get(f"0.{settings['medusa_num_layers']}.weight")) is not None:
            settings = {"vocab_size": len(rows), **settings}
        return settings, tensors

    @property
    def num_heads(self) -> int:
        """Depths that are drafted."""
        return int(self.config.medusa_num_heads)

    @property
    def num_blocks(self) -> int:
        """Residual blocks of each head."""
        return int(self.config.medusa_num_layers)

    @property
    def has_own_rows(self) -> bool:
        """Whether each head has output rows of its own."""
        return f"0.{self.num_blocks}.weight" in self.tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that heads of this configuration have."""
        h, L, shape_of = self.config.hidden_size, self.num_blocks, dict[str, tuple[int, ...]]()
        for k in range(self.num_heads):
            for l in range(L):
                shape_of |= {f"{k}.{l}.linear.weight": (h, h), f"{k}.{l}.linear.bias": (h,)}
            if self.has_own_rows:
                shape_of[f"{k}.{L}.weight"] = (len(self.ids), h)
        return shape_of
