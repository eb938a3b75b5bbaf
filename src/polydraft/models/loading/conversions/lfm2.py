"""LFM2 and LFM2 MoE (arXiv 2511.23404): gated short convolutions, and attention in some layers: those that have heads of keys."""

from typing import Any

from polydraft.models.loading.conversions.base import Conversion, Source, joined, layer_sizes
from polydraft.models.store.gguf_header import GgufHeader

NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
}
EXPERTS = {
    "feed_forward.experts.gate_up_proj": joined("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "feed_forward.experts.down_proj": Source(("ffn_down_exps.weight",)),
    "feed_forward.expert_bias": Source(("exp_probs_b.bias",)),
}


def lfm2(file: GgufHeader) -> dict[str, Any]:
    heads = layer_sizes(file, "attention.head_count_kv")
    return {
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(file: GgufHeader) -> dict[str, Any]:
    return lfm2(file) | {
        "num_dense_layers": file.setting("leading_dense_block_count", 0),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


LFM2 = Conversion("lfm2", lfm2, NAMES)
LFM2_MOE = Conversion("lfm2_moe", lfm2_moe, NAMES, EXPERTS)
