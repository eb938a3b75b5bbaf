"""Weights of one byte with scales beside them, float8 or int8, as folders of modelopt, compressed-tensors, DeepSeek and Qwen have them.

NAME               codes
NAME_scale_inv     what they are multiplied by, one for each block of 128 x 128 or as the configuration says
NAME_scale         likewise, one in all, for each row, or for each block
NAME_zero_point    what is taken from them before, where there is one
Scales of activations and of KV caches are for products of bytes; products here take numbers.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from polydraft.numerics.floats import FLOAT8, as_float32

CODES = {"F8_E4M3": FLOAT8["e4m3fn"], "F8_E5M2": FLOAT8["e5m2"], "I8": np.dtype(np.int8)}
"""Types of safetensors files that scales make numbers of."""
BYTES = {*CODES, "U8", "F8_E8M0", "F4"}
SCALES = ("_scale_inv", "_scale")
BLOCK = 128
ACTIVATIONS = tuple(
    f".{name}_{kind}" for name in ("input", "output", "k", "v", "q", "kv") for kind in ("scale", "zero_point")
)
"""How names of scales end that no weight has."""


class Scaling(NamedTuple):
    """Tensors that make numbers of codes, by name, and how many codes have one scale along each of the last dimensions."""

    scale: str
    zero_point: str | None
    sizes: tuple[int, ...]


class Described(NamedTuple):
    """A tensor of a safetensors file, by its header."""

    dtype: str
    shape: tuple[int, ...]


def scalings_of(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Scaling]:
    """By name, of the weights of one byte that have scales. tensors: with `dtype` and `shape`.  settings: of config.json.

    Example:
        >>> tensors = {"a.weight": Described("F8_E4M3", (256, 192)), "a.weight_scale_inv": Described("F32", (2, 2))}
        >>> scalings_of(tensors, {})["a.weight"].sizes
        (128, 128)
    """
    block = _block(settings)
    scalings = dict[str, Scaling]()
    for name, tensor in tensors.items():
        scale = next((name + end for end in SCALES if name + end in tensors), None)
        if tensor.dtype not in CODES or scale is None:
            continue
        sizes = _sizes(tensor.shape, tensors[scale].shape, block)
        zero_point = f"{name}_zero_point" if f"{name}_zero_point" in tensors else None
        fits = zero_point is None or tensors[zero_point].shape == tensors[scale].shape
        if sizes is not None and fits and tensors[scale].dtype in ("BF16", "F16", "F32"):
            scalings[name] = Scaling(scale, zero_point, sizes)
    return scalings


def _block(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """What a configuration says of the shape of blocks."""
    quantization = settings.get("quantization_config")
    given = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    return tuple(given) if isinstance(given, list) and len(given) == 2 else (BLOCK, BLOCK)


def _sizes(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Codes with one scale, along each dimension; None where the shapes do not fit."""
    counts = (*scale_shape, *[1] * (len(shape) - len(scale_shape)))
    blocks = (1,) * (len(shape) - 2) + block[-len(shape) :]
    sizes = list[int]()
    for size, count, of_block in zip(shape, counts, blocks, strict=False):
        if count and count == -(-size // of_block):
            sizes.append(of_block)
        elif count and size % count == 0:
            sizes.append(size // count)
    return tuple(sizes) if len(sizes) == len(counts) == len(shape) else None


def numbers_of(
    codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, sizes: tuple[int, ...]
) -> Float32[np.ndarray, "*shape"]:
    """A weight, in float32. sizes: as of `Scaling`, of the dimensions that `codes` has.

    Example:
        >>> numbers_of(np.array([[1, 2, 3]], np.int8), np.array([[0.5, 2.0]]), None, (1, 2)).tolist()
        [[0.5, 1.0, 6.0]]
    """

    def spread(of_blocks: np.ndarray) -> np.ndarray:
        numbers = as_float32(of_blocks).reshape(*of_blocks.shape, *[1] * (codes.ndim - of_blocks.ndim))
        for dimension, size in enumerate(sizes):
            if numbers.shape[dimension] > 1:
                count = codes.shape[dimension]
                numbers = numbers.repeat(size, dimension).take(range(count), dimension)
        return numbers

    numbers = codes.astype(np.float32)
    if zero_point is not None:
        numbers -= spread(zero_point)
    numbers *= spread(scale)
    return numbers


def is_beside(name: str, scalings: Mapping[str, Scaling]) -> bool:
    """Whether a tensor says something of codes, and is no weight itself."""
    weight = name
    for end in (*SCALES, "_zero_point", "_shape"):
        weight = weight.removesuffix(end)
    return bool(scalings) and name not in scalings and (weight in scalings or name.endswith(ACTIVATIONS))


def unexplained(tensors: Mapping[str, Any], scalings: Iterable[str]) -> str | None:
    """The first weight of one byte that nothing makes numbers of, or None."""
    names = (
        name
        for name, tensor in tensors.items()
        if tensor.dtype in BYTES and name.endswith(("weight", "_proj"))
    )
    return min({*names} - {*scalings}, default=None)
