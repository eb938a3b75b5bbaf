"""Formats of GGUF files whose codes are rows of a codebook, or ternary numbers, or have scales in float8: as float32, and where that loses nothing as
blocks that products read.

format                      numbers of a block of 256 (NVFP4: 64)                              products read it as
TQ1_0, TQ2_0                d (code - 1)                                                       Q2_K
IQ3_S                       d (2 scale + 1) sign book                                          Q6_K
IQ3_XXS                     d (2 scale + 1) / 4 sign book                                      Q6_K, where d / 2 is a float16
IQ1_S, IQ1_M                d (2 scale + 1) (book +- 1/8)                                      Q6_K, where d / 8 is a float16
IQ2_XXS, IQ2_XS, IQ2_S      d (2 scale + 1) / 8 sign book                                      float32
NVFP4                       scale / 2 table[code]                                              bfloat16

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; the codebooks in `codebooks.npz` are those of that file (MIT licence).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

INPUTS = 256
"""Of a block, but for NVFP4."""
RUN = 16
"""Inputs with a scale in Q2_K and Q6_K."""
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the numbers of four bits."""


class Grid(NamedTuple):
    """Blocks taken apart. scale: [K, runs] whole numbers.  book: [K, 256] in units that make it whole."""

    scale: np.ndarray
    book: np.ndarray


@cache
def codebook(name: str) -> np.ndarray:
    """Rows of whole numbers. name: of a format."""
    with np.load(Path(__file__).with_name("codebooks.npz")) as books:
        return books[name].astype(np.int16)


def _half(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)[:, 0]


def _words(raw: np.ndarray, kind: str) -> np.ndarray:
    return np.ascontiguousarray(raw).view(kind)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[K, n] bytes -> [K, 2 n], the low half of each first."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)


def _signs(bits: np.ndarray) -> np.ndarray:
    """[K, n] bytes -> [K, 8 n] of 1 and -1."""
    spread = np.unpackbits(bits.astype(np.uint8), axis=-1, bitorder="little").reshape(len(bits), -1)
    return 1 - 2 * spread.astype(np.int16)


def _even_signs(seven_bits: np.ndarray) -> np.ndarray:
    """The same of seven bits, whose eighth makes the number of minus signs even."""
    parity = seven_bits.copy()
    for shift in (4, 2, 1):
        parity ^= parity >> shift
    return _signs(seven_bits | (parity & 1) << 7)


def _looked_up(name: str, rows: np.ndarray) -> np.ndarray:
    return codebook(name)[rows].reshape(len(rows), -1)


def _sevens(words: np.ndarray) -> np.ndarray:
    """Four groups of seven bits of each word: [K, n] -> [K, 4 n]."""
    return (words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(len(words), -1)


def _iq2_xxs(raw: np.ndarray) -> Grid:
    words = _words(raw[:, 2:], "<u4").reshape(len(raw), 8, 2)
    rows = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(len(raw), -1)
    book = _looked_up("IQ2_XXS", rows) * _even_signs(_sevens(words[..., 1]))
    return Grid(2 * (words[..., 1] >> 28) + 1, book)


def _iq2_xs(raw: np.ndarray) -> Grid:
    codes = _words(raw[:, 2:66], "<u2")
    book = _looked_up("IQ2_XS", codes & 511) * _even_signs(codes >> 9)
    return Grid(2 * _nibbles(raw[:, 66:]).astype(np.int32) + 1, book)


def _iq2_s(raw: np.ndarray) -> Grid:
    high = (raw[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(raw), -1)
    rows = raw[:, 2:34] | high.astype(np.uint16) << 8
    book = _looked_up("IQ2_S", rows) * _signs(raw[:, 34:66])
    return Grid(2 * _nibbles(raw[:, 74:]).astype(np.int32) + 1, book)


def _iq3_xxs(raw: np.ndarray) -> Grid:
    words = _words(raw[:, 66:], "<u4")
    book = _looked_up("IQ3_XXS", raw[:, 2:66]) // 2 * _even_signs(_sevens(words))
    return Grid(2 * (words >> 28) + 1, book)


def _iq3_s(raw: np.ndarray) -> Grid:
    high = np.unpackbits(raw[:, 66:74], axis=-1, bitorder="little").astype(np.uint16)
    book = _looked_up("IQ3_S", raw[:, 2:66] | high << 8) * _signs(raw[:, 74:106])
    return Grid(2 * _nibbles(raw[:, 106:]).astype(np.int32) + 1, book)


def _iq1_s(raw: np.ndarray) -> Grid:
    high = _words(raw[:, 34:], "<u2")
    rows = (
        raw[:, 2:34] | (high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(raw), -1) << 8
    )
    delta = 1 - 2 * (high >> 15).astype(np.int16)
    book = 8 * _looked_up("IQ1_S", rows) + delta.repeat(32, -1)
    return Grid(2 * (high >> 12 & 7).astype(np.int32) + 1, book)


def _iq1_m(raw: np.ndarray) -> Grid:
    scales = _words(raw[:, 48:], "<u2")
    high = _nibbles(raw[:, 32:48])
    rows = raw[:, :32] | (high & 7).astype(np.uint16) << 8
    delta = 1 - 2 * (high >> 3).astype(np.int16)
    book = 8 * _looked_up("IQ1_S", rows) + delta.repeat(8, -1)
    scale = (scales[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(raw), -1)
    return Grid(2 * scale.astype(np.int32) + 1, book)


def _thirds(raw: np.ndarray, count: int) -> np.ndarray:
    """`count` digits of base 3 of each byte, the first ones of all bytes first: [K, n] -> [K, count n]."""
    powers = np.array([3**k for k in range(count)], np.uint8)[:, None]
    digits = (raw[:, None] * powers).astype(np.uint16) * 3 >> 8
    return digits.reshape(len(raw), -1)


def _tq1_0(raw: np.ndarray) -> Grid:
    parts = _thirds(raw[:, :32], 5), _thirds(raw[:, 32:48], 5), _thirds(raw[:, 48:52], 4)
    return _ternary(np.concatenate(parts, -1))


def _tq2_0(raw: np.ndarray) -> Grid:
    halves = raw[:, :64].reshape(len(raw), 2, 1, 32)
    digits = halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return _ternary(digits.reshape(len(raw), -1))


def _ternary(digits: np.ndarray) -> Grid:
    return Grid(np.ones((len(digits), 1), np.int32), digits.astype(np.int16) - 1)


def _first(raw: np.ndarray) -> np.ndarray:
    return _half(raw[:, :2])


def _last(raw: np.ndarray) -> np.ndarray:
    return _half(raw[:, -2:])


def _scattered(raw: np.ndarray) -> np.ndarray:
    """Four bits of each of the last four words."""
    parts = (_words(raw[:, 48:], "<u2") & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    return np.bitwise_or.reduce(parts, -1).view(np.float16).astype(np.float32)


class Codebook(NamedTuple):
    """Numbers are d scale / below times book.

    num_bytes: of a block.  grid, d: take blocks apart.  blocks: the format of the same numbers that products read, or None.
    """

    num_bytes: int
    grid: Callable[[np.ndarray], Grid]
    d: Callable[[np.ndarray], np.ndarray] = _first
    below: int = 1
    blocks: str | None = None


CODEBOOKS = {
    "IQ2_XXS": Codebook(66, _iq2_xxs, below=8),
    "IQ2_XS": Codebook(74, _iq2_xs, below=8),
    "IQ2_S": Codebook(82, _iq2_s, below=8),
    "IQ3_XXS": Codebook(98, _iq3_xxs, below=2, blocks="Q6_K"),
    "IQ3_S": Codebook(110, _iq3_s, blocks="Q6_K"),
    "IQ1_S": Codebook(50, _iq1_s, below=8, blocks="Q6_K"),
    "IQ1_M": Codebook(56, _iq1_m, _scattered, below=8, blocks="Q6_K"),
    "TQ1_0": Codebook(54, _tq1_0, _last, blocks="Q2_K"),
    "TQ2_0": Codebook(66, _tq2_0, _last, blocks="Q2_K"),
}
NVFP4 = "NVFP4"
NVFP4_BYTES = 36
"""Of 64 inputs: four scales, and four times 16 numbers."""


def decoded(name: str, blocks: UInt8[np.ndarray, "O bytes"]) -> Float32[np.ndarray, "O I"]:
    """A matrix, or a part of it, in float32.

    Example:
        >>> ones = np.array([[0b10101010] * 64 + [0, 60]], np.uint8)
        >>> decoded("TQ2_0", ones)[0, :3].tolist()
        [1.0, 1.0, 1.0]
    """
    if name == NVFP4:
        return _nvfp4(blocks)
    book = CODEBOOKS[name]
    raw = blocks.reshape(-1, book.num_bytes)
    grid = book.grid(raw)
    scale = book.d(raw)[:, None] * (grid.scale.astype(np.float32) / np.float32(book.below))
    numbers = grid.book.astype(np.float32).reshape(*scale.shape, -1)
    return (scale[..., None] * numbers).reshape(len(blocks), -1)


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    raw = blocks.reshape(-1, NVFP4_BYTES)
    code = raw[:, :4].astype(np.int32)
    mantissa = (code & 7).astype(np.float32)
    exponent = code >> 3 & 15
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    scale = np.where(code == 0x7F, np.float32(0), scale) / 2
    low_high = raw[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([low_high & 15, low_high >> 4], -1)
    return (scale[..., None].astype(np.float32) * E2M1[codes]).reshape(len(blocks), -1)


def regrouped_kind(name: str, blocks: UInt8[np.ndarray, "O bytes"]) -> str | None:
    """The format of blocks with the same numbers, or None. blocks: all of a matrix."""
    book = CODEBOOKS.get(name)
    if book is None or book.blocks is None:
        return None
    below = _below(book, blocks.reshape(-1, book.num_bytes))
    return book.blocks if np.array_equal(below.astype(np.float16), below) else None


def _below(book: Codebook, raw: np.ndarray) -> np.ndarray:
    """d / below of blocks."""
    return book.d(raw) / np.float32(book.below)


def regrouped(name: str, blocks: UInt8[np.ndarray, "O bytes"]) -> UInt8[np.ndarray, "O bytes2"]:
    """The same numbers in blocks of `regrouped_kind`.

    Example:
        >>> ones = np.array([[0b10101010] * 64 + [0, 60]], np.uint8)
        >>> regrouped("TQ2_0", ones).shape
        (1, 84)
    """
    book = CODEBOOKS[name]
    raw = blocks.reshape(-1, book.num_bytes)
    layout = _q2_k if book.blocks == "Q2_K" else _q6_k
    d = _below(book, raw).astype(np.float16)[:, None].view(np.uint8)
    return layout(book.grid(raw), d).reshape(len(blocks), -1)


def _q2_k(grid: Grid, d: np.ndarray) -> np.ndarray:
    """Ternary numbers as d code - d, scale and minimum 1 each."""
    codes = (grid.book + 1).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = np.bitwise_or.reduce(codes << np.array([0, 2, 4, 6], np.uint8)[:, None], 2)
    scales = np.full((len(d), INPUTS // RUN), 0x11, np.uint8)
    return np.concatenate([scales, packed.reshape(len(d), -1), d, d], -1)


def _q6_k(grid: Grid, d: np.ndarray) -> np.ndarray:
    """Scales of 16 inputs, and codes of six bits above -32."""
    codes = (grid.book + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(codes >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], 2)
    scales = grid.scale.astype(np.int8).repeat(INPUTS // RUN // grid.scale.shape[1], -1).view(np.uint8)
    return np.concatenate([low.reshape(len(d), -1), high.reshape(len(d), -1), scales, d], -1)
