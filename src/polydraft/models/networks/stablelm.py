"""StableLM 2 (arXiv 2402.17834): Llama with `LayerNorm`, and rotation of a part of each head; in some models attention and feed-forward read the same."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM, has, special_tokens
from polydraft.models.networks.spec import ModelSpec, partly_rotated
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    return partly_rotated(
        config, epsilon=config.layer_norm_eps, centred=True, parallel=config.use_parallel_residual
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": file.number(LAYER_NORM),
        "use_qkv_bias": has(file, "attn_q.bias"),
        "qk_layernorm": has(file, "attn_q_norm.weight"),
        "use_parallel_residual": not has(file, "ffn_norm.weight"),
    }


STABLELM = Network(
    "stablelm",
    "stablelm",
    spec,
    shares_norm=lambda config: config.use_parallel_residual,
    norm_bias=True,
    attention=AttentionWeights(bias="use_qkv_bias"),
    partial_rotary=True,
    settings=settings,
    refusal=lambda config: "each of its heads has norms of its own" if config.qk_layernorm else None,
    defaults={
        **special_tokens(0, 0),
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
)
