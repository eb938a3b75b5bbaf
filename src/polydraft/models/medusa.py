"""Medusa's heads on disk, see `heads`: the authors' tensor names, of what is trained here and of what others published.

    config.json          medusa_num_heads, medusa_num_layers (blocks of each head)
    model.safetensors    {k}.{l}.linear.weight and .bias: block l of head k; {k}.{blocks}.weight: output rows of head k

Where there are no output rows, all heads use `lm_head.weight`, or the target's own rows.
"""

from polydraft.models.heads import HeadCheckpoint

__all__ = ["MedusaCheckpoint"]


class MedusaCheckpoint(HeadCheckpoint):
    """Heads of Medusa."""

    kind = "medusa"

    @property
    def num_heads(self) -> int:
        """Depths that are drafted."""
        return int(self.config.medusa_num_heads)

    @property
    def num_blocks(self) -> int:
        """Residual blocks of each head."""
        return int(self.config.medusa_num_layers)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that heads of this configuration have."""
        h, L, found = self.config.hidden_size, self.num_blocks, dict[str, tuple[int, ...]]()
        for k in range(self.num_heads):
            for l in range(L):
                found |= {f"{k}.{l}.linear.weight": (h, h), f"{k}.{l}.linear.bias": (h,)}
            if f"0.{L}.weight" in self.tensors:
                found[f"{k}.{L}.weight"] = (len(self.ids), h)
        return found
