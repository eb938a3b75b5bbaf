"""Hunyuan's dense models (https://github.com/Tencent-Hunyuan/Hunyuan-7B): Llama with norms of queries and keys behind the rotation, whose base grows by a
factor that does not depend on a text's length. Files have that base.

Its mixtures (arXiv 2411.02265) have experts in every layer, and one of all rows beside them.
"""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import ROUTER, SHARED, Experts, MixtureWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, renamed, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
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


def number_of(value: Any) -> Any:
    """Of a setting that may be said for each layer, where all say the same."""
    return value if isinstance(value, int) or len({*value}) != 1 else value[0]


def mixture(config: Any) -> Experts:
    return Experts(
        number_of(config.num_experts),
        number_of(config.moe_topk),
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
        shared=config.intermediate_size,
    )


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": file.count("expert_count"),
        "moe_topk": file.count("expert_used_count"),
        "attention_bias": has(file, "attn_q.bias"),
    }


HUNYUAN_MOE = Network(
    "hunyuan_v1_moe",
    "hunyuan-moe",
    spec,
    attention=ATTENTION,
    names=GGUF_NAMES,
    experts=MixtureWeights(mixture, names={f"{ROUTER}.": "mlp.gate.wg.", f"{SHARED}.": "mlp.shared_mlp."}),
    settings=moe_settings,
    defaults={**DEFAULTS, "num_experts": 1, "moe_topk": 1},
    mended=renamed("num_experts", "num_local_experts"),
)
