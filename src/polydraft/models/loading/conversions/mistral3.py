"""Ministral 3 (https://mistral.ai/news/mistral-3): Llama whose queries grow with the logarithm of their position, by multiples of the trained length.

The multiplier of the file is transformers' `mscale_all_dim`; the numerator of the factor of cosines and sines has 1, as in llama.cpp.
"""

from typing import Any

from polydraft.models.loading.conversions.base import Conversion, rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width, read=[YARN_MULTIPLIER])
    multiplier = file.number_or_none(YARN_MULTIPLIER)
    scales = (
        {"mscale": 1.0, "mscale_all_dim": multiplier}
        if multiplier and parameters["rope_type"] == "yarn"
        else {}
    )
    growth = {"llama_4_scaling_beta": file.number_or_none("attention.temperature_scale") or 0.0}
    return {
        "original_max_position_embeddings": file.count("context_length"),
        **parameters,
        **scales,
        **growth,
    }


MISTRAL3 = Conversion("ministral3", lambda file: {"sliding_window": None}, interleaved=True, rotary=rope)
