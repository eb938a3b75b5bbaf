"""gpt-oss (arXiv 2508.10925): sinks, a window in every second layer, experts with biases.

transformers has gate and up in alternating columns, and matrices of experts transposed. The bounds of its yarn are not rounded; files do not say that.
"""

from typing import Any

import torch
from torch import Tensor

from polydraft.models.loading.conversions.base import Conversion, Source, rotary
from polydraft.models.store.gguf_header import GgufHeader


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width)
    return parameters | ({"truncate": False} if parameters["rope_type"] == "yarn" else {})


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "intermediate_size": file.count("expert_feed_forward_length"),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(file.num_layers)
        ],
    }


def alternating(config: Any, gate: Tensor, up: Tensor) -> Tensor:
    """[E, I, ...] each -> [E, ..., 2 I]."""
    both = torch.stack([gate, up], 2).flatten(1, 2)
    return both.transpose(1, 2) if both.ndim > 2 else both


GPT_OSS = Conversion(
    "gpt_oss",
    settings,
    {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    {
        "self_attn.sinks": Source(("attn_sinks.weight",)),
        "mlp.experts.gate_up_proj": Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), alternating),
        "mlp.experts.gate_up_proj_bias": Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), alternating),
        "mlp.experts.down_proj": Source(("ffn_down_exps.weight",), lambda config, down: down.transpose(1, 2)),
        "mlp.experts.down_proj_bias": Source(("ffn_down_exps.bias",)),
    },
    rotary=rope,
)
