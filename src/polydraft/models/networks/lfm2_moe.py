"""LFM2-MoE (arXiv 2511.23404): LFM2 whose feed-forwards behind the first layers are mixtures of experts, chosen by the sigmoid of their scores."""

from dataclasses import replace
from typing import Any

from polydraft.models.mixers.experts.names import (
    CHOICE,
    ROUTER,
    Experts,
    MixtureWeights,
    stacked,
)
from polydraft.models.networks.lfm2 import LFM2
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored


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


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **LFM2.settings(file),
        "num_dense_layers": file.setting("leading_dense_block_count", 0),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    gguf="lfm2moe",
    settings=settings,
    defaults={
        **{name: LFM2.defaults[name] for name in LFM2.defaults if not name.startswith(("block_", "full_"))},
        "layer_types": None,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    experts=MixtureWeights(
        mixture,
        names={ROUTER: "feed_forward.gate", CHOICE: "feed_forward.expert_bias"},
        stack=stack,
        module="feed_forward",
    ),
)
