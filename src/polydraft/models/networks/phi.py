"""Phi-1.5 and Phi-2 (arXiv 2309.05463): `LayerNorm`, read by attention and feed-forward alike, whose sum is added; biases everywhere, at the head, too;
rotation of a part of each head."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import ModelSpec, Network, partly_rotated
from polydraft.models.networks.settings import LAYER_NORM, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return partly_rotated(config, epsilon=config.layer_norm_eps, centred=True, parallel=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"layer_norm_eps": file.number(LAYER_NORM), "hidden_act": "gelu_new", "qk_layernorm": False}


PHI = Network(
    "phi",
    "phi2",
    spec,
    shares_norm=lambda config: True,
    norm_bias=True,
    head_bias=True,
    attention=AttentionWeights(bias=True, out_bias=True),
    feed_forward=FeedForwardWeights.ungated(True),
    renamed={
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "model.norm": "model.final_layernorm",
    },
    partial_rotary=True,
    settings=settings,
    refusal=lambda config: "it has norms of queries and keys" if config.qk_layernorm else None,
    defaults={
        **special_tokens(1, 2),
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
)
