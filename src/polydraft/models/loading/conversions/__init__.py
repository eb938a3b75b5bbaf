"""Architectures of GGUF files as models of transformers, by their names there. A new one is its file, or a part of its kin's, and a line here."""

from polydraft.models.loading.conversions.base import Conversion
from polydraft.models.loading.conversions.deepseek2 import DEEPSEEK2
from polydraft.models.loading.conversions.delta_nets import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from polydraft.models.loading.conversions.gemma4 import GEMMA4
from polydraft.models.loading.conversions.gpt_oss import GPT_OSS
from polydraft.models.loading.conversions.lfm2 import LFM2, LFM2_MOE
from polydraft.models.loading.conversions.mistral3 import MISTRAL3
from polydraft.models.loading.conversions.mixtures import GLM4_MOE, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from polydraft.models.loading.conversions.olmo2 import OLMO2
from polydraft.models.loading.conversions.starcoder2 import STARCODER2
from polydraft.models.loading.conversions.state_spaces import (
    FALCON_H1,
    GRANITE_HYBRID,
    GRANITE_HYBRID_DENSE,
    NEMOTRON_H,
)

__all__ = ["CONVERSIONS", "OF_EXPERTS", "Conversion", "conversion_of"]

CONVERSIONS = {
    "deepseek2": DEEPSEEK2,
    "falcon-h1": FALCON_H1,
    "gemma4": GEMMA4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "granitehybrid": GRANITE_HYBRID_DENSE,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
    "mistral3": MISTRAL3,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "olmo2": OLMO2,
    "qwen2moe": QWEN2_MOE,
    "qwen35": QWEN3_5,
    "qwen35moe": QWEN3_5_MOE,
    "qwen3moe": QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "starcoder2": STARCODER2,
}
OF_EXPERTS = {"granitehybrid": GRANITE_HYBRID, "llama": MIXTRAL}
"""Where files with experts have the name of an architecture without."""


def conversion_of(architecture: str, experts: int) -> Conversion | None:
    """That of a file. experts: how many a layer has.

    Example:
        >>> conversion_of("llama", 8).model_type, conversion_of("llama", 0)
        ('mixtral', None)
    """
    return (OF_EXPERTS.get(architecture) if experts else None) or CONVERSIONS.get(architecture)
