"""LFM2-MoE (arXiv 2511.23404): LFM2 whose feed-forwards behind the first layers are mixtures of experts, chosen by the sigmoid of their scores."""

from dataclasses import replace
from typing import Any

from polydraft.models.loading.conversions.lfm2 import lfm2_moe
from polydraft.models.mixers.experts.names import (
    CHOICE,
    ROUTER,
    Experts,
    Stored,
    renamed_expert,
    stacked,
)
from polydraft.models.networks.lfm2 import LFM2


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        tuple(layer >= config.num_dense_layers for layer in range(config.num_hidden_layers)),
        sigmoid=True,
        shares=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        choice_biased=config.use_expert_bias,
    )


def stack(name: str, inner: int) -> Stored | None:
    stored = stacked(name, inner)
    return stored and stored._replace(name=stored.name.replace("mlp.", "feed_forward."))


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    gguf="lfm2moe",
    gguf_settings=lfm2_moe,
    mixture=mixture,
    stack=stack,
    module_names={ROUTER: "feed_forward.gate", CHOICE: "feed_forward.expert_bias"},
    expert_place=lambda name: renamed_expert(name, "feed_forward"),
)
