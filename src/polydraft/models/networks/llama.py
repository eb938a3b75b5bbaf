"""Llama (arXiv 2302.13971): norms before attention and feed-forward, SiLU gate, rotation of whole heads. Files call Mistral so, too."""

from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


LLAMA = Network(
    "llama",
    "llama",
    interleaved=True,
    settings=settings,
    defaults={**special_tokens(1, 2), "attention_bias": False, "mlp_bias": False},
)
