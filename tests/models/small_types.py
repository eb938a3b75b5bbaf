"""Tiny models of many types of transformers: common sizes, and what a type needs beside them. Every window is 8 tokens wide."""

from inspect import signature

from transformers import CONFIG_MAPPING

from tests.support.tiny import GROUPED, V

CONTEXT = 256
WINDOW = 8
MIXED = ["linear_attention", "full_attention"] * 2
CONVOLUTIONS = ["conv", "full_attention"] * 2
SIZES = GROUPED | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": CONTEXT,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size_mlp": 48,
    "query_pre_attn_scalar": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": V,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "num_heads": 4,
    "mamba_expand": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
ELSE = {
    "bamba": {"attn_layer_indices": [1, 3]},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": [48] * 5,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": CONVOLUTIONS},
    "lfm2_moe": {"layer_types": CONVOLUTIONS},
    "llama4_text": {"attn_temperature_tuning": False},
    "mamba2": {"head_dim": 16},
    "minimax": {"layer_types": MIXED, "sliding_window": None},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    **{kind: {"layer_types": MIXED} for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
}


def small_config(kind):
    """The configuration of a tiny model of a type."""
    config_class = CONFIG_MAPPING[kind]
    names = {
        *config_class().to_dict(),
        *signature(config_class.__init__).parameters,
        *config_class.attribute_map,
    }
    return config_class(
        **{name: value for name, value in SIZES.items() if name in names} | ELSE.get(kind, {})
    )
