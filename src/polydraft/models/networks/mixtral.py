"""Mixtral (arXiv 2401.04088): Mistral whose feed-forwards are mixtures of experts. Files call it `llama`, with a number of experts."""

from typing import Any

from polydraft.models.mixers.experts.names import ROUTER, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import everywhere, local_experts, renamed, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {**local_experts(file), "sliding_window": None}


MIXTRAL = Network(
    "mixtral",
    "llama",
    interleaved=True,
    settings=settings,
    defaults={
        **special_tokens(1, 2),
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mended=renamed("num_local_experts", "num_experts"),
    experts=MixtureWeights(everywhere, names={ROUTER: "block_sparse_moe.gate"}, module="block_sparse_moe"),
)
