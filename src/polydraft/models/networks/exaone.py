"""EXAONE 4 and K-EXAONE.

EXAONE 4 (arXiv 2507.11407): norms of queries and keys, and behind attention and feed-forward alone; the larger has windows in three layers of
four, and no rotation in the fourth.
K-EXAONE (https://github.com/LG-AI-EXAONE/K-EXAONE): its attention with norms before it, and experts with sigmoid scores behind dense layers.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import CHOICE, SHARED, Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.olmo import GGUF_NAMES, NORMS
from polydraft.models.networks.settings import (
    by_kind_of_layer,
    grouped_experts,
    grouped_mixture,
    special_tokens,
    whole_every,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader

LOCAL = "sliding_attention"


def spec(config: Any) -> ModelSpec:
    rotates = [config.sliding_window is None or kind == LOCAL for kind in config.layer_types]
    return one_rotary(config, rotary_of_layer=tuple(0 if turned else -1 for turned in rotates))


def settings(file: GgufHeader) -> dict[str, Any]:
    window = file.number_or_none("attention.sliding_window")
    whole = ["full_attention"] * file.num_layers
    return {
        "sliding_window": window,
        "sliding_window_pattern": 4 if window else 0,
        "layer_types": by_kind_of_layer(file, otherwise=4) if window else whole,
    }


def pattern(folder: Mapping[str, Any]) -> list[str]:
    return whole_every(folder["sliding_window_pattern"], LOCAL)(folder)


EXAONE4 = Network(
    "exaone4",
    "exaone4",
    spec,
    norms=NORMS,
    attention=AttentionWeights(norms=HEAD_NORMS),
    names=GGUF_NAMES,
    settings=settings,
    defaults={
        **special_tokens(0, 2),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": pattern,
    },
)


def mixture(config: Any) -> Experts:
    layers = tuple(kind == "sparse" for kind in config.mlp_layer_types)
    shared = config.moe_intermediate_size * config.num_shared_experts
    return grouped_mixture(config, config.num_experts, layers, shared)


def kinds(dense: int, layers: int) -> list[str]:
    return ["dense"] * min(dense, layers) + ["sparse"] * max(0, layers - dense)


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    experts = grouped_experts(file)
    dense = file.setting("leading_dense_block_count", 0)
    return {
        **settings(file),
        **experts,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": file.count("expert_shared_count"),
        "first_k_dense_replace": dense,
        "mlp_layer_types": kinds(dense, file.num_layers),
    }


def kinds_of_folder(folder: Mapping[str, Any]) -> list[str]:
    return kinds(folder["first_k_dense_replace"], folder["num_hidden_layers"])


EXAONE_MOE = Network(
    "exaone_moe",
    "exaone-moe",
    spec,
    attention=AttentionWeights(norms=HEAD_NORMS),
    experts=MixtureWeights(
        mixture, names={f"{SHARED}.": "mlp.shared_experts.", CHOICE: "mlp.e_score_correction_bias"}
    ),
    settings=moe_settings,
    defaults={
        **special_tokens(1, 53, 0),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": pattern,
        "first_k_dense_replace": 1,
        "mlp_layer_types": kinds_of_folder,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
)
