"""Blocks of a GGUF file as float32, the very numbers of the `gguf` package, and rounded once more to blocks of four bits; compiled, for any thread.

A weight is scale (code - middle) + minimum, or scale table[code], where a run of weights shares its scale: numpy prepares both for all runs, and
compiled code takes the codes apart, four in a word, see `formats.Plane`.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from polydraft.models.matrices.formats import (
    BLOCK,
    BLOCKS,
    FIFTH_BITS,
    SAMPLED,
    TOGETHER,
    block_scales,
    raw_blocks,
    small_integers,
)
from polydraft.models.matrices.vectors import LANES
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import ROUNDING
from polydraft.numerics.processor import usable_cores

RECODED = "Q4_0"
"""The format that blocks are rounded to."""

ROWS = 256
"""Rows that a thread decodes at a time."""
LOSSES = np.dtype([(name, np.float64) for name in ("lost", "whole", "num_outputs")])
"""Squares of what rounding lost, and of all, of so many outputs that were looked at."""


class _Codes(NamedTuple):
    """Where the codes of a block lie: for each four inputs the byte and the shift of both planes.

    masks: of a word of each plane.  bits: of the low plane.  flip: what turns signed bytes into unsigned ones.  fifth: where four bytes of high
    bits begin, or -1.  table: what codes stand for, or nothing.
    """

    places: np.ndarray
    masks: np.ndarray
    bits: int
    flip: int
    fifth: int
    middle: float
    table: np.ndarray


@cache
def _codes_of(name: str) -> _Codes:
    block = BLOCKS[name]
    fields = raw_blocks(name).fields or {}
    planes = (block.codes, block.low), ("high", block.high)
    places = np.zeros((block.inputs // 4, 4), np.int64)
    for group in range(len(places)):
        period, of_period = divmod(group // 8, block.period)
        for k, (field, plane) in enumerate(planes):
            if plane is not None:
                word, shift = plane.place(of_period, group % 8)
                places[group, 2 * k] = fields[field][1] + 4 * (word + plane.words * period)
                places[group, 2 * k + 1] = shift + plane.shifts * period
    masks = np.array([((1 << plane.bits) - 1) * 0x01010101 if plane else 0 for _, plane in planes], np.uint32)
    in_bytes = block.high is not None and fields["high"][0].base == np.uint8
    flip = 0x80808080 if name == "Q8_0" else 0
    fifth = fields["high"][1] if in_bytes else -1
    return _Codes(
        places, masks, block.low.bits, flip, fifth, block.middle, np.array(block.table or (), np.float32)
    )


@inner
def _word(block, at):
    word = np.uint32(0)
    for k in range(4):
        word |= np.uint32(block[at + k]) << np.uint32(8 * k)
    return word


@unowned
def _decode_row(blocks, scale, minimum, codes, fifths, words, out):
    """One output: its blocks [K, bytes], scale and minimum of its runs [K, R]; words: scratch for the codes of a block."""
    runs = scale.shape[1]
    count = len(codes.places)
    has_high = codes.masks[1] != 0
    letters = words.view(np.uint8)
    size = 4 * len(codes.places) // scale.shape[1]
    for k in range(len(blocks)):
        block = blocks[k]
        high = np.uint32(0)
        if codes.fifth >= 0:
            for j in range(4):
                high |= fifths[j, block[codes.fifth + j]]
        for group in range(count):
            word = _word(block, codes.places[group, 0]) >> np.uint32(codes.places[group, 1]) & codes.masks[0]
            if has_high:
                above = high if codes.fifth >= 0 else _word(block, codes.places[group, 2])
                word |= (above >> np.uint32(codes.places[group, 3]) & codes.masks[1]) << np.uint32(codes.bits)
            words[group] = word ^ np.uint32(codes.flip)
        for run in range(runs):
            some = letters[run * size : (run + 1) * size]
            at = 4 * count * k + run * size
            factor = scale[k, run]
            weights = out[
                at : at + size
            ]  # numba then knows that no index is negative, and the loops are vectorised
            if len(codes.table) > 0:
                for i in range(size):
                    weights[i] = factor * codes.table[some[i]]
            else:
                for i in range(size):
                    weights[i] = factor * (np.float32(some[i]) - np.float32(codes.middle))
            if minimum.shape[1] > 0:
                for i in range(size):
                    weights[i] += minimum[k, run]


@njit(cache=True, nogil=True)
def _decode(blocks, scale, minimum, codes, fifths, out):
    words = np.empty(len(codes.places), np.uint32)
    for row in range(len(blocks)):
        _decode_row(blocks[row], scale[row], minimum[row], codes, fifths, words, out[row])


@inner
def _half_bits(bits, number):
    """Bits of a finite float32 -> those of the nearest float16, halves to even. number: room for one float32, as number and as bits."""
    sign = bits >> np.uint32(16) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    if size >= np.uint32(0x47800000):
        return sign | np.uint32(0x7C00)
    if size < np.uint32(0x38800000):  # below the smallest normal one: the last bit of 0.5 is that of float16
        number.view(np.uint32)[0] = size
        number[0] += np.float32(0.5)
        return sign | (number.view(np.uint32)[0] - np.uint32(0x3F000000))
    return sign | (
        size - np.uint32(0x38000000) + np.uint32(0xFFF) + (size >> np.uint32(13) & np.uint32(1))
    ) >> np.uint32(13)


@inner
def _lower(a, b):
    return a if a < b else b


@inner
def _higher(a, b):
    return a if a > b else b


@inner(_nrt=False, error_model="numpy")
def _quantize_block(w, rounded, nibbles, work):
    """Codes and scale of BLOCK weights in Q4_0, see `formats.rounded_blocks`: the bits of the scale, and its value. nibbles: [BLOCK] codes."""
    for i in range(8):
        a = w[i]
        b = w[8 + i]
        c = w[16 + i]
        d = w[24 + i]
        work[i], work[8 + i] = _lower(_lower(a, b), _lower(c, d)), _higher(_higher(a, b), _higher(c, d))
    low = work[0]
    high = work[8]
    for i in range(1, 8):
        low = _lower(low, work[i])
        high = _higher(high, work[8 + i])
    work[0] = (high if high >= -low else low) / np.float32(-8) + np.float32(0)
    half = _half_bits(work.view(np.uint32)[0], work[1:2])
    size = half & np.uint32(0x7FFF)
    if size < np.uint32(0x400):
        value = np.float32(size) * np.float32(2.0**-24)
    else:
        work.view(np.uint32)[2] = (size << np.uint32(13)) + np.uint32(0x38000000)
        value = work[2]
    value = -value if half >> np.uint32(15) else value
    divisor = np.float32(1) if value == np.float32(0) else value
    for i in range(BLOCK):
        code = (w[i] / divisor + ROUNDING) - ROUNDING + np.float32(8)
        rounded[i] = np.int32(_lower(_higher(code, np.float32(0)), np.float32(15)))
    for i in range(BLOCK):
        nibbles[i] = rounded[i]
    return half, value


class _Scratch(NamedTuple):
    """Of a thread: codes of a block, weights of an output in blocks, and what a block is rounded with."""

    words: np.ndarray
    weights: np.ndarray
    work: np.ndarray
    rounded: np.ndarray
    nibbles: np.ndarray
    packed: np.ndarray


@unowned
def _quantize_row(scratch, panel, lane, is_sampled, losses):
    """The weights of an output into its lane of a panel [blocks, numbers of 16 bits] of Q4_0."""
    packed = scratch.packed
    nibbles = scratch.nibbles
    pairs = packed.view(np.uint16)
    num_pairs = BLOCK // 4
    for k in range(len(scratch.weights)):
        weights = scratch.weights[k]
        half, value = _quantize_block(weights, scratch.rounded, nibbles, scratch.work)
        for i in range(BLOCK // 2):
            packed[i] = nibbles[i] | nibbles[BLOCK // 2 + i] << np.uint8(4)
        panel[k, lane] = half
        for pair in range(num_pairs):
            panel[k, LANES + 2 * (pair // 2 * LANES + lane) + pair % 2] = pairs[pair]
        if is_sampled:
            for i in range(BLOCK):
                off = weights[i] - value * (np.float32(nibbles[i]) - np.float32(8))
                losses[0].lost += off * off
                losses[0].whole += weights[i] * weights[i]


@njit(cache=True, nogil=True)
def _recode(blocks, scale, minimum, codes, fifths, panels, scratch, losses):
    """Panels [P, blocks, numbers of 16 bits] of Q4_0. losses: [1] of LOSSES."""
    for o in range(len(blocks)):
        is_sampled = o // LANES % SAMPLED < TOGETHER
        losses[0].num_outputs += is_sampled
        _decode_row(
            blocks[o], scale[o], minimum[o], codes, fifths, scratch.words, scratch.weights.reshape(-1)
        )
        _quantize_row(scratch, panels[o // LANES], o % LANES, is_sampled, losses)


def _prepared(name: str, blocks: UInt8[np.ndarray, "O bytes"]) -> tuple[Any, ...]:
    """Blocks one by one, scale and minimum of each run, and how the codes lie."""
    block = BLOCKS[name]
    raw = np.ascontiguousarray(blocks).view(raw_blocks(name))
    integers = small_integers(raw, name) if block.scale is not None else {}

    def by_run(field: str) -> np.ndarray:
        return raw[field].view(np.float16).astype(np.float32)[..., None]

    scale = block_scales(raw)[..., None]
    scale = scale * integers["scales"].astype(np.float32) if integers else scale
    minimum = np.zeros((*raw.shape, 0), np.float32)
    if block.minimum == "m":
        minimum = by_run("m")
    elif block.minimum:
        minimum = -(by_run("dmin") * integers["mins"].astype(np.float32))
    return raw.view(np.uint8).reshape(*raw.shape, -1), scale, minimum, _codes_of(name), FIFTH_BITS


def decoded(name: str, blocks: UInt8[np.ndarray, "O bytes"]) -> Float[np.ndarray, "O I"]:
    """A matrix, or a part of it, in float32, on all cores. blocks: of a format of `BLOCKS`, as in the file.

    Example:
        >>> decoded("Q8_0", np.array([[0, 60, *range(32)]], np.uint8))[0, :3].tolist()
        [0.0, 1.0, 2.0]
    """
    num_blocks = blocks.shape[1] // raw_blocks(name).itemsize
    out = np.empty((len(blocks), num_blocks * BLOCKS[name].inputs), np.float32)
    with ThreadPoolExecutor(usable_cores()) as pool:
        starts = range(0, len(blocks), ROWS)
        list(
            pool.map(
                lambda begin: _decode(
                    *_prepared(name, blocks[begin : begin + ROWS]), out[begin : begin + ROWS]
                ),
                starts,
            )
        )
    return out


def recode(name: str, blocks: UInt8[np.ndarray, "O bytes"], out: np.ndarray) -> tuple[float, float]:
    """Write a matrix into panels of Q4_0, the bytes that `formats.pack` makes of it; returns what that returns. name, blocks: of `decoded`."""
    losses = np.zeros(1, LOSSES)
    panels = out.view(np.uint16).reshape(*out.shape, -1)
    prepared = _prepared(name, blocks)
    inputs = BLOCKS[name].inputs * prepared[0].shape[1]
    scratch = _Scratch(
        words=np.empty(BLOCKS[name].inputs // 4, np.uint32),
        weights=np.empty((inputs // BLOCK, BLOCK), np.float32),
        work=np.empty(16, np.float32),
        rounded=np.empty(BLOCK, np.int32),
        nibbles=np.empty(BLOCK, np.uint8),
        packed=np.empty(BLOCK // 2, np.uint8),
    )
    _recode(*prepared, panels, scratch, losses)
    lost, whole, num_outputs = losses[0].item()
    return len(blocks) / num_outputs * lost, len(blocks) / num_outputs * whole
