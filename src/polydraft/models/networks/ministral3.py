"""Ministral 3 (https://mistral.ai/news/mistral-3): Llama whose queries grow with the logarithm of their position, by multiples of the trained length.

The multiplier of the file is transformers' `mscale_all_dim`; the numerator of the factor of cosines and sines has 1, as in llama.cpp.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.settings import rotary, special_tokens
from polydraft.models.rotary import rope_parameters
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER

SCALING = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def scaling(folder: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of folders that say none."""
    return {**SCALING, "max_position_embeddings": folder["max_position_embeddings"]}


def spec(config: Any) -> ModelSpec:
    rope = rope_parameters(config)
    growth = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    return one_rotary(config, query_growth=growth)


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width, read=[YARN_MULTIPLIER])
    multiplier = file.number_or_none(YARN_MULTIPLIER)
    scales = {}
    if multiplier and parameters["rope_type"] == "yarn":
        scales = {"mscale": 1.0, "mscale_all_dim": multiplier}
    growth = {"llama_4_scaling_beta": file.number_or_none("attention.temperature_scale") or 0.0}
    trained = {"original_max_position_embeddings": file.count("context_length")}
    return {**trained, **parameters, **scales, **growth}


MINISTRAL3 = Network(
    "ministral3",
    "mistral3",
    spec,
    settings=lambda file: {"sliding_window": None},
    rope=rope,
    interleaved=True,
    defaults={
        **special_tokens(1, 2, 11),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": scaling,
    },
)
