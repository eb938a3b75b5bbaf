"""Ministral (https://mistral.ai/news/ministraux): Mistral whose layers say whether they have windows."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import special_tokens


def all_alike(folder: Mapping[str, Any]) -> list[str]:
    kind = "full_attention" if folder["sliding_window"] is None else "sliding_attention"
    return [kind] * folder["num_hidden_layers"]


MINISTRAL = Network(
    "ministral",
    defaults={
        **special_tokens(1, 2),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "layer_types": all_alike,
    },
)
