"""Qwen's gated delta nets: Qwen3.5 and Qwen3-Next.

Qwen3.5 (https://qwen.ai/blog?id=qwen3.5): gated delta nets, and in every fourth layer attention whose output has a gate; norms of 1 + w.
A fourth of each head rotates; the three positions of its rotary are one for text. Files of llama.cpp have value heads in another order than
folders, see `mixers.delta_net`, and what multiplies the decay as -exp(A_log).
Qwen3.5-MoE: feed-forwards are mixtures of experts, with one expert of all rows behind a gate of its own. Files do not say that weights of the
chosen are divided by their sum.
Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): Qwen3.5 whose feed-forwards are mixtures of experts, one of them of all rows. Its folders have what
a key head's value heads read together, [q, k, v, z] and [b, a] of each; its files the latter alone.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.delta_net import DELTA_NET_WEIGHTS, delta_shapes, delta_sizes
from polydraft.models.mixers.delta_net.code import DeltaSizes, delta_shape
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import ATTENTION, DELTA_NET, Shapes
from polydraft.models.networks.base import Network
from polydraft.models.networks.qwen import gated_mixture, sparse_layers
from polydraft.models.networks.settings import EXPERT_DEFAULTS, rotary, shared_experts, whole_every
from polydraft.models.networks.spec import ModelSpec, partly_rotated
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored


def spec(config: Any) -> ModelSpec:
    return spec_with(config, delta_sizes(config))


def spec_with(config: Any, sizes: DeltaSizes) -> ModelSpec:
    # all other kinds of transformers' configuration are gated delta nets
    mixers = tuple(ATTENTION if kind == "full_attention" else DELTA_NET for kind in config.layer_types)
    return partly_rotated(
        config, mixers=mixers, states={DELTA_NET: delta_shape(mixers.count(DELTA_NET), sizes)}
    )


def delta_settings(file: GgufHeader) -> dict[str, Any]:
    heads = file.count("ssm.time_step_rank")
    interval = file.count("full_attention_interval", 4)
    recurs = file.setting("attention.recurrent_layers") or [
        (layer + 1) % interval > 0 for layer in range(file.count("block_count"))
    ]
    return {
        "layer_types": [
            "linear_attention" if recurrent else "full_attention" for recurrent in recurs[: file.num_layers]
        ],
        "linear_num_key_heads": file.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_value_head_dim": file.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
    }


def settings(file: GgufHeader) -> dict[str, Any]:
    return delta_settings(file) | {"tiled_value_heads": True}


def three_positions(file: GgufHeader, width: int) -> dict[str, Any]:
    """Rotary parameters for positions in text and pictures, all equal in text."""
    sections = file.setting("rope.dimension_sections") or []
    parameters = rotary(file, width, partial=True)
    return {**parameters, "mrope_section": sections[:3], "mrope_interleaved": True}


def by_key(config: Any, rows: np.ndarray, width: int = 1) -> np.ndarray:
    """Rows of heads of values, `width` each, from turns to those of one key together.

    Example:
        >>> from types import SimpleNamespace
        >>> by_key(SimpleNamespace(linear_num_key_heads=2), np.arange(4)).tolist()
        [0, 2, 1, 3]
    """
    by_turn = rows.reshape(-1, config.linear_num_key_heads, width, *rows.shape[1:])
    return by_turn.swapaxes(0, 1).reshape(rows.shape)


def values_by_key(config: Any, rows: np.ndarray) -> np.ndarray:
    """The same of queries, keys and values below one another: the values alone."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([rows[:before], by_key(config, rows[before:], config.linear_value_head_dim)])


def gates_by_key(config: Any, rows: np.ndarray) -> np.ndarray:
    return by_key(config, rows, config.linear_value_head_dim)


def columns_by_key(config: Any, matrix: np.ndarray) -> np.ndarray:
    return gates_by_key(config, matrix.T).T


VALUE_HEADS = {
    "linear_attn.in_proj_qkv.weight": values_by_key,
    "linear_attn.in_proj_z.weight": gates_by_key,
    "linear_attn.in_proj_a.weight": by_key,
    "linear_attn.in_proj_b.weight": by_key,
    "linear_attn.conv1d.weight": values_by_key,
    "linear_attn.A_log": by_key,
    "linear_attn.dt_bias": by_key,
    "linear_attn.out_proj.weight": columns_by_key,
}
"""What has those of one key together (k0 k0 k1 k1) in transformers, and in turns in files (k0 k1 k0 k1)."""


DEFAULTS = {
    "attention_bias": False,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": lambda folder: whole_every(folder["full_attention_interval"], "linear_attention")(folder),
}

QWEN3_5 = Network(
    "qwen3_5_text",
    "qwen35",
    spec,
    norm_offset=1.0,
    attention=AttentionWeights(norms=HEAD_NORMS, output_gate=True),
    recurrent=DELTA_NET_WEIGHTS,
    partial_rotary=True,
    names={"post_attention_layernorm": "post_attention_norm"},
    settings=settings,
    rope=three_positions,
    order=VALUE_HEADS,
    defaults=DEFAULTS,
)


def mixture(config: Any) -> Experts:
    return gated_mixture(config, (True,) * config.num_hidden_layers, shares=True)


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    gguf="qwen35moe",
    feed_forward=FeedForwardWeights(width=lambda config: config.moe_intermediate_size),
    settings=lambda file: {**QWEN3_5.settings(file), **shared_experts(file)},
    experts=MixtureWeights(mixture),
    defaults={
        **QWEN3_5.defaults,
        "intermediate_size": 0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)


QKV, Z, BA = (f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "ba"))


def next_mixture(config: Any) -> Experts:
    return gated_mixture(config, sparse_layers(config), getattr(config, "norm_topk_prob", True))


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


def next_settings(file: GgufHeader) -> dict[str, Any]:
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
    experts=MixtureWeights(next_mixture),
    place=next_places,
    settings=next_settings,
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
