"""An EAGLE-3 head on disk, see `heads`: the authors' tensor names, of what is trained here and of what others published.

config.json          a Llama configuration of one layer, with `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`
model.safetensors    fc, midlayer.*, norm; lm_head of the draft vocabulary where it has its own
"""

from typing import Any, ClassVar

from polydraft.models.checkpoint import head_width
from polydraft.models.heads import HeadCheckpoint

__all__ = ["EagleCheckpoint", "MtpCheckpoint", "rope_theta"]


class EagleCheckpoint(HeadCheckpoint):
    """An EAGLE-3 head."""

    kind = "eagle"
    projects: ClassVar[bool] = False
    """Whether its layer reads a projection of the pair of an embedding and a state, else its attention reads the pair."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a head of this configuration has."""
        c = self.config
        h, inner, width = c.hidden_size, c.intermediate_size, head_width(c)
        q, kv = c.num_attention_heads * width, c.num_key_value_heads * width
        read = h if self.projects else 2 * h
        layer = {
            "input_layernorm": (h,),
            "hidden_norm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, read),
            "self_attn.k_proj": (kv, read),
            "self_attn.v_proj": (kv, read),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        own_head = {"lm_head.weight": (len(self.ids), h)} if "lm_head.weight" in self.tensors else {}
        first = {"project.weight": (h, 2 * h)} if self.projects else {"fc.weight": (h, len(self.layers) * h)}
        named = {**first, "norm.weight": (h,)}
        layer |= {"attention_norm": (h,)} if self.projects else {}
        return named | own_head | {f"midlayer.{name}.weight": shape for name, shape in layer.items()}


class MtpCheckpoint(EagleCheckpoint):
    """A module for multi-token prediction: as an EAGLE-3 head, but for what its layer reads."""

    kind = "mtp"
    projects = True


def rope_theta(config: Any) -> float:
    """Base of the rotary frequencies."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta)
