"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): Llama whose rotations lie side by side."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"use_bias": has(file, "attn_q.bias")}


DEFAULTS = {
    **special_tokens(1, 2, 0),
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "use_bias": False,
}

ERNIE4_5 = Network(
    "ernie4_5",
    "ernie4_5",
    attention=AttentionWeights(bias="use_bias", out_bias="use_bias"),
    feed_forward=FeedForwardWeights(bias="use_bias"),
    pairs=True,
    settings=settings,
    defaults={**DEFAULTS, "head_dim": 128, "num_key_value_heads": 2},
)
