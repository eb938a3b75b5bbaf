"""GLM-4 (arXiv 2406.12793, and https://github.com/zai-org/GLM-4 of April 2025): rotation of a half of each head, gate and up in one matrix; the later
one has norms behind attention and feed-forward, too. Files call the first `chatglm`."""

from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.networks.base import GATE_UP, NORMS, Network, partly_rotated
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.store.gguf_header import GgufHeader

NORMS4 = {
    **NORMS,
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": has(file, "attn_q.bias")}


DEFAULTS = {
    **special_tokens(None, 151_329, 151_329),
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

GLM = Network(
    "glm",
    "chatglm",
    partly_rotated,
    attention=AttentionWeights(bias="attention_bias"),
    pairs=True,
    fused=(GATE_UP,),
    partial_rotary=True,
    settings=settings,
    defaults=DEFAULTS,
)
GLM4 = Network(
    "glm4",
    "glm4",
    partly_rotated,
    norms=NORMS4,
    attention=AttentionWeights(bias="attention_bias"),
    pairs=True,
    fused=(GATE_UP,),
    partial_rotary=True,
    names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    settings=settings,
    defaults=DEFAULTS,
)
