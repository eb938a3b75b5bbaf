"""StarCoder 2 (arXiv 2402.19173): norms and products with biases, a feed-forward without a gate. Files do not say its window."""

from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "norm_epsilon": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": None,
    }


STARCODER2 = Network(
    "starcoder2",
    "starcoder2",
    lacks="norms with means and biases, and feed-forwards without a gate",
    names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    settings=settings,
)
