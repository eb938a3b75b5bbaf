"""A model's matrices in two bits, as Q2_K of GGUF files has them: a weaker draft model of the same vocabulary.

Blocks of Q2_K take 256 inputs, and rows of small models are often no multiple of that: their hidden state, heads and inner dimensions are padded
with zeros first, which changes no logit.
"""

from dataclasses import replace
from functools import cache
from math import gcd, sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.models.compiled.formats import raw_blocks, rounded_blocks
from polydraft.models.loading.checkpoint import EMBEDDING, Checkpoint
from polydraft.models.rotary import head_width

__all__ = ["in_two_bits", "two_bit_blocks", "zero_padded"]

INPUTS, RUN = 256, 16
"""Of a block, and of those that share a scale and a least weight."""
STEPS = tuple(3 + 0.1 * k for k in range(-9, 10))
"""Steps between the least and the largest weight of a run that are tried; codes end at 3."""
ROWS = 2048
"""Outputs that are rounded at a time."""
DIMENSIONS = {
    "q_proj.weight": ("heads", "hidden"),
    "q_proj.bias": ("heads",),
    "k_proj.weight": ("", "hidden"),
    "v_proj.weight": ("", "hidden"),
    "o_proj.weight": ("hidden", "heads"),
    "gate_proj.weight": ("inner", "hidden"),
    "up_proj.weight": ("inner", "hidden"),
    "down_proj.weight": ("hidden", "inner"),
    "embed_tokens.weight": ("", "hidden"),
    "lm_head.weight": ("", "hidden"),
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "norm.weight": ("hidden",),
}
"""End of a weight's name -> which of its dimensions are padded, and as what."""


def _end(weight: str) -> str:
    return ".".join(weight.split(".")[-2:])


def zero_padded(files: Checkpoint, multiple: int = INPUTS) -> Checkpoint:
    """The same model, the inputs of whose matrices are a multiple of a number. Norms then divide by more dimensions, which their weights make good."""
    old, width, groups = files.config, head_width(files.config), files.config.num_key_value_heads
    unit = groups * (multiple // gcd(multiple, groups * width))
    config = replace(
        old,
        head_dim=width,
        hidden_size=_next(old.hidden_size, multiple),
        intermediate_size=_next(old.intermediate_size, multiple),
        num_attention_heads=_next(old.num_attention_heads, unit),
    )
    growth = config.hidden_size / old.hidden_size
    config = replace(config, rms_norm_eps=old.rms_norm_eps / growth)
    sizes = {
        "hidden": (1, config.hidden_size),
        "inner": (1, config.intermediate_size),
        "heads": (groups, config.num_attention_heads * config.head_dim),
    }

    def read(weight: str) -> Tensor:
        values = files.read(weight).float()
        for d, name in enumerate(DIMENSIONS.get(_end(weight), ())):
            if name:
                values = _padded(values, d, *sizes[name])
        return values / sqrt(growth) if DIMENSIONS.get(_end(weight)) == ("hidden",) else values

    def outline(weight: str, whole: Tensor) -> Tensor:
        names = DIMENSIONS.get(_end(weight), ("",) * whole.ndim)
        shape = [sizes[name][1] if name else size for name, size in zip(names, whole.shape, strict=True)]
        return torch.empty(shape, device="meta")

    outlines = {weight: outline(weight, whole) for weight, whole in files.outlines.items()}
    return replace(files, config=config, outlines=outlines, read=read, blocks=None, rows=None, forget=lambda weights, part: None)


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(values: Tensor, d: int, groups: int, size: int) -> Tensor:
    """Zeros behind each of some equal groups of a dimension."""
    by_group = values.movedim(d, 0).unflatten(0, (groups, -1))
    wide = by_group.new_zeros(groups, size // groups, *by_group.shape[2:])
    wide[:, : by_group.shape[1]] = by_group
    return wide.flatten(0, 1).movedim(0, d).contiguous()


def in_two_bits(files: Checkpoint) -> Checkpoint:
    """The model whose matrices are rounded to two bits, as if a file had them; to eight an embedding with which nothing is multiplied."""
    padded = zero_padded(files)

    @cache
    def blocks(weight: str) -> tuple[str, np.ndarray]:
        if padded.outlines[weight].ndim < 2:
            return "F32", np.zeros(0, np.uint8)
        name, whole = "Q8_0" if weight == EMBEDDING and not padded.tied else "Q2_K", padded.read(weight)
        parts = whole.split(ROWS)
        raw = np.concatenate([rounded_blocks(part, name) if name == "Q8_0" else two_bit_blocks(part) for part in parts])
        return name, raw.view(np.uint8).reshape(len(raw), -1)

    return replace(padded, blocks=blocks)


def two_bit_blocks(rows: Float[Tensor, "O I"]) -> np.ndarray:
    """Blocks [O, I / 256] of Q2_K, as `raw_blocks`: of a weight d scale code - dmin least, codes to 3, scales and least weights of 16 inputs to 15.

    Example:
        >>> two_bit_blocks(torch.linspace(-1, 1, 256)[None]).shape
        (1, 1)
    """
    w = rows.float().unflatten(1, (-1, INPUTS // RUN, RUN))
    scale, least = _steps(w)
    raw = np.zeros(w.shape[:2], raw_blocks("Q2_K"))
    d, scales = _small(scale)
    dmin, mins = _small(least)
    step = (d * scales)[..., None]
    codes = ((w + (dmin * mins)[..., None]) / torch.where(step == 0, 1.0, step)).round_().clamp_(0, 3).to(torch.uint8)
    quarters = codes.reshape(*w.shape[:2], 2, 4, 32)  # of each half of a block, the codes of 32 inputs in two bits of 32 bytes
    packed = (quarters << 2 * torch.arange(4, dtype=torch.uint8)[:, None]).sum(-2, dtype=torch.uint8)
    raw["codes"] = np.ascontiguousarray(packed.reshape(*w.shape[:2], 64).numpy()).view("<u4")
    raw["scales"] = (scales.to(torch.uint8) | mins.to(torch.uint8) << 4).numpy()
    raw["d"], raw["dmin"] = (half[..., 0].half().numpy().view(np.uint16) for half in (d, dmin))
    return raw


def _steps(w: Float[Tensor, "O K R W"]) -> tuple[Float[Tensor, "O K R"], Float[Tensor, "O K R"]]:
    """Of each run the step between codes, and the least weight's negative, which is at least 0: the best of several, by least squares of its codes."""
    low, high = w.amin(-1, keepdim=True).clamp(max=0.0), w.amax(-1, keepdim=True)
    spread = (high - low).clamp(min=1e-30)
    step, least = spread / 3, -low
    error = torch.full_like(low, torch.inf)
    mean = w.mean(-1, keepdim=True)
    for steps in STEPS:
        codes = ((w - low) * (steps / spread)).round_().clamp_(0, 3)
        middle = codes.mean(-1, keepdim=True)
        variance = (codes * codes).mean(-1, keepdim=True) - middle * middle
        slope = ((codes * w).mean(-1, keepdim=True) - middle * mean) / variance.clamp(min=1e-12)
        offset = middle * slope - mean
        through_zero = (codes * w).sum(-1, keepdim=True) / (codes * codes).sum(-1, keepdim=True).clamp(min=1e-12)
        slope, offset = torch.where(offset < 0, through_zero, slope).clamp(min=0.0), offset.clamp(min=0.0)
        loss = (slope * codes - offset - w).square_().sum(-1, keepdim=True)
        better = loss < error
        step, least, error = (
            torch.where(better, slope, step),
            torch.where(better, offset, least),
            torch.where(better, loss, error),
        )
    return step[..., 0], least[..., 0]


def _small(values: Float[Tensor, "O K R"]) -> tuple[Float[Tensor, "O K 1"], Float[Tensor, "O K R"]]:
    """A float16 number of each block and integers to 15, whose products are about the values."""
    unit = (values.amax(-1, keepdim=True) / 15).half().float()
    return unit, (values / torch.where(unit == 0, 1.0, unit)).round_().clamp_(0, 15)
