"""GLM-4.5 and its successors (arXiv 2508.06471): mixtures of experts with sigmoid scores, a bias where experts are chosen, and an expert of all rows, behind
some dense layers; a half of each head rotates."""

from typing import Any

from polydraft.models.compiled.architectures.base import HEAD_NORMS, Architecture
from polydraft.models.compiled.architectures.mixture import SHARED, Mixture
from polydraft.models.loading.gguf_header import GgufHeader


def mixture(config: Any) -> Mixture:
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    return Mixture(
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


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "n_routed_experts": file.count("expert_count"),
        "n_shared_experts": file.count("expert_shared_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


GLM4_MOE = Architecture(
    "glm4_moe",
    "glm4moe",
    head_norms=HEAD_NORMS,
    qkv_bias="attention_bias",
    partial_rotary=True,
    gguf_names={"post_attention_layernorm": "post_attention_norm"},
    gguf_settings=settings,
    mixture=mixture,
    module_names={f"{SHARED}.": "mlp.shared_experts."},
)
