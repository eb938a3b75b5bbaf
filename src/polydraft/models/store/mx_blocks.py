"""Experts of four bits as folders of gpt-oss have them: MXFP4 (OCP Microscaling Formats, version 1.0), in two tensors for each stack.

NAME_blocks    [experts, outputs, inputs / 32, 16] bytes, each of two inputs that lie side by side
NAME_scales    [experts, outputs, inputs / 32] exponents

GGUF files have the same numbers in blocks of 17 bytes: the exponent, then inputs k and k + 16 in byte k.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from polydraft.models.matrices.formats import BLOCK

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
