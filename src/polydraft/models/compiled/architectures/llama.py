"""Llama (arXiv 2302.13971): norms before attention and feed-forward, SiLU gate, rotation of whole heads. Files call Mistral so, too."""

from typing import Any

from polydraft.models.compiled.architectures.base import Architecture
from polydraft.models.loading.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


LLAMA = Architecture("llama", "llama", interleaved=True, gguf_settings=settings)
