"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama whose every fourth layer does not rotate (arXiv 2501.18795)."""

from typing import Any

from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return one_rotary(
        config, rotary_of_layer=tuple(0 if rotates else -1 for rotates in config.no_rope_layers)
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    # files do not say which layers rotate: every fourth does not, as in llama.cpp
    return {"no_rope_layers": [int((layer + 1) % 4 > 0) for layer in range(file.count("block_count"))]}


SMOLLM3 = Network("smollm3", "smollm3", spec, interleaved=True, settings=settings)
