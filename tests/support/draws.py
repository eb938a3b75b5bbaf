"""Draws for tests, by NumPy's generators."""

import numpy as np


def multinomial(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A token of each row [M, V], by its weight."""
    cumulative = weights.cumsum(-1, dtype=np.float64)
    return (cumulative > rng.random((len(weights), 1)) * cumulative[:, -1:]).argmax(-1)
