"""The architectures that are known, a family a file, by model type. A new family is its file: whatever `Network` a file of
this folder defines is here."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from polydraft.models.mixers.experts.names import Experts
from polydraft.models.networks.base import Network
from polydraft.models.networks.llama import LLAMA
from polydraft.models.networks.qwen import QWEN3
from polydraft.models.networks.spec import ModelSpec
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored
from polydraft.models.windows import text_config

__all__ = [
    "COMPILED",
    "LLAMA",
    "LLAMA_FAMILY",
    "NETWORKS",
    "QWEN3",
    "Experts",
    "ModelSpec",
    "Network",
    "Stored",
    "lacks",
    "network_of_file",
]

NETWORKS = {
    value.model_type: value
    for module in iter_modules(__path__)
    for value in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(value, Network)
}
COMPILED = {name: network for name, network in NETWORKS.items() if not network.lacks}
"""Those that the compiled path runs."""
LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those of Llama's own layers, up to biases and norms of heads."""


def lacks(config: Any) -> str:
    """What the compiled path lacks of a model of this configuration; "" where nobody has written it down.

    Example:
        >>> from transformers import GPT2Config
        >>> lacks(GPT2Config()).partition(";")[0]
        'embeddings of positions'
    """
    network = NETWORKS.get(text_config(config).model_type)
    return "" if network is None else network.lacks


def network_of_file(file: GgufHeader) -> Network | None:
    """That of a GGUF file; Mixtral is called as Llama is, and OLMo 3 as OLMo 2.

    Example:
        >>> from types import SimpleNamespace
        >>> file = SimpleNamespace(architecture="llama", setting=lambda name: 8)
        >>> network_of_file(file).model_type
        'mixtral'
    """
    of_name = (network for network in NETWORKS.values() if file.architecture in network.gguf_names)
    return next((network for network in of_name if network.reads(file)), None)
