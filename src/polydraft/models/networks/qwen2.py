"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values."""

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import windows_behind, windows_if_used

DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": windows_behind,
}

QWEN2 = Network(
    "qwen2", "qwen2 qwen2vl", attention=AttentionWeights(bias=True), defaults=DEFAULTS, mended=windows_if_used
)
