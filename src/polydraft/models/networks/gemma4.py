"""Gemma 4 (https://ai.google.dev/gemma): wider heads in layers without a window, keys and values shared by the last layers, embeddings for each layer;
the mixture has a dense feed-forward beside its experts.

Files say by divisors of frequencies which pairs of a head rotate: the others are divided by 1e30.
"""

from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import layer_sizes
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    layers = file.num_layers
    narrow = file.count("attention.key_length_swa")
    is_local = layer_sizes(file, "attention.sliding_window_pattern")
    kv_heads = layer_sizes(file, "attention.head_count_kv")
    widths = layer_sizes(file, "feed_forward_length")
    of_global = [layer for layer in range(layers) if not is_local[layer]]
    wide = {
        str(layer): {"head_dim": file.count("attention.key_length"), "num_key_value_heads": kv_heads[layer]}
        for layer in of_global
    }
    per_layer = file.tensors.get("per_layer_token_embd.weight")
    experts = file.setting("expert_count") or 0
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "head_dim": narrow,
        "num_key_value_heads": next(
            (heads for heads, local in zip(kv_heads, is_local, strict=True) if local), kv_heads[0]
        ),
        "per_layer_config": wide,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) == 2 * min(widths),
        "num_kv_shared_layers": file.setting("attention.shared_kv_layers", 0),
        "attention_k_eq_v": any(
            _has(file, layer, "attn_k") and not _has(file, layer, "attn_v") for layer in of_global
        ),
        "hidden_size_per_layer_input": file.setting("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0]
        if per_layer is None
        else per_layer.shape[0],
        "final_logit_softcapping": file.number_or_none("final_logit_softcapping"),
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": file.setting("expert_used_count"),
        "moe_intermediate_size": file.setting("expert_feed_forward_length"),
    }


def _has(file: GgufHeader, layer: int, tensor: str) -> bool:
    return f"blk.{layer}.{tensor}.weight" in file.tensors


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    factors = file.floats("rope_freqs.weight")
    # pairs whose frequencies are divided by 1e20 or more do not rotate
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": file.number("rope.freq_base"),
            "partial_rotary_factor": sum(factor < 1e20 for factor in factors) / len(factors),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": file.number("rope.freq_base_swa", 10_000.0),
        },
    }


GEMMA4 = Network(
    "gemma4_text",
    "gemma4",
    lacks="inputs of each layer beside those of the layer before, layers that share keys and values, heads of two widths, norms of values, "
    "and mixtures beside a dense feed-forward; its drafter `gemma4_assistant` reads the shared keys and values, and is not run either",
    names={
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale.weight",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    },
    settings=settings,
    rope=rope,
    reads_rope_factors=True,
)
