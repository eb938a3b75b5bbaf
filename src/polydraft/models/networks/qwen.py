"""Qwen2 and Qwen3, and their mixtures of experts.

Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of queries, keys and values.
Qwen1.5-MoE and Qwen2-MoE (section 2.2.2 there): feed-forwards are mixtures of experts, and one expert of all rows behind a gate of its own. Files do not
say that weights of the chosen are not divided by their sum.
Qwen3 (arXiv 2505.09388): Llama with norms of queries and keys. Qwen3-MoE: its mixtures. Files do not say that weights of the chosen are divided by their sum.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import (
    EXPERT_DEFAULTS,
    experts,
    renamed,
    shared_experts,
    windows_behind,
    windows_if_used,
)
from polydraft.models.store.gguf_header import GgufHeader

DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": windows_behind,
}

QWEN2 = Network(
    "qwen2", "qwen2 qwen2vl", attention=AttentionWeights(bias=True), defaults=DEFAULTS, mended=windows_if_used
)


QWEN3 = Network(
    "qwen3",
    "qwen3 qwen3vl",
    attention=AttentionWeights(norms=HEAD_NORMS),
    defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
    mended=windows_if_used,
)


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Which layers are mixtures, as transformers' `Qwen2MoeDecoderLayer` has it."""
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", None) or 1
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers))


def plain_mixture(config: Any) -> Experts:
    """Experts as Qwen's configurations say them."""
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        sparse_layers(config),
        shares=config.norm_topk_prob,
    )


def gated_mixture(config: Any, layers: tuple[bool, ...], shares: bool) -> Experts:
    """Those with an expert of all rows behind a gate of its own. layers, shares: see `Experts`."""
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        layers,
        shares=shares,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def mixture(config: Any) -> Experts:
    return gated_mixture(config, sparse_layers(config), config.norm_topk_prob)


def settings2(file: GgufHeader) -> dict[str, Any]:
    return shared_experts(file) | {"norm_topk_prob": False, "qkv_bias": True}


def windows_between(folder: Mapping[str, Any]) -> list[str]:
    """Kinds of layers, where they are not said: every second of the first ones has a window, if any have."""
    last = folder["max_window_layers"] if folder["use_sliding_window"] else 0
    return [
        "sliding_attention" if layer % 2 == 0 and layer < last else "full_attention"
        for layer in range(folder["num_hidden_layers"])
    ]


QWEN2_MOE = Network(
    "qwen2_moe",
    "qwen2moe",
    attention=AttentionWeights(bias="qkv_bias"),
    settings=settings2,
    defaults={
        **DEFAULTS,
        **EXPERT_DEFAULTS,
        "layer_types": windows_between,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    mended=windows_if_used,
    experts=MixtureWeights(mixture),
)


def settings3(file: GgufHeader) -> dict[str, Any]:
    return experts(file) | {"norm_topk_prob": True}


QWEN3_MOE = Network(
    "qwen3_moe",
    "qwen3moe",
    attention=AttentionWeights(norms=HEAD_NORMS),
    settings=settings3,
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
