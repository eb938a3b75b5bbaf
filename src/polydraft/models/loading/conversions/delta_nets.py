"""Qwen3-Next, Qwen3.5 and its mixture of experts (https://qwenlm.github.io): gated delta nets, and attention in every so many layers.

Norm weights of files already hold 1 + w, but for that of the delta net; decay rates are negative numbers, not logarithms. A delta net has several heads
of values for each of keys: transformers has those of one key together (k0 k0 k1 k1), files of Qwen3.5 in turns (k0 k1 k0 k1).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polydraft.models.loading.conversions.base import (
    Conversion,
    Source,
    log_of_negative,
    partly_rotary,
    scaled,
)
from polydraft.models.loading.conversions.mixtures import shared_experts
from polydraft.models.store.gguf_header import GgufHeader

NAMES = {"post_attention_layernorm": "post_attention_norm"}
WEIGHTS = {
    "model.norm.weight": scaled("output_norm.weight", less=1.0),
    "input_layernorm.weight": scaled("attn_norm.weight", less=1.0),
    "post_attention_layernorm.weight": scaled("post_attention_norm.weight", less=1.0),
    "self_attn.q_norm.weight": scaled("attn_q_norm.weight", less=1.0),
    "self_attn.k_norm.weight": scaled("attn_k_norm.weight", less=1.0),
    "linear_attn.norm.weight": Source(("ssm_norm.weight",)),
}


def delta_settings(file: GgufHeader) -> dict[str, Any]:
    heads = file.count("ssm.time_step_rank")
    count = file.count("block_count")
    interval = file.count("full_attention_interval", 4)
    recurs = file.setting("attention.recurrent_layers") or [
        (layer + 1) % interval > 0 for layer in range(count)
    ]
    return {
        "layer_types": [
            "linear_attention" if recurrent else "full_attention" for recurrent in recurs[: file.num_layers]
        ],
        "linear_num_key_heads": file.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_value_head_dim": file.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
    }


def next_settings(file: GgufHeader) -> dict[str, Any]:
    return delta_settings(file) | shared_experts(file) | {"norm_topk_prob": True}


def three_positions(file: GgufHeader, width: int) -> dict[str, Any]:
    """Rotary parameters for positions in text and pictures, all equal in text."""
    sections = file.setting("rope.dimension_sections") or []
    return {**partly_rotary(file, width), "mrope_section": sections[:3], "mrope_interleaved": True}


def by_key(config: Any, rows: Tensor, width: int = 1) -> Tensor:
    """Rows of heads of values, `width` each, from turns to those of one key together.

    Example:
        >>> from types import SimpleNamespace
        >>> by_key(SimpleNamespace(linear_num_key_heads=2), torch.arange(4)).tolist()
        [0, 2, 1, 3]
    """
    return rows.unflatten(0, (-1, config.linear_num_key_heads, width)).transpose(0, 1).flatten(0, 2)


def values_by_key(config: Any, rows: Tensor) -> Tensor:
    """The same of queries, keys and values below one another: the values alone."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:before], by_key(config, rows[before:], config.linear_value_head_dim)])


def columns_by_key(config: Any, matrix: Tensor) -> Tensor:
    return by_key(config, matrix.T, config.linear_value_head_dim).T


def grouped(config: Any, qkv: Tensor, z: Tensor) -> Tensor:
    """Rows of queries, keys, values and gates, each of all heads -> those of each head of keys together, as Qwen3-Next has them."""
    heads = config.linear_num_key_heads
    width = config.linear_key_head_dim
    q, k, v = qkv.split([heads * width, heads * width, len(qkv) - 2 * heads * width])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in (q, k, v, z)], 1).flatten(0, 1)


def _moved(tensor: str, reordered: Callable[..., Tensor]) -> Source:
    return Source((tensor,), reordered)


NEXT = {
    "linear_attn.in_proj_qkvz.weight": Source(("attn_qkv.weight", "attn_gate.weight"), grouped),
    "linear_attn.in_proj_ba.weight": Source(("ssm_ba.weight",)),
    "linear_attn.conv1d.weight": Source(("ssm_conv1d.weight",)),
    "linear_attn.A_log": log_of_negative("ssm_a"),
    "linear_attn.dt_bias": Source(("ssm_dt.bias",)),
    "linear_attn.out_proj.weight": Source(("ssm_out.weight",)),
}
IN_TURNS = {
    "linear_attn.in_proj_qkv.weight": _moved("attn_qkv.weight", values_by_key),
    "linear_attn.in_proj_z.weight": _moved(
        "attn_gate.weight", lambda c, rows: by_key(c, rows, c.linear_value_head_dim)
    ),
    "linear_attn.in_proj_a.weight": _moved("ssm_alpha.weight", by_key),
    "linear_attn.in_proj_b.weight": _moved("ssm_beta.weight", by_key),
    "linear_attn.conv1d.weight": _moved("ssm_conv1d.weight", values_by_key),
    "linear_attn.A_log": _moved("ssm_a", lambda config, rates: by_key(config, (-rates).log())),
    "linear_attn.dt_bias": _moved("ssm_dt.bias", by_key),
    "linear_attn.out_proj.weight": _moved("ssm_out.weight", columns_by_key),
}
QWEN3_NEXT = Conversion("qwen3_next", next_settings, NAMES, WEIGHTS | NEXT, rotary=partly_rotary)
QWEN3_5 = Conversion("qwen3_5_text", delta_settings, NAMES, WEIGHTS | IN_TURNS, rotary=three_positions)
QWEN3_5_MOE = Conversion(
    "qwen3_5_moe_text",
    lambda file: delta_settings(file) | shared_experts(file),
    NAMES,
    WEIGHTS | IN_TURNS,
    rotary=three_positions,
)
