"""Mixtral (arXiv 2401.04088): Mistral whose feed-forwards are mixtures of experts. Files call it `llama`, with a number of experts."""

from typing import Any

from polydraft.models.mixers.experts.names import ROUTER, Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import renamed, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "sliding_window": None,
    }


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
    experts=MixtureWeights(mixture, names={ROUTER: "block_sparse_moe.gate"}, module="block_sparse_moe"),
)
