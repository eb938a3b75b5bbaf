"""Llama and its kin: models of its layers up to biases, windows, rotations and an activation.

Llama (arXiv 2302.13971): norms before attention and feed-forward, SiLU gate, rotation of whole heads. Files call Mistral so, too.
AFM of Arcee (https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model): feed-forwards have squared ReLU and no gate.
Code World Model (arXiv 2510.02387): windows in three layers of four.
Helium (https://kyutai.org/helium): rotations lie side by side.
Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): biases of queries, keys and values.
SmolLM3 (https://huggingface.co/blog/smollm3): every fourth layer does not rotate (arXiv 2501.18795).
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, linear_biases, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


LLAMA = Network(
    "llama",
    "llama",
    interleaved=True,
    settings=settings,
    defaults={**special_tokens(1, 2), "attention_bias": False, "mlp_bias": False},
)


def arcee_settings(file: GgufHeader) -> dict[str, Any]:
    return {"hidden_act": "relu2", **linear_biases(file)}


ARCEE = Network(
    "arcee",
    "arcee",
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated("mlp_bias"),
    interleaved=True,
    settings=arcee_settings,
    defaults={
        **special_tokens(128_000, 128_001),
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)


CWM_SCALING = {
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
"""Of folders that do not say it."""


def windows_behind_firsts(folder: Mapping[str, Any]) -> list[str]:
    layers = range(folder["num_hidden_layers"])
    return ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]


CWM = Network(
    "cwm",
    defaults={
        **special_tokens(128_000, 128_001),
        "eos_token_id": [128_001, 128_008, 128_009],
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": CWM_SCALING,
        "mlp_bias": False,
        "sliding_window": 8192,
        "layer_types": windows_behind_firsts,
    },
)


HELIUM = Network(
    "helium",
    attention=AttentionWeights(bias="attention_bias"),
    feed_forward=FeedForwardWeights(bias="mlp_bias"),
    pairs=True,
    defaults={
        **special_tokens(1, 2, 3),
        "head_dim": 128,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)


def seed_settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **linear_biases(file),
        "attention_out_bias": has(file, "attn_output.bias"),
    }


SEED_OSS = Network(
    "seed_oss",
    "seed_oss",
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_out_bias"),
    feed_forward=FeedForwardWeights(bias="mlp_bias"),
    names={"post_attention_layernorm": "post_attention_norm"},
    settings=seed_settings,
    defaults={
        **special_tokens(0, 2, 1),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
)


def smollm_spec(config: Any) -> ModelSpec:
    return one_rotary(
        config, rotary_of_layer=tuple(0 if rotates else -1 for rotates in config.no_rope_layers)
    )


def smollm_settings(file: GgufHeader) -> dict[str, Any]:
    # files do not say which layers rotate: every fourth does not, as in llama.cpp
    return {"no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(file.count("block_count"))]}


def layers_that_rotate(folder: Mapping[str, Any]) -> list[int]:
    interval = folder["no_rope_layer_interval"]
    return [int((layer + 1) % interval != 0) for layer in range(folder["num_hidden_layers"])]


def windows_of_others(folder: Mapping[str, Any]) -> list[str]:
    """Kinds of layers, where they are not said: those that do not rotate have windows, if any have."""
    slide = folder["use_sliding_window"] and folder["sliding_window"] is not None
    return [
        "sliding_attention" if slide and not rotates else "full_attention"
        for rotates in folder["no_rope_layers"]
    ]


SMOLLM3 = Network(
    "smollm3",
    "smollm3",
    smollm_spec,
    interleaved=True,
    settings=smollm_settings,
    defaults={
        **special_tokens(128_000, 128_001, 128_004),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "no_rope_layers": layers_that_rotate,
        "layer_types": windows_of_others,
    },
)
