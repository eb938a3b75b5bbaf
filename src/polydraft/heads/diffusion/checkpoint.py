"""A block diffusion drafter on disk, see `heads`: a few layers of the Llama family that read blocks of masks, and what the target's states enter by.

config.json          a Llama configuration, `block_size` (masks of a block), `diffusion_layers` (of the target, whose states are injected)
model.safetensors    fc, hidden_norm: from states to what keys and values are made of; mask: its embedding; layers.*, norm
"""

from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.models.checkpoint import head_width

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
        c = self.config
        h, inner, width = c.hidden_size, c.intermediate_size, head_width(c)
        q, kv = c.num_attention_heads * width, c.num_key_value_heads * width
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        vectors = {"fc.weight": (h, len(self.layers) * h), "hidden_norm.weight": (h,), "norm.weight": (h,), "mask": (h,)}
        return vectors | {f"layers.{i}.{name}.weight": s for i in range(c.num_hidden_layers) for name, s in layer.items()}
