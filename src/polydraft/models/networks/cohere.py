"""Command R and R7B of Cohere (arXiv 2504.00698): `LayerNorm` without biases, read by attention and feed-forward alike, whose sum is added; logits
are scaled. The second has windows in three layers of four, and no rotation in the fourth."""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM, by_kind_of_layer, has, special_tokens, whole_every
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader

LOCAL = "sliding_attention"


def spec(config: Any, **numbers: Any) -> ModelSpec:
    """numbers: fields that differ."""
    return one_rotary(
        config,
        epsilon=config.layer_norm_eps,
        centred=True,
        parallel=True,
        logit_scale=config.logit_scale,
        **numbers,
    )


def spec2(config: Any) -> ModelSpec:
    return spec(config, rotary_of_layer=tuple(0 if kind == LOCAL else -1 for kind in config.layer_types))


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": file.number(LAYER_NORM),
        "logit_scale": file.number("logit_scale"),
        "use_qk_norm": has(file, "attn_q_norm.weight"),
        "attention_bias": has(file, "attn_q.bias"),
    }


def settings2(file: GgufHeader) -> dict[str, Any]:
    return settings(file) | {
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": by_kind_of_layer(file, otherwise=4),
    }


def width_of_heads(folder: Mapping[str, Any]) -> dict[str, Any]:
    return {"head_dim": folder["hidden_size"] // folder["num_attention_heads"]}


def pattern(folder: Mapping[str, Any]) -> list[str]:
    return whole_every(folder["sliding_window_pattern"], LOCAL)(folder)


DEFAULTS = {
    **special_tokens(5, 255_001, 0),
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "rms_norm_eps": 1e-5,
}

COHERE = Network(
    "cohere",
    "command-r",
    spec,
    shares_norm=lambda config: True,
    attention=AttentionWeights(
        norms=HEAD_NORMS,
        norm_form=HeadNorms(centred=True),
        each_has_norms=True,
        bias="attention_bias",
        out_bias="attention_bias",
    ),
    pairs=True,
    settings=settings,
    defaults={**DEFAULTS, "use_qk_norm": False, "rope_theta": 5e5},
)
COHERE2 = Network(
    "cohere2",
    "cohere2",
    spec2,
    shares_norm=lambda config: True,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    pairs=True,
    settings=settings2,
    defaults={**DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": pattern},
    mended=width_of_heads,
)
