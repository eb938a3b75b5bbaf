"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama with biases of queries, keys and values."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, linear_biases, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
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
    settings=settings,
    defaults={
        **special_tokens(0, 2, 1),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
)
