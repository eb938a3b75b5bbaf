"""EXAONE 4 (arXiv 2507.11407): norms of queries and keys, and behind attention and feed-forward alone; the larger has windows in three layers of
four, and no rotation in the fourth."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.olmo2 import GGUF_NAMES, NORMS
from polydraft.models.networks.settings import by_kind_of_layer, special_tokens, whole_every
from polydraft.models.store.gguf_header import GgufHeader

LOCAL = "sliding_attention"


def spec(config: Any) -> ModelSpec:
    rotates = [config.sliding_window is None or kind == LOCAL for kind in config.layer_types]
    return one_rotary(config, rotary_of_layer=tuple(0 if turned else -1 for turned in rotates))


def settings(file: GgufHeader) -> dict[str, Any]:
    window = file.number_or_none("attention.sliding_window")
    whole = ["full_attention"] * file.num_layers
    return {
        "sliding_window": window,
        "sliding_window_pattern": 4 if window else 0,
        "layer_types": by_kind_of_layer(file, otherwise=4) if window else whole,
    }


def pattern(folder: Mapping[str, Any]) -> list[str]:
    return whole_every(folder["sliding_window_pattern"], LOCAL)(folder)


EXAONE4 = Network(
    "exaone4",
    "exaone4",
    spec,
    norms=NORMS,
    attention=AttentionWeights(norms=HEAD_NORMS),
    names=GGUF_NAMES,
    settings=settings,
    defaults={
        **special_tokens(0, 2),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": pattern,
    },
)
