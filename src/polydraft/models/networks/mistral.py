"""Mistral (arXiv 2310.06825): Llama with a window in every layer, where its configuration has one. Files call it `llama`."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import Network, UncompiledError
from polydraft.models.networks.settings import special_tokens


def refused(folder: Mapping[str, Any]) -> dict[str, Any]:
    """Those with kinds of layers are Ministral's."""
    if "layer_types" in folder:
        raise UncompiledError("its config.json has layer_types: it is a Ministral")
    return {}


MISTRAL = Network("mistral", defaults={**special_tokens(1, 2), "sliding_window": 4096}, mended=refused)
