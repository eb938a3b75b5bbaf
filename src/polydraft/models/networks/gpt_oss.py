"""gpt-oss (arXiv 2508.10925): mixtures of experts with a clamped gate, biases everywhere, attention with sinks, and a window in every second layer.

Its positions are scaled by yarn whose bounds are not rounded to whole pairs. Files do not say so, and in llama.cpp they are rounded.
"""

from typing import Any

from polydraft.models.loading.conversions import gpt_oss as conversion
from polydraft.models.mixers.experts.names import ROUTER, Experts, stacked_by_columns
from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.rotary import rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.windows import setting


def spec(config: Any) -> ModelSpec:
    rope = {**whole_heads(rope_parameters(config))}
    return one_rotary(
        config, rotaries=(rope | {"truncate": setting(config, "yarn_truncates", rope.get("truncate", True))},)
    )


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
        biased=True,
        limit=getattr(config, "swiglu_limit", 7.0),  # of the clamped gate, as alpha
        alpha=getattr(config, "swiglu_alpha", 1.702),
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return conversion.settings(file) | {"attention_bias": True, "yarn_truncates": False}


GPT_OSS = Network(
    "gpt_oss",
    "gpt-oss",
    spec,
    qkv_bias="attention_bias",
    out_bias=True,
    sinks=True,
    gguf_names={"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight"},
    gguf_settings=settings,
    mixture=mixture,
    stack=stacked_by_columns,
    module_names={ROUTER: "mlp.router"},
    refusal=lambda config: None if config.attention_bias else "its attention has no biases",
)
