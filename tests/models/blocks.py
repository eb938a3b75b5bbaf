"""Random blocks of every number format of GGUF files."""

import gguf
import numpy as np

from polydraft.models.matrices.formats import BLOCKS, pack_blocks, raw_blocks
from polydraft.models.matrices.products import MatrixFormat, Packed


def random_blocks(name, outputs, inputs, seed=0):
    """Blocks [O, K]: every bit pattern of codes and scales may occur; d, m and dmin are moderate numbers."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (outputs, inputs // size * num_bytes), np.uint8).view(raw_blocks(name))
    for field in (name for name in ("d", "m", "dmin") if name in raw.dtype.names):
        raw[field] = rng.normal(size=raw.shape).astype(np.float16).view(np.uint16)
    if "exponent" in raw.dtype.names:
        raw["exponent"] = rng.integers(121, 131, raw.shape)
    return raw


def dequantised(name, raw):
    """The weights [O, I], as the `gguf` package reads them."""
    return gguf.dequantize(raw.view(np.uint8).reshape(len(raw), -1), gguf.GGMLQuantizationType[name])


def packed_blocks(name, rounding, matrices):
    """Matrices of blocks in panels."""
    outputs, blocks = matrices[0].shape
    w = Packed.empty(
        [[(MatrixFormat(name, rounding), outputs)]] * len(matrices), blocks * BLOCKS[name].inputs
    )
    for k, raw in enumerate(matrices):
        pack_blocks(raw, w.panels_of(k))
    return w
