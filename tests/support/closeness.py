"""Comparison of floating-point results on any processor: the rounding error of a sum grows with its terms."""

from typing import Any

import numpy as np

FLOAT32 = 5e-5
"""Share of the largest value by which float32 results may differ; sums of some hundred terms in another order differ by 1e-5."""


def _numbers(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, np.float64)


def assert_close(actual: Any, expected: Any, share: float = FLOAT32) -> None:
    """Every difference is at most `share` of the largest finite value of `expected`; what is not finite is equal.

    Example:
        >>> assert_close([1000.01, 0.01], [1000.0, 0.0])
        >>> assert_close([1.01, 0.0], [1.0, 0.0])
        Traceback (most recent call last):
        AssertionError: differs by 0.01; expected at most 5e-05, a share 5e-05 of the largest value 1
    """
    ours = _numbers(actual)
    theirs = _numbers(expected)
    assert ours.shape == theirs.shape, f"shape {ours.shape}; expected {theirs.shape}"
    finite = np.isfinite(theirs)
    assert np.array_equal(ours[~finite], theirs[~finite], equal_nan=True), "infinities or NaN stand elsewhere"
    difference = np.abs(ours[finite] - theirs[finite]).max(initial=0.0)
    largest = np.abs(theirs[finite]).max(initial=0.0)
    allowed = share * largest
    assert difference <= allowed, (
        f"differs by {difference:.3g}; expected at most {allowed:.3g}, a share {share:g} of the largest value {largest:.3g}"
    )
