"""OLMo (arXiv 2402.00838): Llama with `LayerNorm` that has neither weights nor biases."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(config, epsilon=1e-5, centred=True)


def clipped(config: Any) -> str | None:
    """Why a model is not computed whose queries, keys and values are limited, or None."""
    return f"its queries, keys and values are limited to {config.clip_qkv}" if config.clip_qkv else None


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "clip_qkv": file.number_or_none("attention.clamp_kqv"),
        "attention_bias": has(file, "attn_q.bias"),
    }


OLMO = Network(
    "olmo",
    "olmo",
    spec,
    plain_norms=True,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    interleaved=True,
    settings=settings,
    refusal=clipped,
    defaults={
        **special_tokens(None, 50_279, 1),
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
    },
)
