"""OLMoE (arXiv 2409.02060): mixtures of experts with norms of all queries and of all keys together."""

from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import Network
from polydraft.models.networks.olmo import clipped
from polydraft.models.networks.settings import has, renamed, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
        shares=config.norm_topk_prob,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": has(file, "attn_q.bias"),
    }


OLMOE = Network(
    "olmoe",
    "olmoe",
    attention=AttentionWeights(
        norms=HEAD_NORMS, norm_form=HeadNorms(whole=True), bias="attention_bias", out_bias="attention_bias"
    ),
    experts=MixtureWeights(mixture),
    settings=settings,
    refusal=clipped,
    defaults={
        **special_tokens(None, 50_279, 1),
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    mended=renamed("num_experts", "num_local_experts"),
)
