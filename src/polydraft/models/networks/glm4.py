"""GLM-4 (arXiv 2406.12793, and https://github.com/zai-org/GLM-4 of April 2025): rotation of a half of each head, gate and up in one matrix; the later
one has norms behind attention and feed-forward, too. Files call the first `chatglm`.

GLM-4.5 and its successors (arXiv 2508.06471): mixtures of experts with sigmoid scores, a bias where experts are chosen, and an expert of all rows, behind
some dense layers; a half of each head rotates.
"""

from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import SHARED, Experts, MixtureWeights
from polydraft.models.networks.base import GATE_UP, NORMS, Network
from polydraft.models.networks.settings import grouped_experts, grouped_mixture, has, renamed, special_tokens
from polydraft.models.networks.spec import partly_rotated
from polydraft.models.store.gguf_header import GgufHeader

NORMS4 = {
    **NORMS,
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias")}


DEFAULTS = {
    **special_tokens(None, 151_329, 151_329),
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

GLM = Network(
    "glm",
    "chatglm",
    partly_rotated,
    attention=AttentionWeights(bias="attention_bias"),
    pairs=True,
    fused=(GATE_UP,),
    partial_rotary=True,
    settings=settings,
    defaults=DEFAULTS,
)
GLM4 = Network(
    "glm4",
    "glm4",
    partly_rotated,
    norms=NORMS4,
    attention=AttentionWeights(bias="attention_bias"),
    pairs=True,
    fused=(GATE_UP,),
    partial_rotary=True,
    names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    settings=settings,
    defaults=DEFAULTS,
)


def mixture(config: Any) -> Experts:
    layers = tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))
    shared = config.moe_intermediate_size * config.n_shared_experts
    return grouped_mixture(config, config.n_routed_experts, layers, shared)


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return grouped_experts(file) | {
        "attention_bias": has(file, "attn_q.bias"),
        "use_qk_norm": has(file, "attn_q_norm.weight"),
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "n_shared_experts": file.count("expert_shared_count"),
    }


GLM4_MOE = Network(
    "glm4_moe",
    "glm4moe",
    partly_rotated,
    attention=AttentionWeights(norms=HEAD_NORMS, bias="attention_bias"),
    partial_rotary=True,
    names={"post_attention_layernorm": "post_attention_norm"},
    settings=moe_settings,
    defaults={
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    mended=renamed("n_routed_experts", "num_local_experts"),
    experts=MixtureWeights(mixture, names={f"{SHARED}.": "mlp.shared_experts."}),
)
