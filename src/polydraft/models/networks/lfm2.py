"""LFM2 (arXiv 2511.23404): short convolutions, and in some layers attention with norms of queries and keys; SiLU gate."""

from typing import Any

from polydraft.models.loading.gguf_header import GgufHeader
from polydraft.models.mixers.short_convolution import convolution_shape
from polydraft.models.networks.base import (
    ATTENTION,
    CONVOLUTION,
    MATRICES,
    ModelSpec,
    Network,
    one_rotary,
)
from polydraft.models.networks.settings import layer_sizes


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


def settings(file: GgufHeader) -> dict[str, Any]:
    heads = layer_sizes(file, "attention.head_count_kv")
    return {
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = Network(
    "lfm2",
    "lfm2",
    spec,
    norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    names={
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
    },
    settings=settings,
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
