"""Mixtures of experts on Llama's layers: Mixtral (arXiv 2401.04088), Qwen2 and Qwen3 MoE (arXiv 2505.09388), GLM-4.5 (arXiv 2508.06471).

No key says whether the weights of the chosen experts are made to sum to 1: in Qwen2 MoE they are not.
"""

from typing import Any

from polydraft.models.loading.conversions.base import Conversion, has, partly_rotary, routed_experts
from polydraft.models.loading.gguf_header import GgufHeader


def mixtral(file: GgufHeader) -> dict[str, Any]:
    experts = file.count("expert_count")
    chosen = file.count("expert_used_count")
    return {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}


def experts(file: GgufHeader) -> dict[str, Any]:
    """Of a width that a file lacks, what llama.cpp takes."""
    chosen = file.count("expert_used_count")
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": file.count(
            "expert_feed_forward_length", file.count("feed_forward_length") // chosen
        ),
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def shared_experts(file: GgufHeader) -> dict[str, Any]:
    """Experts, and one that every token goes through."""
    width = file.count("expert_shared_feed_forward_length", file.count("feed_forward_length"))
    return experts(file) | {"shared_expert_intermediate_size": width}


def qwen2_moe(file: GgufHeader) -> dict[str, Any]:
    return shared_experts(file) | {"norm_topk_prob": False, "qkv_bias": True}


def qwen3_moe(file: GgufHeader) -> dict[str, Any]:
    return experts(file) | {"norm_topk_prob": True}


def glm4_moe(file: GgufHeader) -> dict[str, Any]:
    return routed_experts(file) | {
        "attention_bias": has(file, "attn_q.bias"),
        "use_qk_norm": has(file, "attn_q_norm.weight"),
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "n_shared_experts": file.count("expert_shared_count"),
    }


MIXTRAL = Conversion("mixtral", mixtral, interleaved=True)
QWEN2_MOE = Conversion("qwen2_moe", qwen2_moe)
QWEN3_MOE = Conversion("qwen3_moe", qwen3_moe)
GLM4_MOE = Conversion(
    "glm4_moe", glm4_moe, {"post_attention_layernorm": "post_attention_norm"}, rotary=partly_rotary
)
