"""Phi-3.5-MoE and Phi-mini-MoE (arXiv 2404.14219): `LayerNorm`, biases, and experts that SparseMixer chooses (arXiv 2409.12136)."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import ROUTER, Experts, MixtureWeights
from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.phi3 import rope as file_rope
from polydraft.models.networks.settings import everywhere, has, local_experts, special_tokens
from polydraft.models.store.gguf_header import GgufHeader

NOISE = 0.01
"""Of its training, where files and folders do not say it."""


def spec(config: Any) -> ModelSpec:
    return one_rotary(config, centred=True)


def mixture(config: Any) -> Experts:
    return everywhere(config, noise=config.router_jitter_noise)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **local_experts(file),
        "attention_bias": has(file, "attn_q.bias"),
        "lm_head_bias": "output.bias" in file.tensors,
        "router_jitter_noise": NOISE,
        "sliding_window": file.number_or_none("attention.sliding_window"),
    }


PHIMOE = Network(
    "phimoe",
    "phimoe",
    spec,
    norm_bias=True,
    head_bias="lm_head_bias",
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    experts=MixtureWeights(
        mixture,
        names={f"{ROUTER}.": "mlp.router.", ROUTER: "block_sparse_moe.gate"},
        module="block_sparse_moe",
    ),
    settings=settings,
    rope=file_rope,
    refusal=lambda config: (
        "its positions are scaled by longrope" if "long_factor" in (config.rope_parameters or {}) else None
    ),
    defaults={
        **special_tokens(1, 2),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "attention_bias": False,
        "lm_head_bias": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": NOISE,
    },
)
