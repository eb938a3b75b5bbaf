"""OLMo, its successors and its mixtures.

OLMo (arXiv 2402.00838): Llama with `LayerNorm` that has neither weights nor biases.
OLMo 2 and 3 (arXiv 2501.00656, 2512.13961): Llama with norms behind attention and feed-forward alone, and norms of all queries and of all keys
together; the third has windows in three layers of four, whose positions are never scaled. Files call both `olmo2`.
OLMoE (arXiv 2409.02060): mixtures of experts with norms of all queries and of all keys together.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import (
    by_kind_of_layer,
    has,
    renamed,
    rope_of_kinds,
    rotary,
    special_tokens,
    whole_every,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(config, epsilon=1e-5, centred=True)


def clipped(config: Any) -> str | None:
    """Why a model is not computed whose queries, keys and values are limited, or None."""
    return f"its queries, keys and values are limited to {config.clip_qkv}" if config.clip_qkv else None


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "clip_qkv": file.number_or_none("attention.clamp_kqv"),
        "attention_bias": has(file, "attn_q.bias"),
    }


OLMO = Network(
    "olmo",
    "olmo",
    spec,
    plain_norms=True,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    interleaved=True,
    settings=settings,
    refusal=clipped,
    defaults={
        **special_tokens(None, 50_279, 1),
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
    },
)


WINDOW = "attention.sliding_window"
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
BASE = 500_000.0
NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def spec3(config: Any) -> ModelSpec:
    ropes = rope_parameters(config)
    kinds = (GLOBAL, LOCAL)
    return one_rotary(
        config,
        rotaries=tuple(whole_heads(ropes[kind]) for kind in kinds),
        rotary_of_layer=tuple(map(kinds.index, config.layer_types)),
    )


def settings3(file: GgufHeader) -> dict[str, Any]:
    return {"sliding_window": file.count(WINDOW), "layer_types": by_kind_of_layer(file, otherwise=4)}


def rope3(file: GgufHeader, width: int) -> dict[str, Any]:
    whole = rotary(file, width)
    return {GLOBAL: whole, LOCAL: {"rope_type": "default", "rope_theta": whole["rope_theta"]}}


def folder_rope3(folder: Mapping[str, Any]) -> dict[str, Any]:
    # transformers gives a base that older folders say to layers without a window alone
    return rope_of_kinds(folder, {GLOBAL: folder["rope_theta"], LOCAL: BASE})


ATTENTION = AttentionWeights(norms=HEAD_NORMS, norm_form=HeadNorms(whole=True))
DEFAULTS = {**special_tokens(None, 50_279, 1), "rms_norm_eps": 1e-5, "attention_bias": False}

OLMO2 = Network(
    "olmo2",
    "olmo2",
    norms=NORMS,
    attention=ATTENTION,
    names=GGUF_NAMES,
    reads_file=lambda file: file.setting(WINDOW) is None,
    defaults=DEFAULTS,
)
OLMO3 = Network(
    "olmo3",
    "olmo2",
    spec3,
    norms=NORMS,
    attention=ATTENTION,
    names=GGUF_NAMES,
    settings=settings3,
    rope=rope3,
    reads_file=lambda file: file.setting(WINDOW) is not None,
    defaults={
        **DEFAULTS,
        "sliding_window": 4096,
        "layer_types": whole_every(4, LOCAL),
        "rope_theta": BASE,
    },
    folder_rope=folder_rope3,
)


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
        shares=config.norm_topk_prob,
    )


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": has(file, "attn_q.bias"),
    }


OLMOE = Network(
    "olmoe",
    "olmoe",
    attention=AttentionWeights(
        norms=HEAD_NORMS, norm_form=HeadNorms(whole=True), bias="attention_bias", out_bias="attention_bias"
    ),
    experts=MixtureWeights(mixture),
    settings=moe_settings,
    refusal=clipped,
    defaults={
        **special_tokens(None, 50_279, 1),
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    mended=renamed("num_experts", "num_local_experts"),
)
