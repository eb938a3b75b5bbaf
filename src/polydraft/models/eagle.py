"""An EAGLE-3 head on disk, see `heads`: the authors' tensor names, of what is trained here and of what others published.

config.json          a Llama configuration of one layer, with `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`
model.safetensors    fc, midlayer.*, norm; lm_head of the draft vocabulary where it has its own
"""

from typing import Any

from polydraft.models.checkpoint import head_width
from polydraft.models.heads import HeadCheckpoint

__all__ = ["EagleCheckpoint", "rope_theta"]


class EagleCheckpoint(HeadCheckpoint):
    """An EAGLE-3 head."""

    kind = "eagle"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a head of this configuration has."""
        c = self.config
        h, inner, width = c.hidden_size, c.intermediate_size, head_width(c)
        q, kv = c.num_attention_heads * width, c.num_key_value_heads * width
        layer = {
            "input_layernorm": (h,),
            "hidden_norm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, 2 * h),
            "self_attn.k_proj": (kv, 2 * h),
            "self_attn.v_proj": (kv, 2 * h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        own_head = {"lm_head.weight": (len(self.ids), h)} if "lm_head.weight" in self.tensors else {}
        named = {"fc.weight": (h, len(self.layers) * h), "norm.weight": (h,)}
        return named | own_head | {f"midlayer.{name}.weight": shape for name, shape in layer.items()}


def rope_theta(config: Any) -> float:
    """Base of the rotary frequencies."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta)
