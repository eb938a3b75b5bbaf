"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with scales of embeddings, residuals, scores and logits; so is MiniCPM
(arXiv 2404.06395), which transformers does not have under a name of its own."""

from typing import Any

from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.settings import special_tokens
from polydraft.models.store.gguf_header import GgufHeader

SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""transformers' names -> those of files."""


def scaled_spec(config: Any, **numbers: Any) -> ModelSpec:
    """numbers: fields that differ, beside its scales."""
    return one_rotary(
        config,
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
        **numbers,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    width = file.count("embedding_length") // file.count("attention.head_count")
    # files of MiniCPM do not say what scores are multiplied by
    usual = file.count("attention.key_length", width) ** -0.5 if file.architecture == "minicpm" else None
    return {
        name: file.number(key, usual if key == "attention.scale" else None) for name, key in SCALES.items()
    }


DEFAULTS = {**special_tokens(1, 2), **dict.fromkeys(SCALES, 1.0), "attention_bias": False}

GRANITE = Network(
    "granite",
    "granite minicpm",
    scaled_spec,
    interleaved=True,
    settings=settings,
    defaults={**DEFAULTS, "mlp_bias": False},
)
