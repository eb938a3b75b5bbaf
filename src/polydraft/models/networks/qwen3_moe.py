"""Qwen3-MoE (arXiv 2505.09388): Qwen3 whose feed-forwards are mixtures of experts. Files do not say that weights of the chosen are divided by their sum."""

from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.qwen2_moe import plain_mixture
from polydraft.models.networks.settings import EXPERT_DEFAULTS, experts, renamed, windows_if_used
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return experts(file) | {"norm_topk_prob": True}


QWEN3_MOE = Network(
    "qwen3_moe",
    "qwen3moe",
    attention=AttentionWeights(norms=HEAD_NORMS),
    settings=settings,
    defaults={
        **EXPERT_DEFAULTS,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    mended=lambda folder: {**windows_if_used(folder), **renamed("num_experts", "num_local_experts")(folder)},
    experts=MixtureWeights(plain_mixture),
)
