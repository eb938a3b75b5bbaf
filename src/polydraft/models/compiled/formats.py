"""How matrices lie in memory: numbers or blocks of integers in panels of outputs, so that a pass reads them once, front to back.

format      an array [panels, ...] of                                                weight
float32     [inputs, PANEL]                                                          as it is
bfloat16    [inputs / 2, PANEL, 2] as uint16: two inputs of an output side by side   as it is
Q8_0        [blocks] of LANES outputs and BLOCK inputs                               scale (code - 128)
Q4_0        the same, two codes a byte                                               scale (code - 8)
Q4_1        the same                                                                 scale code + least

The blocks are those of GGUF files, code for code; scales and least weights are float16. What lies behind the last input or
output is zero. `ROUNDED` is a block of activations as products of integers take them: see `rounding`.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.models.compiled.vectors import LANES, PANEL, aligned

__all__ = [
    "BLOCK",
    "BLOCKS",
    "ROUNDED",
    "pack",
    "pack_blocks",
    "panels_for",
    "raw_blocks",
    "rounded_blocks",
    "unpack",
]

BLOCK = 32
"""Inputs that share a scale."""
TOGETHER = 64
"""Panels that are packed at a time: what is rounded on the way then stays in the caches."""


def _block(bits: int, *numbers: str) -> np.dtype:
    """A group of codes is a vector of LANES outputs, four inputs each; with four bits its high halves are inputs 16 later."""
    return np.dtype([*((name, np.uint16, (LANES,)) for name in numbers), ("codes", np.uint8, (bits, LANES, 4))])


BLOCKS = {"Q8_0": _block(8, "scale"), "Q4_0": _block(4, "scale"), "Q4_1": _block(4, "scale", "least")}
"""Formats of blocks by name."""
ROUNDED = np.dtype(
    [("scale", np.float32), ("sum", np.float32), ("minus_8", np.int32), ("minus_128", np.int32), ("codes", np.int8, (BLOCK,))]
)
"""BLOCK activations, scale code each; sum: of them.  minus_8, minus_128: so many times the sum of the codes."""


def panels_for(outputs: int, inputs: int, dtype: np.dtype | type[np.generic], *layers: int) -> np.ndarray:
    """Room for matrices of this shape.

    Example:
        >>> panels_for(PANEL + 1, 64, np.uint16).shape == (2, 32, PANEL, 2), panels_for(LANES, 64, BLOCKS["Q4_0"]).shape
        (True, (1, 2))
    """
    dtype = np.dtype(dtype)
    if dtype.names:
        shape = -(-outputs // LANES), -(-inputs // BLOCK)
    else:
        shape = -(-outputs // PANEL), *((inputs // 2, PANEL, 2) if dtype == np.uint16 else (inputs, PANEL))
    return aligned(*layers, *shape, dtype=dtype, huge=True)


def pack(weight: Float[Tensor, "O I"], out: np.ndarray) -> tuple[float, float]:
    """Write a weight matrix into its panels, rounded to their format; returns sum |W - W'|^2 and sum |W|^2, W' what was written,
    or zeros where the format is the weight's own.

    Example:
        >>> out = panels_for(2, 2, np.uint16)
        >>> pack(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out), unpack(out, 2, 2).tolist()
        ((0.0, 30.0), [[1.0, 2.0], [3.0, 4.0]])
    """
    each, lost, total = LANES if out.dtype.names else PANEL, 0.0, 0.0
    for begin in range(0, len(out), TOGETHER):
        rows, some = weight.detach()[begin * each : (begin + TOGETHER) * each], out[begin : begin + TOGETHER]
        if out.dtype.names:
            pack_blocks(rounded_blocks(rows, _name(out.dtype)), some)
        elif out.dtype == np.uint16:
            _place((rows if rows.dtype == torch.bfloat16 else rows.float().bfloat16()).view(torch.int16), some.view(np.int16), 2)
        else:
            _place(rows.float(), some, 1)
        if out.dtype != (np.uint16 if weight.dtype == torch.bfloat16 else np.float32):
            lost += float((rows.float() - unpack(some, *rows.shape)).square_().sum())
            total += float(rows.float().square().sum())
    return lost, total


def _place(values: Tensor, out: np.ndarray, together: int) -> None:
    """One strided copy of rows [O, I] into panels [P, I / together, PANEL, together], zeros behind the last row."""
    inputs = values.shape[1]
    packed, full = torch.from_numpy(out).view(-1, inputs // together, PANEL, together), len(values) // PANEL * PANEL
    if full < len(values):
        values = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % PANEL))
    packed.copy_(values.view(-1, PANEL, inputs // together, together).transpose(1, 2))


def raw_blocks(format_name: str) -> np.dtype:
    """One block of one output as GGUF files have it; there the codes of eight bits are signed.

    Example:
        >>> raw_blocks("Q4_1").itemsize
        20
    """
    *numbers, codes = BLOCKS[format_name].fields or {}
    bits = BLOCKS[format_name][codes].shape[0]
    return np.dtype([*((name, np.uint16) for name in numbers), (codes, np.uint8, (BLOCK * bits // 8,))])


def pack_blocks(raw: np.ndarray, out: np.ndarray) -> None:
    """Write blocks [O, K] of single outputs, see `raw_blocks`, into panels [P, K]; what lies behind the last output is zero."""
    missing = -len(raw) % LANES
    for name in raw.dtype.names or ():
        values = np.concatenate([raw[name], np.zeros((missing, *raw[name].shape[1:]), raw[name].dtype)])
        if name != "codes":
            out[name] = values.reshape(len(out), LANES, -1).swapaxes(1, 2)
        else:
            flipped = values ^ np.uint8(128) if _bits(out.dtype) == 8 else values
            out[name] = flipped.reshape(len(out), LANES, out.shape[1], -1, 4).transpose(0, 2, 3, 1, 4)


def _name(dtype: np.dtype) -> str:
    return next(name for name, known in BLOCKS.items() if known == dtype)


def _bits(dtype: np.dtype) -> int:
    return dtype["codes"].shape[0]


def unpack(panels: np.ndarray, outputs: int, inputs: int) -> Float[Tensor, "O I"]:
    """The matrix that lies in panels, in float32.

    Example:
        >>> blocks = panels_for(1, 32, BLOCKS["Q4_0"])
        >>> _ = pack(torch.tensor([[-8.0, 3.2, *[0.0] * 30]]), blocks)
        >>> unpack(blocks, 1, 3).tolist()
        [[-8.0, 3.0, 0.0]]
    """
    if panels.dtype.names is None:
        together = panels.shape[-1] if panels.dtype == np.uint16 else 1
        bits = panels.astype(np.uint32) << 16 if together > 1 else panels
        numbers = bits.view(np.float32).reshape(len(panels), -1, PANEL, together).transpose(0, 2, 1, 3)
    else:
        code = panels["codes"].transpose(0, 3, 1, 2, 4).reshape(len(panels) * LANES, panels.shape[1], -1)
        if _bits(panels.dtype) == 4:
            code = np.concatenate([code & 15, code >> 4], -1)
        scale, *least = (
            panels[name].view(np.float16).astype(np.float32).swapaxes(1, 2).reshape(*code.shape[:2], 1)
            for name in panels.dtype.names[:-1]
        )
        numbers = code * scale + least[0] if least else (code - np.float32(1 << (_bits(panels.dtype) - 1))) * scale
    return torch.from_numpy(np.ascontiguousarray(numbers.reshape(-1, numbers.size // _rows(panels))[:outputs, :inputs]))


def _rows(panels: np.ndarray) -> int:
    return len(panels) * (LANES if panels.dtype.names else PANEL)


def rounded_blocks(rows: Float[Tensor, "O I"], format_name: str) -> np.ndarray:
    """Blocks [O, K] of a matrix, as `raw_blocks`: the scale lets the largest weight of a block be 127, or -8, times it;
    in Q4_1 the least weight has code 0 and the largest 15.
    """
    w = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    raw, least = np.zeros(w.shape[:2], raw_blocks(format_name)), torch.zeros(())
    if format_name == "Q8_0":
        scale, middle, last = w.abs().amax(-1, keepdim=True) / 127, 0, 127
    elif format_name == "Q4_0":
        scale, middle, last = w.gather(-1, w.abs().argmax(-1, keepdim=True)) / -8, 8, 15
    else:
        least, middle, last = w.amin(-1, keepdim=True).half(), 0, 15
        scale = (w.amax(-1, keepdim=True) - least) / 15
        raw["least"] = least[..., 0].numpy().view(np.uint16)
    scale = scale.half()
    raw["scale"] = scale[..., 0].numpy().view(np.uint16)
    codes = ((w - least) / torch.where(scale == 0, 1.0, scale.float())).round().add_(middle)
    codes = codes.clamp_(-127 if last == 127 else 0, last).to(torch.int8).numpy().view(np.uint8)
    raw["codes"] = codes if last == 127 else codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return raw
