"""GLM-4.5 and its successors (arXiv 2508.06471): mixtures of experts with sigmoid scores, a bias where experts are chosen, and an expert of all rows, behind
some dense layers; a half of each head rotates."""

from typing import Any

from polydraft.models.loading.conversions.mixtures import glm4_moe
from polydraft.models.mixers.experts.names import SHARED, Experts
from polydraft.models.networks.base import HEAD_NORMS, Network, partly_rotated


def mixture(config: Any) -> Experts:
    layers = config.num_hidden_layers
    dense = config.first_k_dense_replace
    return Experts(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        tuple(layer >= dense for layer in range(layers)),
        sigmoid=True,
        groups=config.n_group,
        best_groups=config.topk_group,
        shares=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        shared=config.moe_intermediate_size * config.n_shared_experts,
        choice_biased=True,
    )


GLM4_MOE = Network(
    "glm4_moe",
    "glm4moe",
    partly_rotated,
    head_norms=HEAD_NORMS,
    qkv_bias="attention_bias",
    partial_rotary=True,
    gguf_names={"post_attention_layernorm": "post_attention_norm"},
    gguf_settings=glm4_moe,
    mixture=mixture,
    module_names={f"{SHARED}.": "mlp.shared_experts."},
)
