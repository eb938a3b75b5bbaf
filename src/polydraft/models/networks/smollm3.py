"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama whose every fourth layer does not rotate (arXiv 2501.18795)."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(
        config, rotary_of_layer=tuple(0 if rotates else -1 for rotates in config.no_rope_layers)
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    # files do not say which layers rotate: every fourth does not, as in llama.cpp
    return {"no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(file.count("block_count"))]}


def layers_that_rotate(folder: Mapping[str, Any]) -> list[int]:
    interval = folder["no_rope_layer_interval"]
    return [int((layer + 1) % interval != 0) for layer in range(folder["num_hidden_layers"])]


def windows_of_others(folder: Mapping[str, Any]) -> list[str]:
    """Kinds of layers, where they are not said: those that do not rotate have windows, if any have."""
    slide = folder["use_sliding_window"] and folder["sliding_window"] is not None
    return [
        "sliding_attention" if slide and not rotates else "full_attention"
        for rotates in folder["no_rope_layers"]
    ]


SMOLLM3 = Network(
    "smollm3",
    "smollm3",
    spec,
    interleaved=True,
    settings=settings,
    defaults={
        **special_tokens(128_000, 128_001, 128_004),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "no_rope_layers": layers_that_rotate,
        "layer_types": windows_of_others,
    },
)
