"""Qwen3.5-MoE (https://qwen.ai/blog?id=qwen3.5): Qwen3.5 whose feed-forwards are mixtures of experts, with one expert of all rows behind a gate of its own.
Files do not say that weights of the chosen are divided by their sum."""

from dataclasses import replace
from typing import Any

from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.qwen3_5 import QWEN3_5
from polydraft.models.networks.settings import shared_experts


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        (True,) * config.num_hidden_layers,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    gguf="qwen35moe",
    feed_forward=FeedForwardWeights(width=lambda config: config.moe_intermediate_size),
    settings=lambda file: {**QWEN3_5.settings(file), **shared_experts(file)},
    experts=MixtureWeights(mixture),
    defaults={
        **QWEN3_5.defaults,
        "intermediate_size": 0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
