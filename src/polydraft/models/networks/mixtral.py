"""Mixtral (arXiv 2401.04088): Mistral whose feed-forwards are mixtures of experts. Files call it `llama`, with a number of experts."""

from typing import Any

from polydraft.models.loading.conversions.mixtures import mixtral
from polydraft.models.mixers.experts.names import ROUTER, Experts, renamed_expert
from polydraft.models.networks.base import Network


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
    )


MIXTRAL = Network(
    "mixtral",
    "llama",
    interleaved=True,
    gguf_settings=mixtral,
    mixture=mixture,
    module_names={ROUTER: "block_sparse_moe.gate"},
    expert_place=lambda name: renamed_expert(name, "block_sparse_moe"),
)
