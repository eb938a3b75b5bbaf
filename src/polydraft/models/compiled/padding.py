"""Rows of a forward pass, which runs only what is real, as rows of padded trees."""

import numpy as np


def padded(rows: np.ndarray, parents: np.ndarray, roots: bool) -> np.ndarray:
    """Rows [R, W] of what is real -> rows [B, T, W] of all places, zero where there is padding.

    parents: [B, T], with the roots first or without them.

    Example:
        >>> padded(np.array([[1], [2], [3]]), np.array([[-1, 0], [-1, -1]]), roots=True).tolist()
        [[[1.0], [2.0]], [[3.0], [0.0]]]
    """
    if all(n >= 0 for row in parents.tolist() for n in row[int(roots) :]):
        return rows[: parents.size].reshape(*parents.shape, -1)
    real = parents >= 0
    real[:, 0] |= roots
    placed = np.zeros((*real.shape, rows.shape[-1]), np.float32)
    placed[real] = rows[: int(real.sum())]
    return placed
