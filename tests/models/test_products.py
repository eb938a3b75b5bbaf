"""Products with packed matrices: exact where they are of integers, and each row's bits its own."""

import numpy as np
import pytest
import torch
from numba import njit

from polydraft.models.compiled import tiles
from polydraft.models.compiled.formats import BLOCKS, ROUNDED
from polydraft.models.compiled.layers import multiply
from polydraft.models.compiled.products import Format, packed
from polydraft.models.compiled.rounding import round_rows, rounded_bytes
from tests.support.closeness import assert_close

INPUTS, OUTPUTS, ROWS = 96, 70, 16
WEIGHTS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), **BLOCKS}
ROUNDED_TO = {"bfloat16": np.dtype(np.uint16), **dict.fromkeys(BLOCKS, ROUNDED)}
NOTHING = np.dtype(np.float32)


@njit
def run(x, w, rounded, y, rows):
    multiply(x, w, 1, rounded, y, rows)


def product(x, w):
    y = np.zeros((len(x), w.outputs), np.float32)
    run(x, w, np.zeros((ROWS, rounded_bytes(INPUTS)), np.uint8), y, len(x))
    return y[:, :OUTPUTS]


def given(name, activations):
    """Activations, two packed matrices, and the second one as it is stored."""
    torch.manual_seed(0)
    w = packed(list(torch.randn(2, OUTPUTS, INPUTS)), Format(WEIGHTS[name], activations))
    return torch.randn(ROWS, INPUTS).numpy(), w, w.matrix(1, OUTPUTS, INPUTS).double().numpy()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_product_is_that_of_the_stored_weights(name):
    x, w, weights = given(name, NOTHING)
    assert_close(product(x, w), x @ weights.T)


@pytest.mark.parametrize("name", ROUNDED_TO)
def test_rounded_activations_have_the_product_of_what_they_were_rounded_to(name):
    x, w, weights = given(name, ROUNDED_TO[name])
    found = product(x, w)
    if name == "bfloat16":
        taken = torch.from_numpy(x).bfloat16().double().numpy()
    else:
        blocks = x.reshape(ROWS, -1, 32).astype(np.float64)
        scale = np.abs(blocks).max(-1, keepdims=True) / 127
        taken = (np.rint(blocks / scale) * scale).reshape(x.shape)
    assert np.abs(taken - x).max() > 1e-3
    assert_close(found, taken @ weights.T)


@pytest.mark.parametrize("name", ROUNDED_TO)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name):
    for activations in (ROUNDED_TO[name], NOTHING):
        x, w, _ = given(name, activations)
        together = product(x, w)
        for count in (1, 2, 5, 11, 12):
            assert np.array_equal(product(x[:count], w), together[:count])


@pytest.mark.parametrize("name", BLOCKS)
def test_plain_arithmetic_has_the_bits_of_dot_products(name, monkeypatch):
    x, w, _ = given(name, ROUNDED)
    found, rounded, again = (
        product(x[:3], w),
        np.zeros((3, rounded_bytes(INPUTS)), np.uint8),
        np.zeros((3, w.outputs), np.float32),
    )
    monkeypatch.setattr(tiles, "DOTS_BYTES", False)
    plain, stored = tiles.tile_of(3), BLOCKS[name]

    @njit
    def by_panels(x, rounded, w, y):
        round_rows(x, INPUTS, w, rounded, 0, 3)
        for j in range(w.panels):
            panel, out = w.data[1, j], y[:, j * w.width :]
            at, row = rounded.ctypes.data, rounded.shape[1]
            plain(at, row, panel.ctypes.data, out.ctypes.data, 4 * y.shape[1], w.steps, stored, ROUNDED)

    by_panels(x[:3], rounded, w, again)
    assert np.array_equal(again[:, :OUTPUTS], found)
