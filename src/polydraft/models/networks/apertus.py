"""Apertus (arXiv 2509.14233): Llama with norms of queries and keys, and xIELU (arXiv 2411.13010) without a gate, whose slopes each layer learns; files have
them among their settings."""

from dataclasses import replace
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.store.gguf_header import GgufHeader

ALPHAS = {
    f"mlp.act_fn.{name}": shape
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Of folders that do not say it."""


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"hidden_act": "xielu", "attention_bias": has(file, "attn_q.bias")}


APERTUS = Network(
    "apertus",
    "apertus",
    norms={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    attention=AttentionWeights(norms=HEAD_NORMS, bias="attention_bias", out_bias="attention_bias"),
    feed_forward=replace(FeedForwardWeights.ungated(), alphas=ALPHAS),
    names={"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    in_settings={name: f"xielu.{name.rpartition('.')[2]}" for name in ALPHAS},
    settings=settings,
    defaults={
        **special_tokens(1, 2, 3),
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": SCALING,
        "attention_bias": False,
    },
)
