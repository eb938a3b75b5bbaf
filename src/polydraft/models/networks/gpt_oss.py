"""gpt-oss (arXiv 2508.10925): mixtures of experts with a clamped gate, biases everywhere, attention with sinks, and a window in every second layer.

Its positions are scaled by yarn whose bounds are not rounded to whole pairs. Files do not say so, and in llama.cpp they are rounded.
"""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import ROUTER, Experts, MixtureWeights, stacked_by_columns
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import everywhere, local_experts, renamed, rotary, whole_every
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader


def spec(config: Any) -> ModelSpec:
    rope = whole_heads(rope_parameters(config))
    return one_rotary(config, rotaries=({"truncate": True, **rope},))


def mixture(config: Any) -> Experts:
    return everywhere(
        config,
        biased=True,
        limit=getattr(config, "swiglu_limit", 7.0),  # of the clamped gate, as alpha
        alpha=getattr(config, "swiglu_alpha", 1.702),
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "attention_bias": True,
        **local_experts(file),
        "intermediate_size": file.count("expert_feed_forward_length"),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(file.num_layers)
        ],
    }


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width)
    return parameters | ({"truncate": False} if parameters["rope_type"] == "yarn" else {})


SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of folders that do not say it."""

GPT_OSS = Network(
    "gpt_oss",
    "gpt-oss",
    spec,
    attention=AttentionWeights(bias="attention_bias", out_bias=True, sinks=True),
    names={"post_attention_layernorm": "post_attention_norm"},
    settings=settings,
    rope=rope,
    experts=MixtureWeights(mixture, names={ROUTER: "mlp.router"}, stack=stacked_by_columns),
    refusal=lambda config: None if config.attention_bias else "its attention has no biases",
    defaults={
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": whole_every(2, "sliding_attention"),
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_theta": 150_000.0,
        "rope_parameters": SCALING,
    },
    mended=renamed("num_local_experts", "num_experts"),
)
