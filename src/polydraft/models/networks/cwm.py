"""Code World Model (arXiv 2510.02387): Llama with windows in three layers of four."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import special_tokens

SCALING = {
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
"""Of folders that do not say it."""


def windows_behind_firsts(folder: Mapping[str, Any]) -> list[str]:
    layers = range(folder["num_hidden_layers"])
    return ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]


CWM = Network(
    "cwm",
    defaults={
        **special_tokens(128_000, 128_001),
        "eos_token_id": [128_001, 128_008, 128_009],
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": SCALING,
        "mlp_bias": False,
        "sliding_window": 8192,
        "layer_types": windows_behind_firsts,
    },
)
