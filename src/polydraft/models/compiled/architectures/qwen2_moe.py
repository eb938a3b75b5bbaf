"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671, section 2.2.2): Qwen2 whose feed-forwards are mixtures of experts, and one expert of all rows behind
a gate of its own. Files do not say that weights of the chosen are not divided by their sum."""

from typing import Any

from polydraft.models.compiled.architectures.base import Architecture
from polydraft.models.compiled.architectures.mixture import Mixture
from polydraft.models.loading.gguf_header import GgufHeader


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Which layers are mixtures, as transformers' `Qwen2MoeDecoderLayer` has it."""
    dense, step = config.mlp_only_layers or (), config.decoder_sparse_step
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_hidden_layers))


def mixture(config: Any) -> Mixture:
    return Mixture(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        sparse_layers(config),
        shares=config.norm_topk_prob,
        shared=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def expert_settings(file: GgufHeader) -> dict[str, Any]:
    """What files of all Qwen mixtures say; of widths that they lack, what llama.cpp takes."""
    chosen = file.count("expert_used_count")
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": file.count("expert_feed_forward_length", file.count("feed_forward_length") // chosen),
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def settings(file: GgufHeader) -> dict[str, Any]:
    shared = file.count("expert_shared_feed_forward_length", file.count("feed_forward_length"))
    return expert_settings(file) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


QWEN2_MOE = Architecture("qwen2_moe", "qwen2moe", qkv_bias=True, gguf_settings=settings, mixture=mixture)
