"""LFM2 (arXiv 2511.23404): short convolutions, and in some layers attention with norms of queries and keys; SiLU gate."""

from typing import Any

from polydraft.models.loading.conversions.lfm2 import NAMES, lfm2
from polydraft.models.mixers.short_convolution import convolution_shape
from polydraft.models.networks.base import (
    ATTENTION,
    CONVOLUTION,
    MATRICES,
    ModelSpec,
    Network,
    one_rotary,
)


def spec(config: Any) -> ModelSpec:
    # all other kinds of transformers' configuration are convolutions
    mixers = tuple(ATTENTION if kind == "full_attention" else CONVOLUTION for kind in config.layer_types)
    states = {
        CONVOLUTION: convolution_shape(mixers.count(CONVOLUTION), config.hidden_size, config.conv_L_cache)
    }
    return one_rotary(config, epsilon=config.norm_eps, mixers=mixers, states=states)


def inner_width(config: Any) -> int:
    """As transformers' `Lfm2MLP` has it."""
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return width


def mixer_shapes(config: Any, kind: str) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    biases = (
        {"conv.conv.bias": (h,), "conv.in_proj.bias": (3 * h,), "conv.out_proj.bias": (h,)}
        if config.conv_bias
        else {}
    )
    weights = {
        "conv.conv.weight": (h, 1, config.conv_L_cache),
        "conv.in_proj.weight": (3 * h, h),
        "conv.out_proj.weight": (h, h),
    }
    return weights | biases


LFM2 = Network(
    "lfm2",
    "lfm2",
    spec,
    {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    gguf_names=NAMES,
    gguf_settings=lfm2,
    matrices=MATRICES
    | {
        "out": ("self_attn.out_proj",),
        "conv_in": ("conv.in_proj",),
        "conv_out": ("conv.out_proj",),
        "gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "down": ("feed_forward.w2",),
    },
    vectors={
        "conv_taps": "conv.conv.weight",
        "conv_taps_bias": "conv.conv.bias",
        "conv_in_bias": "conv.in_proj.bias",
        "conv_out_bias": "conv.out_proj.bias",
    },
    final_norm="model.embedding_norm",
    inner_width=inner_width,
    mixer_shapes=mixer_shapes,
)
