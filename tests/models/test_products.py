"""Products with packed matrices: exact where they are of integers, and each row's bits its own."""

import numpy as np
import pytest
import torch
from numba import njit

from polydraft.models.compiled import tiles
from polydraft.models.compiled.formats import BLOCKS, ROUNDED, num_outputs, pack, panels_for, unpack
from polydraft.models.compiled.products import matmul
from polydraft.models.compiled.rounding import round_rows

INPUTS, OUTPUTS, ROWS = 96, 70, 16
FORMATS = {"float32": np.float32, "bfloat16": np.uint16, **BLOCKS}


@njit
def run(x, w, rounded, y, rows):
    round_rows(x, x.shape[1], w, rounded, 0, rows)
    matmul(x, w, rounded, y, 0, len(w), rows)


def product(x, w, rounded):
    y = np.zeros((len(x), num_outputs(w[None])), np.float32)
    run(x, w, rounded, y, len(x))
    return y[:, :OUTPUTS]


def given(name):
    torch.manual_seed(0)
    w = panels_for(OUTPUTS, INPUTS, FORMATS[name])
    pack(torch.randn(OUTPUTS, INPUTS), w)
    return torch.randn(ROWS, INPUTS).numpy(), w, unpack(w, OUTPUTS, INPUTS).double().numpy()


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_stored_weights(name):
    x, w, weights = given(name)
    assert np.allclose(product(x, w, np.zeros((0, 0), np.float32)), x @ weights.T, atol=2e-5)


def rounded_for(name):
    return np.zeros((ROWS, INPUTS), np.uint16) if name == "bfloat16" else np.zeros((ROWS, INPUTS // 32), ROUNDED)


@pytest.mark.parametrize("name", ["bfloat16", *BLOCKS])
def test_rounded_activations_have_the_product_of_what_they_were_rounded_to(name):
    x, w, weights = given(name)
    rounded = rounded_for(name)
    found = product(x, w, rounded)
    if name == "bfloat16":
        taken = torch.from_numpy(x).bfloat16().double().numpy()
    else:
        blocks = x.reshape(ROWS, -1, 32).astype(np.float64)
        scale = np.abs(blocks).max(-1, keepdims=True) / 127
        taken = (np.rint(blocks / scale) * scale).reshape(x.shape)
    assert np.abs(taken - x).max() > 1e-3
    assert np.allclose(found, taken @ weights.T, atol=2e-5)


@pytest.mark.parametrize("name", ["bfloat16", *BLOCKS])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name):
    x, w, _ = given(name)
    for rounded in (rounded_for(name), np.zeros((0, 0), np.float32)):
        together = product(x, w, rounded)
        for count in (1, 2, 5, 11, 12):
            assert np.array_equal(product(x[:count], w, rounded), together[:count])


@pytest.mark.parametrize("name", BLOCKS)
def test_plain_arithmetic_has_the_bits_of_dot_products(name, monkeypatch):
    x, w, _ = given(name)
    found = product(x[:3], w, rounded_for(name))
    monkeypatch.setattr(tiles, "DOTS_BYTES", False)
    plain, again = tiles.tile_of(3), np.zeros((3, num_outputs(w[None])), np.float32)

    @njit
    def by_panels(x, w, y):
        for j in range(len(w)):
            plain(x, 0, x.shape[1], w, j * w.shape[1], y, j * (y.shape[1] // len(w)), y.shape[1], w.shape[1])

    rounded = rounded_for(name)
    product(x[:3], w, rounded)
    by_panels(rounded, w, again)
    assert np.array_equal(again[:, :OUTPUTS], found)
