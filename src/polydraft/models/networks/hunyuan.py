"""Hunyuan's dense models (https://github.com/Tencent-Hunyuan/Hunyuan-7B): Llama with norms of queries and keys behind the rotation, whose base grows by a
factor that does not depend on a text's length. Files have that base."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import ModelSpec, Network, one_rotary
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.rotary import head_width, rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader

HEAD_NORMS = "self_attn.query_layernorm", "self_attn.key_layernorm"


def spec(config: Any, **numbers: Any) -> ModelSpec:
    """numbers: fields that differ."""
    rope = {**whole_heads(rope_parameters(config))}
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        width = head_width(config)
        base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        rope = {"rope_type": "default", "rope_theta": base}
    return one_rotary(config, rotaries=(rope,), **numbers)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias")}


ATTENTION = AttentionWeights(
    norms=HEAD_NORMS, norm_form=HeadNorms(behind=True), bias="attention_bias", out_bias="attention_bias"
)
GGUF_NAMES: dict[str, str] = dict(zip(HEAD_NORMS, ("attn_q_norm", "attn_k_norm"), strict=True))
DEFAULTS = {**special_tokens(1, 2, 0), "rms_norm_eps": 1e-5, "attention_bias": False}

HUNYUAN = Network(
    "hunyuan_v1_dense",
    "hunyuan-dense",
    spec,
    attention=ATTENTION,
    names=GGUF_NAMES,
    settings=settings,
    defaults=DEFAULTS,
)
