"""Qwen3.5-MoE (https://qwen.ai/blog?id=qwen3.5): Qwen3.5 whose feed-forwards are mixtures of experts, with one expert of all rows behind a gate of its own.
Files do not say that weights of the chosen are divided by their sum."""

from dataclasses import replace
from typing import Any

from polydraft.models.compiled.architectures.mixture import Mixture
from polydraft.models.compiled.architectures.qwen3_5 import QWEN3_5
from polydraft.models.loading.gguf_header import GgufHeader


def mixture(config: Any) -> Mixture:
    return Mixture(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        (True,) * config.num_hidden_layers,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **QWEN3_5.gguf_settings(file),
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
    }


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    gguf="qwen35moe",
    inner_width=lambda config: config.moe_intermediate_size,
    gguf_settings=settings,
    mixture=mixture,
)
