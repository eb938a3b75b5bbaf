"""Products with panels of bfloat16, by every way that this processor has."""

import numpy as np
import pytest

from polydraft.models.matrices.matrix_unit import has_matrix_unit, matrix_product
from polydraft.models.matrices.products import call_product, number_product
from polydraft.models.matrices.vectors import FEATURES, LANES, PANEL, aligned
from polydraft.numerics.compiled_code import njit

HAS_DOTS = LANES == 16 and FEATURES.get("avx512bf16")
INPUTS = 96
ROWS = 19
PANELS = 2


def halves(x):
    """Bits of the nearest bfloat16, and what they stand for."""
    bits = (x.astype(np.float32).view(np.uint32) + 0x8000) >> 16
    return bits.astype(np.uint16), (bits << 16).view(np.float32)


@njit
def _call(address, x, w, y, rows):
    xs = x.strides[0]
    stride = w.strides[0]
    call_product(
        address,
        x.ctypes.data,
        xs,
        w.ctypes.data,
        stride,
        len(w),
        w.shape[1] * 2,
        y.ctypes.data,
        y.strides[0],
        PANEL,
        rows,
    )


@pytest.mark.parametrize("adds", [False, True])
def test_a_rows_product_with_bfloat16_is_its_own_and_that_of_the_rounded_numbers(adds):
    """Every other output lies beside zeros, every row beside others, and sums go on from ones."""
    rng = np.random.default_rng(0)
    stored, numbers = halves(rng.standard_normal((PANELS, INPUTS // 2, PANEL, 2)))
    rounded, x = halves(rng.standard_normal((ROWS, INPUTS)))
    matrix = numbers.transpose(1, 3, 0, 2).reshape(INPUTS, PANELS * PANEL).astype(np.float64)
    w = aligned(*stored.shape, dtype=np.uint16)
    w[:] = stored
    ways: list[tuple[int, np.ndarray]] = [(number_product(w.dtype, adds=adds), x)]
    if HAS_DOTS:
        ways.append((number_product(w.dtype, adds=adds, halves=True), rounded))
    if has_matrix_unit():  # its code is compiled where the processor has it alone
        ways.append((matrix_product(adds=adds), rounded))
    for address, taken in ways:
        y, alone = (np.ones((ROWS, PANELS * PANEL), np.float32) for _ in range(2))
        _call(address, taken, w, y, ROWS)
        np.testing.assert_allclose(y, x @ matrix + adds, rtol=1e-5, atol=1e-4)
        for r in range(ROWS):
            _call(address, taken[r:], w, alone[r:], 1)
        assert np.array_equal(y, alone)
