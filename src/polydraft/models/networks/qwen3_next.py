"""Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): Qwen3.5 whose feed-forwards are mixtures of experts, one of them of all rows.

Its folders have what a key head's value heads read together, [q, k, v, z] and [b, a] of each; its files the latter alone.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.models.mixers.delta_net import DELTA_NET_WEIGHTS, delta_shapes, delta_sizes
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import Shapes
from polydraft.models.networks.base import ModelSpec
from polydraft.models.networks.qwen2_moe import sparse_layers
from polydraft.models.networks.qwen3_5 import QWEN3_5, delta_settings, spec_with
from polydraft.models.networks.settings import EXPERT_DEFAULTS, shared_experts
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

QKV, Z, BA = (f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "ba"))


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        sparse_layers(config),
        shares=getattr(config, "norm_topk_prob", True),
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def inner_width(config: Any) -> int:
    """Of layers without experts; where all have them, it may not be said."""
    return getattr(config, "intermediate_size", None) or config.moe_intermediate_size


def next_spec(config: Any) -> ModelSpec:
    return spec_with(config, delta_sizes(config)._replace(together=True))


def next_shapes(config: Any) -> Shapes:
    shapes = delta_shapes(config)
    (heads, h), _ = (shapes.pop(f"linear_attn.in_proj_{part}.weight") for part in "ba")
    return shapes | {f"{BA}.weight": (2 * heads, h)}


def next_places(name: str, config: Any) -> Stored | None:
    """Rows of the matrix that has a key head's q, k, v and z together."""
    if name not in (f"{QKV}.weight", f"{Z}.weight"):
        return None
    heads = config.linear_num_key_heads
    width = config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim

    def rows(matrix: np.ndarray) -> np.ndarray:
        by_head = matrix.reshape(heads, -1, *matrix.shape[1:])
        parts = np.split(by_head, np.cumsum([width, width, values]), 1)
        chosen = parts[:3] if name == f"{QKV}.weight" else parts[3:]
        return np.concatenate([part.reshape(-1, *matrix.shape[1:]) for part in chosen])

    return Stored("linear_attn.in_proj_qkvz.weight", None, rows)


def settings(file: GgufHeader) -> dict[str, Any]:
    return delta_settings(file) | shared_experts(file) | {"norm_topk_prob": True}


QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    gguf="qwen3next",
    spec=next_spec,
    recurrent=replace(
        DELTA_NET_WEIGHTS,
        matrices={**DELTA_NET_WEIGHTS.matrices, "delta_in": (QKV, Z, BA)},
        shapes=next_shapes,
    ),
    feed_forward=FeedForwardWeights(width=inner_width),
    experts=MixtureWeights(mixture),
    place=next_places,
    settings=settings,
    rope=None,
    order={},
    defaults={
        **QWEN3_5.defaults,
        **EXPERT_DEFAULTS,
        "intermediate_size": 5632,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
