"""Gated delta nets: their weights, and their block; the formulas are in `code`."""

from typing import Any

import numpy as np

from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.delta_net.code import (
    DeltaMemory,
    DeltaNet,
    DeltaSizes,
    DeltaWeights,
    delta_code,
    delta_scratch,
)
from polydraft.models.mixers.dense import Rounding, rounding_code
from polydraft.models.mixers.layer import DELTA_NET, Block, LayerWeights, Shapes, Weights, product
from polydraft.models.mixers.program import Items, Part, Work
from polydraft.models.mixers.recurrent import PENDING
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace
from polydraft.models.windows import setting


def delta_sizes(config: Any) -> DeltaSizes:
    """Of a configuration of Qwen3.5 or Qwen3-Next."""
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        setting(config, "tiled_value_heads", False),
        config.rms_norm_eps,
    )


def delta_shapes(config: Any) -> Shapes:
    """Likewise, as Qwen3.5 has them."""
    h = config.hidden_size
    heads = config.linear_num_value_heads
    width = config.linear_value_head_dim
    values = heads * width
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, h),
        "linear_attn.in_proj_z.weight": (values, h),
        "linear_attn.in_proj_b.weight": (heads, h),
        "linear_attn.in_proj_a.weight": (heads, h),
        "linear_attn.conv1d.weight": (channels, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (width,),
        "linear_attn.out_proj.weight": (h, values),
    }


DELTA_NET_WEIGHTS = LayerWeights(
    DELTA_NET,
    matrices={
        "delta_in": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
        "delta_out": ("linear_attn.out_proj",),
    },
    vectors={
        "delta_taps": "linear_attn.conv1d.weight",
        "delta_rate": "linear_attn.A_log",
        "delta_rate_bias": "linear_attn.dt_bias",
        "delta_norm": "linear_attn.norm.weight",
    },
    names={
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
    values={"linear_attn.A_log": lambda rates: np.log(-rates.astype(np.float64)).astype(np.float32)},
    shapes=delta_shapes,
)


def delta_net_block(
    weights: Weights, sizes: Sizes, memory: DeltaMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Each key head of a slot's rows with its value heads."""
    of = weights.others
    d = memory.sizes
    into = of["delta_in"]
    out = of["delta_out"]
    values = d.value_heads * d.value_width
    taps = np.ascontiguousarray(of["delta_taps"][:, :, 0].swapaxes(1, 2))
    numbers = DeltaWeights(taps, -np.exp(of["delta_rate"]), of["delta_rate_bias"], of["delta_norm"])
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, values)
    scratch = delta_scratch(d, CHUNK, PENDING, len(work.queries))
    net = DeltaNet(step, work.rows, work.runs, work.seen_columns, numbers, memory, x, mixed, scratch)
    parts = (
        product(step, work.normed, into, x, work),
        Part(delta_code, net, Work(Items.RUNS, d.key_heads, grain=1)),
        Part(rounding_code, Rounding(step, mixed, values, out.rounding, work.rounded)),
        product(step, mixed, out, work.update, work),
    )
    return Block(into.rounding, parts)
