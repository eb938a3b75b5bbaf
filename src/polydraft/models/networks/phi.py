"""Phi.

Phi-1.5 and Phi-2 (arXiv 2309.05463): `LayerNorm`, read by attention and feed-forward alike, whose sum is added; biases everywhere, at the head, too;
rotation of a part of each head.
Phi-3 and Phi-4 (arXiv 2404.14219): Llama with q, k, v and gate, up in one matrix each, a window in every layer, rotation of a part of each head.
Phi-3.5-MoE and Phi-mini-MoE (arXiv 2404.14219): `LayerNorm`, biases, and experts that SparseMixer chooses (arXiv 2409.12136).
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import ROUTER, Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import GATE_UP, QKV, Network
from polydraft.models.networks.settings import (
    LAYER_NORM,
    everywhere,
    has,
    local_experts,
    rope_of_folder,
    rotary,
    special_tokens,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary, partly_rotated
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import LONG_FACTORS, ORIGINAL_LENGTH, SHORT_FACTORS


def spec(config: Any) -> ModelSpec:
    return partly_rotated(config, epsilon=config.layer_norm_eps, centred=True, parallel=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"layer_norm_eps": file.number(LAYER_NORM), "hidden_act": "gelu_new", "qk_layernorm": False}


PHI = Network(
    "phi",
    "phi2",
    spec,
    shares_norm=lambda config: True,
    norm_bias=True,
    head_bias=True,
    attention=AttentionWeights(bias=True, out_bias=True),
    feed_forward=FeedForwardWeights.ungated(True),
    renamed={
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "model.norm": "model.final_layernorm",
    },
    partial_rotary=True,
    settings=settings,
    refusal=lambda config: "it has norms of queries and keys" if config.qk_layernorm else None,
    defaults={
        **special_tokens(1, 2),
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
)


def settings3(file: GgufHeader) -> dict[str, Any]:
    length = file.count(ORIGINAL_LENGTH, file.count("context_length"))
    return {
        "sliding_window": file.number_or_none("attention.sliding_window"),
        "original_max_position_embeddings": length,
    }


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width, partial=True)
    if parameters["rope_type"] != "longrope":
        return parameters
    factors = {"long_factor": file.floats(LONG_FACTORS), "short_factor": file.floats(SHORT_FACTORS)}
    return parameters | factors


def folder_rope(folder: Mapping[str, Any]) -> dict[str, Any]:
    parameters = rope_of_folder(folder)
    kind = parameters["rope_type"]
    return parameters | ({"rope_type": "longrope"} if kind in ("su", "yarn") else {})


PHI3 = Network(
    "phi3",
    "phi3",
    partly_rotated,
    fused=(QKV, GATE_UP),
    partial_rotary=True,
    settings=settings3,
    rope=rope,
    defaults={
        **special_tokens(1, 32000, 32000),
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    folder_rope=folder_rope,
)


NOISE = 0.01
"""Of its training, where files and folders do not say it."""


def moe_spec(config: Any) -> ModelSpec:
    return one_rotary(config, centred=True)


def mixture(config: Any) -> Experts:
    return everywhere(config, noise=config.router_jitter_noise)


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **local_experts(file),
        "attention_bias": has(file, "attn_q.bias"),
        "lm_head_bias": "output.bias" in file.tensors,
        "router_jitter_noise": NOISE,
        "sliding_window": file.number_or_none("attention.sliding_window"),
    }


PHIMOE = Network(
    "phimoe",
    "phimoe",
    moe_spec,
    norm_bias=True,
    head_bias="lm_head_bias",
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    experts=MixtureWeights(
        mixture,
        names={f"{ROUTER}.": "mlp.router.", ROUTER: "block_sparse_moe.gate"},
        module="block_sparse_moe",
    ),
    settings=moe_settings,
    rope=rope,
    refusal=lambda config: (
        "its positions are scaled by longrope" if "long_factor" in (config.rope_parameters or {}) else None
    ),
    defaults={
        **special_tokens(1, 2),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "attention_bias": False,
        "lm_head_bias": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": NOISE,
    },
)
