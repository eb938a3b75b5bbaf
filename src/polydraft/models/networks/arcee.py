"""AFM of Arcee (https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model): Llama whose feed-forwards have squared ReLU and no gate."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import linear_biases, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"hidden_act": "relu2", **linear_biases(file)}


ARCEE = Network(
    "arcee",
    "arcee",
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated("mlp_bias"),
    interleaved=True,
    settings=settings,
    defaults={
        **special_tokens(128_000, 128_001),
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
