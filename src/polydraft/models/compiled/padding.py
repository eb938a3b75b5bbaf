"""Rows of a forward pass, which runs only what is real, as rows of padded trees."""

import numpy as np


def padded(rows: np.ndarray, parents: np.ndarray, roots: bool, extra: int) -> np.ndarray:
    """Rows [R, W] of what is real -> rows [B, T, W] of all places, zero where there is padding.

    parents: [B, T - extra], with the roots first or without them.

    Example:
        >>> padded(np.array([[1], [2], [3]]), np.array([[-1, 0], [-1, -1]]), roots=True, extra=0).tolist()
        [[[1.0], [2.0]], [[3.0], [0.0]]]
    """
    B, N = parents.shape
    if all(n >= 0 for row in parents.tolist() for n in row[int(roots) :]):
        return rows[: B * (N + extra)].reshape(B, N + extra, -1)
    real = np.concatenate([parents >= 0, np.ones((B, extra), np.bool_)], 1)
    real[:, 0] |= roots
    placed = np.zeros((*real.shape, rows.shape[-1]), np.float32)
    placed[real] = rows[: int(real.sum())]
    return placed
