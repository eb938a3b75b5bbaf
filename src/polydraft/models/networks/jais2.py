"""Jais 2 (https://huggingface.co/inceptionai): `LayerNorm`, biases everywhere, squared ReLU without a gate."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM, linear_biases, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(config, epsilon=config.layer_norm_eps, centred=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": file.number(LAYER_NORM),
        "hidden_act": "relu2",
        **linear_biases(file),
    }


JAIS2 = Network(
    "jais2",
    "jais2",
    spec,
    norm_bias=True,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated("mlp_bias"),
    settings=settings,
    defaults={
        **special_tokens(0, 150_024),
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
)
