"""A layer of Gemma 4 as block heads for it have: norms behind attention and feed-forward, keys as values, a rotation of part of a head.

The rest is the Llama family's: see `models.torch.llama_layer`. Attention is not scaled, values are normed without a weight, and what a layer puts out
is multiplied by `layer_scalar`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from polydraft.models.torch.llama_layer import FeedForward, LlamaAttention, LlamaLayer, RMSNorm, rms_norm


class GemmaAttention(LlamaAttention):
    """Projections of a full layer of Gemma 4."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size, head_norms=True)
        self.epsilon = config.rms_norm_eps
        half = self.width // 2
        turning = int(config.rope_part * half)
        self.rates = torch.cat([self.rates[:turning], self.rates.new_zeros(half - turning)])
        if config.attention_k_eq_v:
            del self.v_proj

    def queries(self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]) -> Float[Tensor, "*N H D"]:
        """Rotated queries, times what attention divides by."""
        return super().queries(x, positions) * self.width**0.5

    def keys_values(self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and normed values."""
        keys = self._heads(self.k_proj, x)
        values = self._heads(self.v_proj, x) if hasattr(self, "v_proj") else keys
        ones = torch.ones(self.width, device=values.device)
        return self._rotated(self.k_norm(keys), positions), rms_norm(values, ones, self.epsilon)


class GemmaFeedForward(FeedForward):
    """Gated by GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up_proj.weight.dtype)
        return self.down_proj(gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaLayer(LlamaLayer):
    """A full layer of Gemma 4."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.self_attn = GemmaAttention(config)
        self.mlp = GemmaFeedForward(h, config.intermediate_size)
        self.pre_feedforward_layernorm = RMSNorm(h, epsilon)
        self.post_feedforward_layernorm = RMSNorm(h, epsilon)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def leave(self, x: Float[Tensor, "*N h"], mixed: Float[Tensor, "*N q"]) -> Float[Tensor, "*N h"]:
        """See `LlamaLayer.leave`."""
        x = x + self.post_attention_layernorm(
            self.self_attn.o_proj(mixed.to(self.self_attn.o_proj.weight.dtype))
        )
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar
