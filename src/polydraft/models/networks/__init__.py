"""The architectures that the compiled path runs, one a file or some kin in one, by model type. A new one is its file: whatever `Network`
a file of this folder defines is here."""

from importlib import import_module
from pkgutil import iter_modules

from polydraft.models.mixers.experts.names import Experts, Stored
from polydraft.models.networks.base import ModelSpec, Network
from polydraft.models.networks.llama import LLAMA
from polydraft.models.networks.qwen3 import QWEN3

__all__ = [
    "LLAMA",
    "LLAMA_FAMILY",
    "NETWORKS",
    "QWEN3",
    "Experts",
    "ModelSpec",
    "Network",
    "Stored",
]

NETWORKS = {
    value.model_type: value
    for module in iter_modules(__path__)
    for value in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(value, Network)
}
LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those of Llama's own layers, up to biases and norms of heads."""
