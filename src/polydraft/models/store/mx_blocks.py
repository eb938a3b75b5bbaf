"""Experts of four bits as folders of gpt-oss have them: MXFP4 (OCP Microscaling Formats, version 1.0), in two tensors for each stack.

NAME_blocks    [experts, outputs, inputs / 32, 16] bytes, each of two inputs that lie side by side
NAME_scales    [experts, outputs, inputs / 32] exponents

GGUF files have the same numbers in blocks of 17 bytes: the exponent, then inputs k and k + 16 in byte k.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from polydraft.models.matrices.formats import BLOCK
from polydraft.models.store.places import Stored

BLOCKS = "_blocks"
SCALES = "_scales"
FORMAT = "MXFP4"


def is_mx(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json says so."""
    quantization = settings.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def regrouped(
    codes: UInt8[np.ndarray, "O K 16"], exponents: UInt8[np.ndarray, "O K"]
) -> UInt8[np.ndarray, "O bytes"]:
    """Blocks of a matrix as GGUF files have them.

    Example:
        >>> codes = np.arange(16, dtype=np.uint8)[None, None] * 17  # inputs 2k and 2k + 1 have code k
        >>> regrouped(codes, np.array([[127]], np.uint8))[0, :4].tolist() == [127, 8 << 4, 8 << 4, 9 << 4 | 1]
        True
    """
    inputs = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], BLOCK)
    halves = inputs[..., : BLOCK // 2] | inputs[..., BLOCK // 2 :] << 4
    return np.concatenate([exponents[..., None], halves], -1).reshape(len(codes), -1)


class MxWeights:
    """Weights of experts whose stacks are in blocks. places: by name, as of the stack that it would be in numbers.  read: a matrix of a tensor."""

    def __init__(self, places: Mapping[str, Stored], read: Callable[[str, int], Tensor]) -> None:
        self.places = places
        self._read = read

    def outline(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor without values as the weight would be. shape: of the stack's blocks."""
        _, outputs, blocks, _ = shape
        return self.places[name].part(torch.empty(blocks * BLOCK, outputs, device="meta"))

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """Its number format, and its bytes as a GGUF file would have them."""
        place = self.places[name]
        codes, exponents = (self._read(place.name + kind, place.index or 0) for kind in (BLOCKS, SCALES))
        rows = place.part(torch.arange(len(codes))[None])[
            :, 0
        ]  # which of the stack's outputs are the weight's
        return FORMAT, regrouped(codes[rows].numpy(), exponents[rows].numpy())

    def read(self, name: str) -> Tensor:
        """In float32."""
        from polydraft.models.matrices.dequantising import decoded

        return torch.from_numpy(decoded(*self.blocks(name)))
