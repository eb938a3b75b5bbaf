"""Nemotron-4 and Minitron (arXiv 2402.16819, 2407.14679): `LayerNorm` whose weights folders have less 1, squared ReLU without a gate, rotation of a half of
each head."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import ModelSpec, Network, partly_rotated
from polydraft.models.networks.settings import LAYER_NORM, linear_biases, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return partly_rotated(config, epsilon=config.norm_eps, centred=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "norm_eps": file.number(LAYER_NORM),
        "hidden_act": "relu2",
        **linear_biases(file),
    }


NEMOTRON = Network(
    "nemotron",
    "nemotron",
    spec,
    norm_bias=True,
    norm_offset=1.0,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated("mlp_bias"),
    partial_rotary=True,
    settings=settings,
    defaults={
        **special_tokens(2, 3),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
