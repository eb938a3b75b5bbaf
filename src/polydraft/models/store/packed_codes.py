"""Weights of four bits in groups, as folders of GPTQ, AWQ and compressed-tensors have them, as blocks of GGUF files: eight codes lie in a word of 32 bits.

GPTQ                 qweight [inputs / 8, outputs]   scales [groups, outputs]   qzeros [groups, outputs / 8], each less 1 but in its second format
AWQ                  qweight [inputs, outputs / 8]   scales [groups, outputs]   qzeros [groups, outputs / 8]; outputs 0 2 4 6 1 3 5 7 of each word
compressed-tensors   weight_packed [outputs, inputs / 8]   weight_scale [outputs, groups]; codes are 8 above their number

A weight is scale (code - zero). Where all zeros are 8 that is a block of Q4_0, else one of Q4_1, whose minimum is -scale zero in float16.
Arxiv 2210.17323 and 2306.00978; formats of AutoGPTQ, AutoAWQ and compressed-tensors (pack-quantized).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from polydraft.models.matrices.formats import BLOCK
from polydraft.numerics.floats import as_float32

PER_WORD = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the outputs of a word lie in it."""
CODES = {"gptq": ".qweight", "awq": ".qweight", "compressed-tensors": ".weight_packed"}
BESIDE = {
    "gptq": (".scales", ".qzeros", ".g_idx"),
    "awq": (".scales", ".qzeros"),
    "compressed-tensors": (".weight_scale", ".weight_shape"),
}
"""How names of tensors end, by method: of codes, and of what belongs to them."""
MIDDLE = 8


class Packing(NamedTuple):
    """method: of `CODES`.  group: inputs that share a scale, or -1 for all.  zeros_less: what zeros are stored less by."""

    method: str
    group: int
    zeros_less: int = 0


class PackedWeight(NamedTuple):
    """A weight in codes. module: its name without an end.  shape: outputs, inputs.  symmetric: whether all zeros are 8."""

    module: str
    shape: tuple[int, int]
    packing: Packing
    symmetric: bool

    @property
    def kind(self) -> str:
        """Its format as blocks."""
        return "Q4_0" if self.symmetric else "Q4_1"

    @property
    def codes(self) -> str:
        """The tensor with its codes."""
        return self.module + CODES[self.packing.method]


def packing_of(quantization: Any) -> Packing | str | None:
    """What a quantization_config says; why it is not read; None where it is of another method.

    Example:
        >>> packing_of({"quant_method": "gptq", "bits": 4, "group_size": 128})
        Packing(method='gptq', group=128, zeros_less=1)
        >>> packing_of({"quant_method": "gptq", "bits": 3, "group_size": 128})
        'its gptq weights have 3 bits; 4 are read'
    """
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in CODES:
        return None
    said = quantization
    if method == "compressed-tensors":
        if quantization.get("format") != "pack-quantized":
            return None
        groups = list((quantization.get("config_groups") or {}).values())
        if len(groups) != 1:
            return f"its compressed-tensors have {len(groups)} groups of layers; one is read"
        said = groups[0].get("weights") or {}
        if not said.get("symmetric", True) or said.get("type", "int") != "int":
            return "its compressed-tensors have zero points, or codes that are no integers"
    bits = next((said[name] for name in ("bits", "w_bit", "num_bits") if name in said), 4)
    group = next((said[name] for name in ("group_size", "q_group_size") if said.get(name) is not None), -1)
    if bits != 4:
        return f"its {method} weights have {bits} bits; 4 are read"
    if group != -1 and (group <= 0 or group % BLOCK):
        return f"its {method} weights have groups of {group} inputs; multiples of {BLOCK} are read"
    if said.get("desc_act") or said.get("actorder") not in (None, False, "weight", "static"):
        return f"its {method} weights have inputs in another order (desc_act)"
    if method == "awq" and str(said.get("version", "gemm")).lower() != "gemm":
        return f"its awq version is {said['version']!r}; 'gemm' is read"
    less = 1 if method == "gptq" and said.get("checkpoint_format", "gptq") == "gptq" else 0
    return Packing(method, group, less)


def packed_weights(tensors: Mapping[str, Any], packing: Packing, symmetric: bool) -> dict[str, PackedWeight]:
    """Weights in codes by the names that they would have as numbers. tensors: with `shape`.  symmetric: whether all zeros are 8."""
    end = CODES[packing.method]
    weights = dict[str, PackedWeight]()
    for name, tensor in tensors.items():
        if not name.endswith(end):
            continue
        module = name.removesuffix(end)
        rows, columns = tensor.shape
        shape = {
            "gptq": (columns, PER_WORD * rows),
            "awq": (PER_WORD * columns, rows),
            "compressed-tensors": (rows, PER_WORD * columns),
        }[packing.method]
        weights[f"{module}.weight"] = PackedWeight(module, shape, packing, symmetric)
    return weights


def is_beside_codes(name: str, weights: Mapping[str, PackedWeight]) -> bool:
    """Whether a tensor belongs to codes."""
    if not weights:
        return False
    method = next(iter(weights.values())).packing.method
    ends = (CODES[method], *BESIDE[method])
    return any(name.endswith(end) and f"{name.removesuffix(end)}.weight" in weights for end in ends)


def spread(words: np.ndarray, order: tuple[int, ...] = tuple(range(PER_WORD))) -> UInt8[np.ndarray, "... n"]:
    """Codes of words along their last dimension. order: where the codes of a word lie in it.

    Example:
        >>> spread(np.array([[0x76543210]], np.int32)).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = 4 * np.array(order, np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts & 15
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def blocks_of(
    weight: PackedWeight, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
) -> UInt8[np.ndarray, "O bytes"]:
    """Blocks of Q4_0 or Q4_1. codes, scales, zeros: tensors as they are stored; zeros are None of compressed-tensors.

    Example:
        >>> weight = PackedWeight("a", (1, 32), Packing("compressed-tensors", 32), True)
        >>> blocks_of(weight, np.full((1, 4), -1, np.int32), np.ones((1, 1), np.float16), None)[0, :3].tolist()
        [0, 60, 255]
    """
    method = weight.packing.method
    numbers = as_float32(scales)
    if method == "gptq":
        by_output = spread(np.ascontiguousarray(codes.T))
    elif method == "awq":
        by_output = spread(codes, AWQ_ORDER).T
    else:
        by_output = spread(codes)
    if method != "compressed-tensors":
        numbers = numbers.T
    outputs, inputs = weight.shape
    factors = [numbers.astype(np.float16)]
    if not weight.symmetric:
        assert zeros is not None
        of_groups = zeros_of(weight.packing, zeros).T
        factors.append((-numbers * of_groups).astype(np.float16))
    repeats = inputs // BLOCK // numbers.shape[1]
    heads = [np.ascontiguousarray(f.repeat(repeats, 1))[..., None].view(np.uint8) for f in factors]
    halves = by_output.reshape(outputs, inputs // BLOCK, 2, BLOCK // 2)
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    return np.concatenate([*heads, nibbles], -1).reshape(outputs, -1)


def zeros_of(packing: Packing, zeros: np.ndarray) -> np.ndarray:
    """Zeros of groups, [groups, outputs]."""
    order = AWQ_ORDER if packing.method == "awq" else tuple(range(PER_WORD))
    return (spread(zeros, order).astype(np.int16) + packing.zeros_less) % 16
