"""Sizes of the tiny networks that tests run on, where no other ones matter."""

from typing import Any

from transformers import LlamaConfig

from polydraft.models.compiled.model import CompiledModel

V = 61
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
BLOCKED: dict[str, Any] = GROUPED | {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
}
"""Rows of one block of 256 weights, as files have them."""


def llama_config(**changed: Any) -> LlamaConfig:
    """Of `SIZES`.

    Example:
        >>> llama_config(vocab_size=8).vocab_size
        8
    """
    return LlamaConfig(**SIZES | changed)


def compiled(model: Any, **options: Any) -> CompiledModel:
    """A compiled model that rounds nothing, to be compared with one of transformers."""
    return CompiledModel(model, **{"cache_dtype": "float32", **options})
