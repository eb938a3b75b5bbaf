"""K-EXAONE (https://github.com/LG-AI-EXAONE/K-EXAONE): EXAONE 4's attention with norms before it, and experts with sigmoid scores behind dense layers."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import CHOICE, SHARED, Experts, MixtureWeights
from polydraft.models.networks import exaone4
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import grouped_experts, grouped_mixture, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def mixture(config: Any) -> Experts:
    layers = tuple(kind == "sparse" for kind in config.mlp_layer_types)
    shared = config.moe_intermediate_size * config.num_shared_experts
    return grouped_mixture(config, config.num_experts, layers, shared)


def kinds(dense: int, layers: int) -> list[str]:
    return ["dense"] * min(dense, layers) + ["sparse"] * max(0, layers - dense)


def settings(file: GgufHeader) -> dict[str, Any]:
    experts = grouped_experts(file)
    dense = file.setting("leading_dense_block_count", 0)
    return {
        **exaone4.settings(file),
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
    exaone4.spec,
    attention=AttentionWeights(norms=HEAD_NORMS),
    experts=MixtureWeights(
        mixture, names={f"{SHARED}.": "mlp.shared_experts.", CHOICE: "mlp.e_score_correction_bias"}
    ),
    settings=settings,
    defaults={
        **special_tokens(1, 53, 0),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": exaone4.pattern,
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
