"""Softmax of rows of logits, its logarithm, and the most probable tokens of each row, on the host."""

import numpy as np
from jaxtyping import Float, Float64, Int


def softmax(logits: Float[np.ndarray, "*M V"]) -> Float[np.ndarray, "*M V"]:
    """In the precision of the logits.

    Example:
        >>> softmax(np.zeros((1, 2))).tolist()
        [[0.5, 0.5]]
    """
    masses = np.exp(logits - logits.max(-1, keepdims=True))
    masses /= masses.sum(-1, keepdims=True)
    return masses


def log_softmax(logits: Float[np.ndarray, "*M V"]) -> Float64[np.ndarray, "*M V"]:
    """In float64.

    Example:
        >>> log_softmax(np.zeros((1, 2), np.float32)).round(3).tolist()
        [[-0.693, -0.693]]
    """
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def top(rows: Float[np.ndarray, "M V"], k: int) -> tuple[Float[np.ndarray, "M k"], Int[np.ndarray, "M k"]]:
    """The k largest numbers of each row, largest first, and their places; k is at most V.

    Example:
        >>> values, ids = top(np.array([[0.25, 0.5, 0.0]]), 2)
        >>> values.tolist(), ids.tolist()
        ([[0.5, 0.25]], [[1, 0]])
    """
    V = rows.shape[-1]
    ids = np.sort(np.argpartition(rows, V - k, -1)[:, V - k :] if 0 < k < V else np.argsort(-rows, -1)[:, :k])
    values = np.take_along_axis(rows, ids, -1)
    order = np.argsort(-values, -1, kind="stable")
    return np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
