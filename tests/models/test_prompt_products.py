"""Rows of prompts times blocks of integers by the matrix unit, which is emulated where the processor has none."""

from contextlib import nullcontext

import numpy as np
import pytest
from numba import njit

from polydraft.models.matrices.formats import BLOCKS
from polydraft.models.matrices.matrix_unit import PROMPT_ROWS, for_prompts, has_matrix_unit
from polydraft.models.matrices.products import BYTES, EXACT, matmul, rounding_of
from polydraft.models.matrices.rounding import quantize_rows, rounded_bytes
from polydraft.models.matrices.vectors import LANES, aligned
from tests.models.blocks import dequantised, packed_blocks, random_blocks
from tests.support.emulated_unit import emulated

pytestmark = pytest.mark.skipif(LANES < 16, reason="only processors of AVX-512 have a matrix unit")
OUTPUTS = 70
ROWS = 2 * PROMPT_ROWS
COMMON = ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL"]


@njit
def run(x, w, rounded, y, rows, of_prompt):
    zero = np.int64(0)
    quantize_rows(x, x.shape[1], rounding_of(w.rounding, of_prompt), rounded, zero, rows)
    matmul(x, w, zero, rounded, y, zero, w.panels, rows, of_prompt)


def product(x, w, rows, *, of_prompt=True):
    """The first so many rows of x, beside others that are no numbers."""
    padded = np.full((ROWS, x.shape[1]), np.nan, np.float32)
    padded[:rows] = x[:rows]
    y = aligned(ROWS, w.outputs)
    run(padded, w, aligned(ROWS, rounded_bytes(x.shape[1]), dtype=np.uint8), y, rows, of_prompt)
    return y[:rows, :OUTPUTS]


@pytest.fixture(scope="module", params=[False, *([True] if has_matrix_unit() else [])])
def made(request):
    """Matrices of a format, read by the emulation or by the processor's own unit."""

    def make(name):
        blocks = random_blocks(name, OUTPUTS, max(96, 2 * BLOCKS[name].inputs))
        w = packed_blocks(name, BYTES, [blocks])
        with nullcontext() if request.param else emulated():
            return for_prompts(w), dequantised(name, blocks).astype(np.float64)

    return make


def formats():
    return [pytest.param(name, marks=[] if name in COMMON else pytest.mark.slow) for name in BLOCKS]


@pytest.mark.parametrize("name", formats())
def test_rows_of_a_prompt_have_the_product_of_the_stored_weights(made, name):
    w, weights = made(name)
    x = np.random.default_rng(1).standard_normal((ROWS, weights.shape[1]), np.float32)
    expected = x @ weights.T
    size = np.abs(x) @ np.abs(weights).T
    halved, in_bytes = (np.abs(product(x, w, ROWS, of_prompt=p) - expected) / size for p in (True, False))
    assert halved.max() < 2.0**-8 and halved.mean() < in_bytes.mean()


@pytest.mark.parametrize("name", formats())
def test_a_row_of_a_prompt_has_bits_of_its_own(made, name):
    w, weights = made(name)
    x = np.random.default_rng(2).standard_normal((ROWS, weights.shape[1]), np.float32)
    together = product(x, w, ROWS)
    for first, rows in ((0, 1), (17, 16), (40, PROMPT_ROWS), (50, 70)):
        np.testing.assert_array_equal(product(x[first:], w, rows), together[first : first + rows])


def test_rows_that_were_generated_are_read_as_without_the_unit(made):
    w, weights = made("Q4_K")
    x = np.random.default_rng(3).standard_normal((5, weights.shape[1]), np.float32)
    own = product(x, w._replace(rounding=BYTES), 5, of_prompt=False)
    np.testing.assert_array_equal(product(x, w, 5, of_prompt=False), own)
    assert (product(x, w, 5) != own).any()


def test_matrices_whose_rows_are_not_rounded_are_left(made):
    w = packed_blocks("Q4_0", EXACT, [random_blocks("Q4_0", OUTPUTS, 96)])
    assert for_prompts(w).rounding == EXACT and not for_prompts(w).segments["prompt_product"].any()
