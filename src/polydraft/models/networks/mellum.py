"""Mellum 2 (https://huggingface.co/JetBrains): Qwen3-MoE with windows in some layers, which have a rotary base of their own."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import (
    by_kind_of_layer,
    experts,
    renamed,
    rope_of_kinds,
    rotary,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader

LOCAL = "sliding_attention"
GLOBAL = "full_attention"


def spec(config: Any) -> ModelSpec:
    ropes = rope_parameters(config)
    kinds = [kind for kind in (GLOBAL, LOCAL) if kind in config.layer_types]
    return one_rotary(
        config,
        rotaries=tuple(whole_heads(ropes[kind]) for kind in kinds),
        rotary_of_layer=tuple(map(kinds.index, config.layer_types)),
    )


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        tuple(kind == "sparse" for kind in config.mlp_layer_types),
        shares=config.norm_topk_prob,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **experts(file),
        "num_local_experts": file.count("expert_count"),
        "norm_topk_prob": True,
        "sliding_window": file.number_or_none("attention.sliding_window"),
        "layer_types": by_kind_of_layer(file, otherwise=1),
        "mlp_layer_types": ["sparse"] * file.num_layers,
    }


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10_000.0)}
    return {GLOBAL: rotary(file, width), LOCAL: local}


def all_sparse(folder: Mapping[str, Any]) -> list[str]:
    return ["sparse"] * folder["num_hidden_layers"]


MELLUM = Network(
    "mellum",
    "mellum",
    spec,
    attention=AttentionWeights(norms=HEAD_NORMS),
    experts=MixtureWeights(mixture),
    settings=settings,
    rope=rope,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "sliding_window": 1024,
        "layer_types": lambda folder: [GLOBAL] * folder["num_hidden_layers"],
        "mlp_layer_types": all_sparse,
        "moe_intermediate_size": 896,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    mended=renamed("num_local_experts", "num_experts"),
    folder_rope=lambda folder: rope_of_kinds(folder, {GLOBAL: 500_000.0, LOCAL: 10_000.0}),
)
