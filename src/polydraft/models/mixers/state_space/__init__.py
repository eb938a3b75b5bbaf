"""State spaces of Mamba-2: their weights, and their block; the formulas are in `code`."""

from typing import Any

import numpy as np

from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.layer import STATE_SPACE, Block, LayerWeights, Shapes, Weights, biased_product
from polydraft.models.mixers.program import Items, Part, Work
from polydraft.models.mixers.recurrent import BLOCK
from polydraft.models.mixers.state_space.code import (
    GatedNorm,
    KeepRows,
    Mix,
    Overlap,
    Scan,
    StateSpaceMemory,
    StateSpaceSizes,
    gated_norm_code,
    keep_rows_code,
    mix_code,
    overlap_code,
    scan_code,
    scan_scratch,
)
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace
from polydraft.models.windows import setting


def state_space_sizes(config: Any) -> StateSpaceSizes:
    """Of Granite's or Falcon's configuration."""
    return StateSpaceSizes(
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
    )


def state_space_shapes(config: Any) -> Shapes:
    """Likewise; the last product has a bias of its own setting in Falcon, which may lack the norm."""
    h = config.hidden_size
    s = state_space_sizes(config)
    entering = s.inner + s.channels + s.heads
    optional = {
        "mamba.conv1d.bias": (config.mamba_conv_bias, (s.channels,)),
        "mamba.in_proj.bias": (config.mamba_proj_bias, (entering,)),
        "mamba.out_proj.bias": (setting(config, "projectors_bias", config.mamba_proj_bias), (h,)),
        "mamba.norm.weight": (setting(config, "mamba_rms_norm", True), (s.inner,)),
    }
    shapes: Shapes = {name: shape for name, (present, shape) in optional.items() if present}
    return shapes | {
        "mamba.in_proj.weight": (entering, h),
        "mamba.out_proj.weight": (h, s.inner),
        "mamba.conv1d.weight": (s.channels, 1, s.kernel),
        "mamba.A_log": (s.heads,),
        "mamba.D": (s.heads,),
        "mamba.dt_bias": (s.heads,),
    }


STATE_SPACE_WEIGHTS = LayerWeights(
    STATE_SPACE,
    matrices={"ssm_in": ("mamba.in_proj",), "ssm_out": ("mamba.out_proj",)},
    vectors={
        "ssm_taps": "mamba.conv1d.weight",
        "ssm_taps_bias": "mamba.conv1d.bias",
        "ssm_rates": "mamba.A_log",
        "ssm_rate_bias": "mamba.dt_bias",
        "ssm_skips": "mamba.D",
        "ssm_norm": "mamba.norm.weight",
        "ssm_in_bias": "mamba.in_proj.bias",
        "ssm_out_bias": "mamba.out_proj.bias",
    },
    names={
        "mamba.in_proj": "ssm_in",
        "mamba.out_proj": "ssm_out",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.norm": "ssm_norm",
        "mamba.A_log": "ssm_a",
        "mamba.D": "ssm_d",
        "mamba.dt_bias": "ssm_dt.bias",
    },
    values={"mamba.A_log": lambda rates: np.log(-rates.astype(np.float64)).astype(np.float32)},
    shapes=state_space_shapes,
)


def state_space_block(
    weights: Weights, sizes: Sizes, memory: StateSpaceMemory, work: Workspace, step: np.ndarray
) -> Block:
    """All rows behind the convolution, then each head of all rows."""
    of = weights.others
    s = memory.sizes
    into = of["ssm_in"]
    out = of["ssm_out"]
    taps = np.ascontiguousarray(of["ssm_taps"][:, :, 0].swapaxes(1, 2))
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, s.channels)
    y = aligned(CHUNK, s.inner)
    overlaps = aligned(CHUNK, s.groups, BLOCK)
    rows = (step, work.rows, work.seen_columns)
    scan = Scan(*rows, memory, of["ssm_skips"], mixed, overlaps, y, scan_scratch(s, CHUNK, len(work.queries)))
    mix = Mix(
        *rows, x, memory, taps, of["ssm_taps_bias"], -np.exp(of["ssm_rates"]), of["ssm_rate_bias"], mixed
    )
    norm = GatedNorm(step, x, y, of["ssm_norm"], s.groups, sizes.epsilon, out.rounding, work.rounded)
    parts = (
        *biased_product(step, work.normed, into, x, work, of["ssm_in_bias"]),
        Part(keep_rows_code, KeepRows(step, work.rows, x, memory)),
        Part(mix_code, mix, Work(grain=1)),
        Part(overlap_code, Overlap(*rows, memory, mixed, overlaps), Work(grain=1)),
        Part(scan_code, scan, Work(Items.FIXED, s.heads, grain=1)),
        Part(gated_norm_code, norm),
        *biased_product(step, y, out, work.update, work, of["ssm_out_bias"]),
    )
    return Block(into.rounding, parts)
