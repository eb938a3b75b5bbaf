"""Ministral 3 (https://mistral.ai/news/mistral-3): Llama whose queries grow with the logarithm of their position, by multiples of the trained length.

The multiplier of the file is transformers' `mscale_all_dim`; the numerator of the factor of cosines and sines has 1, as in llama.cpp.
"""

from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER


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
    lacks="queries that are multiplied by the logarithm of their position",
    settings=lambda file: {"sliding_window": None},
    rope=rope,
    interleaved=True,
)
