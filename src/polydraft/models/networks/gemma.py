"""Gemma, Gemma 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786): a tanh GELU gate; from the second on norms before and behind
attention and feed-forward, and windows in most layers.

Norm weights of folders are stored less 1. Gemma 2 has soft caps and a window in every second layer; Gemma 3 norms of queries and keys, a window in
five layers of six, and another rotary base there. Embeddings are multiplied by the root of the width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import rope_of_kinds, rotary, special_tokens, whole_every
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.windows import setting

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TANH_GELU = "gelu_pytorch_tanh"
LOCAL = "sliding_attention"
GLOBAL = "full_attention"


def gemma_spec(config: Any) -> ModelSpec:
    activation = setting(config, "hidden_act", TANH_GELU)
    return one_rotary(config, activation=activation, embedding_scale=config.hidden_size**0.5)


def gemma2_spec(config: Any) -> ModelSpec:
    return one_rotary(
        config,
        activation=config.hidden_activation,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        attention_cap=config.attn_logit_softcapping or 0.0,
        logit_cap=config.final_logit_softcapping or 0.0,
    )


def gemma3_spec(config: Any) -> ModelSpec:
    ropes = rope_parameters(config)
    kinds = (GLOBAL, LOCAL)
    rotaries = tuple(whole_heads(ropes[kind]) for kind in kinds)
    rotary_of_layer = tuple(map(kinds.index, config.layer_types))
    return replace(gemma2_spec(config), rotaries=rotaries, rotary_of_layer=rotary_of_layer)


def two_directions(config: Any) -> str | None:
    return "its attention is not causal" if setting(config, "use_bidirectional_attention") else None


def gemma2_settings(file: GgufHeader) -> dict[str, Any]:
    layers = file.count("block_count")
    heads = file.count("attention.head_count")
    width = file.count("embedding_length") // heads
    # the 27B models scale queries by the width of the model over its heads, all others by the width of a head; files do not say it.
    largest = layers == {"gemma2": 46, "gemma3": 62}[file.architecture]
    return {
        "hidden_activation": TANH_GELU,
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": [GLOBAL if layer % 2 else LOCAL for layer in range(layers)],
        "query_pre_attn_scalar": width if largest else file.count("attention.key_length", width),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
    }


def gemma3_settings(file: GgufHeader) -> dict[str, Any]:
    return gemma2_settings(file) | {
        "layer_types": [LOCAL if (layer + 1) % 6 else GLOBAL for layer in range(file.count("block_count"))],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def gemma3_rope(file: GgufHeader, width: int) -> dict[str, Any]:
    # files older than October 2025 do not have the base of windows
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10_000.0)}
    return {GLOBAL: rotary(file, width), LOCAL: local}


def gemma3_folder_rope(folder: Mapping[str, Any]) -> dict[str, Any]:
    bases = {GLOBAL: folder.get("rope_theta"), LOCAL: folder.get("rope_local_base_freq")}
    return rope_of_kinds(folder, bases)


def tanh_gelu(folder: Mapping[str, Any]) -> dict[str, Any]:
    """The first folders say "gelu", which is to be its tanh form."""
    return {"hidden_act": TANH_GELU} if folder.get("hidden_act") == "gelu" else {}


DEFAULTS = {
    **special_tokens(2, 1, 0),
    "tie_word_embeddings": True,
    "head_dim": 256,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}
"""Of all three, as the classes of transformers have them."""
DEFAULTS2 = {**DEFAULTS, "hidden_activation": TANH_GELU, "query_pre_attn_scalar": 256, "sliding_window": 4096}

GEMMA = Network(
    "gemma",
    "gemma",
    gemma_spec,
    norm_offset=1.0,
    defaults={**DEFAULTS, "hidden_act": TANH_GELU},
    mended=tanh_gelu,
)
GEMMA2 = Network(
    "gemma2",
    "gemma2",
    gemma2_spec,
    norms=NORMS,
    norm_offset=1.0,
    names=GGUF_NAMES,
    settings=gemma2_settings,
    defaults={
        **DEFAULTS2,
        "layer_types": whole_every(2, LOCAL),
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = Network(
    "gemma3_text",
    "gemma3",
    gemma3_spec,
    norms=NORMS,
    norm_offset=1.0,
    attention=AttentionWeights(norms=HEAD_NORMS),
    names=GGUF_NAMES,
    settings=gemma3_settings,
    rope=gemma3_rope,
    refusal=two_directions,
    defaults={
        **DEFAULTS2,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "layer_types": lambda folder: whole_every(folder["sliding_window_pattern"], LOCAL)(folder),
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    folder_rope=gemma3_folder_rope,
)
