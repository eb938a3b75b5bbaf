"""EAGLE-3's training: the head's loss, unrolled over its own outputs.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840), with the steps of `network.EagleHead`:

    loss   = sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v), over the draft vocabulary, p the target's distribution

Trap: a head trained with k = 1 alone has never read its own output, and its second draft is poor.
"""

from typing import Any, ClassVar

from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.eagle.network import EagleHead
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, fresh_config, unrolled
from polydraft.models.rotary import head_width, rope_parameters

__all__ = ["EagleRecipe"]


class EagleRecipe(Recipe):
    """See the module."""

    checkpoint, network = EagleCheckpoint, EagleHead
    decay: ClassVar[float] = 0.8
    """Of the weights of the steps in the loss."""
    settings = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    published: ClassVar[dict[str, Any]] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    """What other engines ask for in a configuration."""

    def layers(self, last: int) -> tuple[int, ...]:
        """A low, a middle and the last."""
        return max(1, last // 4), last // 2 + 1, last

    def fresh(self, material: Material) -> EagleHead:
        """A head of its target's widths."""
        return self.network(fresh_config(material.hidden_size), material)

    def loss(self, network: EagleHead, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of as many steps over the head's own output."""
        return unrolled(network.depths(batch, steps), decay=self.decay, tv_weight=tv_weight)

    def more(self, network: Any) -> dict[str, Any]:
        """The rotation, and what other engines ask for."""
        config, rope = network.config, rope_parameters(network.config)
        rotation = {"rope_parameters": dict(rope)} if rope else {"rope_theta": config.rope_theta}
        norm_first = bool(getattr(config, "norm_before_residual", False))
        return {**self.published, **rotation, "head_dim": head_width(config), "norm_before_residual": norm_first} | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
        }
