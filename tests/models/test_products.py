"""Products with packed matrices: exact where they are of integers, and each row's bits its own."""

from itertools import groupby

import numpy as np
import pytest
from numba import njit

from polydraft.models.compiled.layers import multiply
from polydraft.models.matrices import dot_products, tiles
from polydraft.models.matrices.formats import BLOCK, BLOCKS, DTYPES, NUMBERS, ROUNDED, pack_blocks
from polydraft.models.matrices.products import (
    BYTES,
    EXACT,
    MatrixFormat,
    Packed,
    matmul,
    output_row,
    packed,
)
from polydraft.models.matrices.rounding import quantize_rows, rounded_bytes
from polydraft.models.matrices.vectors import FEATURES, LANES, PANEL
from tests.models.blocks import dequantised, packed_blocks, random_blocks
from tests.models.processor import emitted
from tests.support.closeness import assert_close

OUTPUTS = 70
ROWS = 16


@njit
def run(x, w, rounded, y, rows):
    multiply(x, w, 1, rounded, y, rows)


@njit
def row_of(w, k, output, out):
    output_row(w, k, output, out)


def product(x, w):
    y = np.zeros((len(x), w.outputs), np.float32)
    run(x, w, np.zeros((ROWS, rounded_bytes(x.shape[1])), np.uint8), y, len(x))
    return y[:, :OUTPUTS]


def matrices(name, rounding):
    """Activations, two packed matrices, and the second one's weights."""
    rng = np.random.default_rng(0)
    if name in NUMBERS:
        w = packed(list(rng.standard_normal((2, OUTPUTS, 96), np.float32)), MatrixFormat(name, rounding))
        weights = w.matrix(1, OUTPUTS, 96).astype(np.float64)
    else:
        raw = [random_blocks(name, OUTPUTS, max(96, 2 * BLOCKS[name].inputs), seed) for seed in range(2)]
        w = packed_blocks(name, rounding, raw)
        weights = dequantised(name, raw[1]).astype(np.float64)
    return rng.standard_normal((ROWS, weights.shape[1]), np.float32), w, weights


@pytest.mark.parametrize("name", DTYPES)
def test_a_product_is_that_of_the_stored_weights(name):
    x, w, weights = matrices(name, EXACT)
    assert_close(product(x, w), x @ weights.T)


@pytest.mark.parametrize("name", BLOCKS)
def test_rounded_activations_have_the_product_of_what_they_were_rounded_to(name):
    x, w, weights = matrices(name, BYTES)
    blocks = x.reshape(ROWS, -1, BLOCK).astype(np.float64)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = (np.rint(blocks / scale) * scale).reshape(x.shape)
    assert np.abs(rounded - x).max() > 1e-3
    assert_close(product(x, w), rounded @ weights.T)


@pytest.mark.parametrize("name", ["bfloat16", *BLOCKS])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name):
    for rounding in {BYTES if name in BLOCKS else EXACT, EXACT}:
        x, w, _ = matrices(name, rounding)
        together = product(x, w)
        for count in (1, 2, 3, 5, 7, 11, 12):
            assert np.array_equal(product(x[:count], w), together[:count])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_weights_are_prefetched_between_products_and_not_all_at_once(name):
    calls = [
        "prefetch" in line
        for line in str(emitted(MatrixFormat(name, BYTES))).splitlines()
        if " call " in line
    ]
    together = [len(list(run)) for is_prefetch, run in groupby(calls) if is_prefetch]
    assert max(together) <= 2 and len(together) >= 4


@pytest.mark.parametrize("name", DTYPES)
def test_the_weights_of_an_output_are_read_as_they_are(name):
    x, w, weights = matrices(name, EXACT)
    for output in (0, PANEL - 1, PANEL, OUTPUTS - 1):
        row = np.zeros(x.shape[1], np.float32)
        row_of(w, 1, output, row)
        assert_close(row, weights[output])


def test_outputs_of_several_formats_are_one_matrix():
    parts = {"Q4_K": (BYTES, PANEL), "Q6_K": (EXACT, 2 * PANEL), "float32": (EXACT, 5)}
    weights = {name: random_blocks(name, size, 512) for name, (_, size) in parts.items() if name in BLOCKS}
    w = Packed.empty(
        [[(MatrixFormat(name, rounding), size) for name, (rounding, size) in parts.items()]], 512
    )
    for part, raw in enumerate(weights.values()):
        pack_blocks(raw, w.panels_of(0, part))
    numbers = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    w.panels_of(0, 2)[:] = np.pad(numbers, ((0, PANEL - 5), (0, 0))).T
    whole = np.concatenate([*(dequantised(name, raw) for name, raw in weights.items()), numbers])
    assert np.array_equal(w.matrix(0, len(whole), 512), whole)
    x = np.zeros((2, 512), np.float32)
    x[0, ::BLOCK] = 1
    x[1, 5::BLOCK] = -2  # which eight bits hold exactly

    @njit
    def by_panels(x, w, rounded, y):
        quantize_rows(x, 512, w.rounding, rounded, 0, 2)
        for panel in range(w.panels):
            matmul(x, w, 0, rounded, y, panel, panel + 1, 2, False)

    y = np.zeros((2, w.outputs), np.float32)
    by_panels(x, w, np.zeros((2, rounded_bytes(512)), np.uint8), y)
    assert_close(y[:, : len(whole)], x @ whole.T)


WAYS = [None, *(way for way in ("avx512bw", "avx2") if FEATURES.get(way) and ("512" in way) == (LANES == 16))]
"""Plain arithmetic, and sums of two products in 16 bits where the processor has them."""


def extreme_matrices(name):
    """Activations of the largest code in every place, and of both signs by turns; one matrix, with outputs of the largest, the smallest and mixed codes."""
    raw = random_blocks(name, OUTPUTS, 2 * max(96, BLOCKS[name].inputs))
    for output, byte in enumerate((0xFF, 0x00, 0x80, 0x7F)):
        for field in {"codes", "indices", "high"} & set(raw.dtype.names or ()):
            raw[field].view(np.uint8)[output] = byte
    w = packed_blocks(name, BYTES, [raw, raw])
    x = np.random.default_rng(0).standard_normal((3, raw.shape[1] * BLOCKS[name].inputs), np.float32)
    x[0] = 1
    x[1] = np.where(np.arange(x.shape[1]) % 2, 1, -1)
    return x, w


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BLOCKS)
def test_other_instructions_have_the_bits_of_dot_products(name, way, monkeypatch):
    x, w = extreme_matrices(name)
    inputs = x.shape[1]
    expected = product(x, w)
    again = np.zeros((3, w.outputs), np.float32)
    monkeypatch.setattr(dot_products, "DOTS_BYTES", way)
    if way is None:
        monkeypatch.setattr(dot_products, "LOOK_UP", None)
    tile = tiles.tile_of(3) if BLOCKS[name].run == BLOCK else tiles.tile_of(1, most=3)
    stored = DTYPES[name]
    panels = w.panels_of(1)

    @njit
    def by_panels(x, rounded, panels, w, y):
        quantize_rows(x, inputs, w.rounding, rounded, 0, 3)
        for j in range(len(panels)):
            out = y[:, j * w.segments[1, 0].width :]
            at = rounded.ctypes.data
            row = rounded.shape[1]
            tile(
                at,
                row,
                panels[j].ctypes.data,
                out.ctypes.data,
                4 * y.shape[1],
                3,
                panels.shape[1],
                stored,
                ROUNDED,
            )

    by_panels(x, np.zeros((3, rounded_bytes(inputs)), np.uint8), panels, w, again)
    assert np.array_equal(again[:, :OUTPUTS], expected)
