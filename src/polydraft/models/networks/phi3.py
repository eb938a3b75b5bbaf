"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with q, k, v and gate, up in one matrix each, a window in every layer, rotation of a part of each head."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import GATE_UP, QKV, Network, partly_rotated
from polydraft.models.networks.settings import rope_of_folder, rotary, special_tokens
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import LONG_FACTORS, ORIGINAL_LENGTH, SHORT_FACTORS


def settings(file: GgufHeader) -> dict[str, Any]:
    length = file.count(ORIGINAL_LENGTH, file.count("context_length"))
    return {
        "sliding_window": file.number_or_none("attention.sliding_window"),
        "original_max_position_embeddings": length,
    }


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width, partial=True)
    if parameters["rope_type"] != "longrope":
        return parameters
    factors = {"long_factor": file.floats(LONG_FACTORS), "short_factor": file.floats(SHORT_FACTORS)}
    return parameters | factors


def folder_rope(folder: Mapping[str, Any]) -> dict[str, Any]:
    parameters = rope_of_folder(folder)
    kind = parameters["rope_type"]
    return parameters | ({"rope_type": "longrope"} if kind in ("su", "yarn") else {})


PHI3 = Network(
    "phi3",
    "phi3",
    partly_rotated,
    fused=(QKV, GATE_UP),
    partial_rotary=True,
    settings=settings,
    rope=rope,
    defaults={
        **special_tokens(1, 32000, 32000),
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    folder_rope=folder_rope,
)
