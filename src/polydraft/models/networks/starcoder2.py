"""StarCoder 2 (arXiv 2402.19173): `LayerNorm`, biases everywhere, a feed-forward without a gate. Files do not say its window."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM, has, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(config, epsilon=config.norm_epsilon, centred=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "norm_epsilon": file.number(LAYER_NORM),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": has(file, "attn_q.bias"),
        "sliding_window": None,
    }


STARCODER2 = Network(
    "starcoder2",
    "starcoder2",
    spec,
    norm_bias=True,
    attention=AttentionWeights(bias="use_bias", out_bias="use_bias"),
    feed_forward=FeedForwardWeights.ungated("use_bias", "mlp.c_fc", "mlp.c_proj"),
    settings=settings,
    defaults={
        **special_tokens(50_256, 50_256),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
)
