"""Qwen3-MoE (arXiv 2505.09388): Qwen3 whose feed-forwards are mixtures of experts. Files do not say that weights of the chosen are divided by their sum."""

from typing import Any

from polydraft.models.compiled.architectures.base import HEAD_NORMS, Architecture
from polydraft.models.compiled.architectures.mixture import Mixture
from polydraft.models.compiled.architectures.qwen2_moe import sparse_layers
from polydraft.models.loading.conversions.mixtures import qwen3_moe


def mixture(config: Any) -> Mixture:
    return Mixture(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        sparse_layers(config),
        shares=config.norm_topk_prob,
    )


QWEN3_MOE = Architecture(
    "qwen3_moe", "qwen3moe", head_norms=HEAD_NORMS, gguf_settings=qwen3_moe, mixture=mixture
)
