"""One layer of the Llama family in torch, on any device: as heads are trained and as they draft, and a target's own.

    x = x + o_proj(attention(norm(x)));    x = x + down_proj(silu(gate_proj(y)) * up_proj(y)),  y = norm(x)

Modules are named as checkpoints name their weights. Rows lie in groups, [B, A, N, h]: a row attends to rows of its own group and to any number of
further keys, such as the KV cache. Norms, rotations and the softmax are float32, whatever the weights are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.networks import LLAMA_FAMILY
from polydraft.models.networks.spec import layer_windows
from polydraft.models.rotary import frequencies, head_width
from polydraft.models.torch.door import into


class KeyValues(NamedTuple):
    """keys, values: [B, A, M, G, D], or [B, M, G, D] of all groups alike.  visible: which of them a row sees, broadcast to [B, A, N, M]."""

    keys: Tensor
    values: Tensor
    visible: Bool[Tensor, "..."]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square normalisation, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


class RMSNorm(nn.Module):
    """Root mean square normalisation with a weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class FeedForward(nn.Module):
    """The gated feed-forward of a layer."""

    def __init__(self, h: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(h, inner, bias=False)
        self.up_proj = nn.Linear(h, inner, bias=False)
        self.down_proj = nn.Linear(inner, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up_proj.weight.dtype)
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    """Projections of a layer. inputs: width of what it reads.  factors: by what rotary frequencies are divided."""

    def __init__(
        self,
        config: Any,
        inputs: int,
        *,
        bias: bool = False,
        head_norms: bool = False,
        factors: np.ndarray | None = None,
    ) -> None:
        super().__init__()
        h = config.hidden_size
        self.width = head_width(config)
        epsilon = config.rms_norm_eps
        self.num_heads = config.num_attention_heads
        self.num_groups = config.num_key_value_heads
        rates, self.growth = frequencies(config)
        self.rates = into(rates if factors is None else rates / factors)
        self.q_proj = nn.Linear(inputs, self.num_heads * self.width, bias=bias)
        self.k_proj = nn.Linear(inputs, self.num_groups * self.width, bias=bias)
        self.v_proj = nn.Linear(inputs, self.num_groups * self.width, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.width, h, bias=False)
        if head_norms:
            self.q_norm = RMSNorm(self.width, epsilon)
            self.k_norm = RMSNorm(self.width, epsilon)

    def _heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        return projection(x.to(projection.weight.dtype)).float().unflatten(-1, (-1, self.width))

    def queries(self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]) -> Float[Tensor, "*N H D"]:
        """Rotated queries. positions: broadcast to those of x."""
        q = self._heads(self.q_proj, x)
        return self._rotated(self.q_norm(q) if hasattr(self, "q_norm") else q, positions)

    def keys_values(
        self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]
    ) -> tuple[Float[Tensor, "*N G D"], Float[Tensor, "*N G D"]]:
        """Rotated keys, and values."""
        k = self._heads(self.k_proj, x)
        return self._rotated(self.k_norm(k) if hasattr(self, "k_norm") else k, positions), self._heads(
            self.v_proj, x
        )

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None, None] * self.rates.to(x.device)
        a, b = x.chunk(2, -1)
        cos = angles.cos() * self.growth
        sin = angles.sin() * self.growth
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(queries: Float[Tensor, "B A N H D"], sources: Sequence[KeyValues]) -> Float[Tensor, "B A N HD"]:
    """Softmax attention over the keys of all sources side by side; query heads share those of their group."""
    groups = sources[0].keys.shape[-2]
    queries = (queries * queries.shape[-1] ** -0.5).unflatten(3, (groups, -1))
    weights = list[Tensor]()
    for keys, _, visible in sources:
        logits = torch.einsum(
            f"bangrd,b{'a' * (keys.ndim == 5)}mgd->bangrm", queries.to(keys.dtype), keys
        ).float()
        weights.append(logits.masked_fill(~visible[..., None, None, :], -torch.inf))
    shares = torch.cat(weights, -1).softmax(-1).split([w.shape[-1] for w in weights], -1)
    mixed = sum(
        torch.einsum(f"bangrm,b{'a' * (values.ndim == 5)}mgd->bangrd", share.to(values.dtype), values)
        for share, (_, values, _) in zip(shares, sources, strict=True)
    )
    assert isinstance(mixed, Tensor)
    return mixed.flatten(3)


class LlamaLayer(nn.Module):
    """A layer of these widths. inputs: width of what its attention reads, default the model's.  options: of `LlamaAttention`."""

    def __init__(self, config: Any, inputs: int | None = None, **options: Any) -> None:
        super().__init__()
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.input_layernorm = RMSNorm(h, epsilon)
        self.post_attention_layernorm = RMSNorm(h, epsilon)
        self.self_attn = LlamaAttention(config, inputs or h, **options)
        self.mlp = FeedForward(h, config.intermediate_size)

    def forward(
        self,
        x: Float[Tensor, "B A N h"],
        positions: Int[Tensor, "..."],
        sources: Sequence[KeyValues],
        visible: Bool[Tensor, "..."],
    ) -> tuple[Float[Tensor, "B A N h"], KeyValues]:
        """Rows through the layer, and their keys and values. visible: which of its group a row sees."""
        y = self.input_layernorm(x)
        new = KeyValues(*self.self_attn.keys_values(y, positions), visible)
        return self.leave(x, attend(self.self_attn.queries(y, positions), [*sources, new])), new

    def leave(self, x: Float[Tensor, "*N h"], mixed: Float[Tensor, "*N q"]) -> Float[Tensor, "*N h"]:
        """What the layer puts out of a state and what it attended to."""
        x = x + self.self_attn.o_proj(mixed.to(self.self_attn.o_proj.weight.dtype))
        return x + self.mlp(self.post_attention_layernorm(x))

    def silence(self) -> None:
        """Have it add nothing."""
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)


def why_not_llama(config: Any) -> str | None:
    """Why a model's layers are none of these, or None."""
    if config.model_type not in LLAMA_FAMILY:
        return f"its type {config.model_type!r} is not one of {', '.join(sorted(LLAMA_FAMILY))}"
    return "its layers have windows" if any(layer_windows(config)) else None


def target_layer(checkpoint: Checkpoint, number: int) -> LlamaLayer:
    """A layer of a model, as it is: its weights are buffers, which are not trained, and none of a `state_dict`."""
    prefix = f"model.layers.{number}."
    tensors = {
        name.removeprefix(prefix): into(checkpoint.read(name))
        for name in checkpoint.outlines
        if name.startswith(prefix)
    }
    options = {"bias": "self_attn.q_proj.bias" in tensors, "head_norms": "self_attn.q_norm.weight" in tensors}
    with torch.device("meta"):
        layer = LlamaLayer(checkpoint.config, **options)
    layer.load_state_dict(tensors, assign=True)
    rates, _ = frequencies(checkpoint.config)
    layer.self_attn.rates = into(
        rates if checkpoint.rope_factors is None else rates / checkpoint.rope_factors
    )
    for module in layer.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            delattr(module, name)
            module.register_buffer(name, parameter.detach(), persistent=False)
    return layer
