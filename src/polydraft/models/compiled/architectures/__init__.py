"""The architectures that the compiled path runs, one a file or some kin in one, by model type. A new one is its file: whatever `Architecture`
a file of this folder defines is here."""

from importlib import import_module
from pkgutil import iter_modules

from polydraft.models.compiled.architectures.base import Architecture, ModelSpec
from polydraft.models.compiled.architectures.llama import LLAMA
from polydraft.models.compiled.architectures.mixture import Mixture, Stored
from polydraft.models.compiled.architectures.qwen3 import QWEN3

__all__ = [
    "ARCHITECTURES",
    "LLAMA",
    "LLAMA_FAMILY",
    "QWEN3",
    "Architecture",
    "Mixture",
    "ModelSpec",
    "Stored",
]

ARCHITECTURES = {
    value.model_type: value
    for module in iter_modules(__path__)
    for value in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(value, Architecture)
}
LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those of Llama's own layers, up to biases and norms of heads."""
