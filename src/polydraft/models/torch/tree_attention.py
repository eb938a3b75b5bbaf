"""Attention of tree nodes: which columns of the cache a node sees.

A node sees the committed tokens of its own sequence, its ancestors and itself. The mask is additive: 0 or -inf.
"""

import numpy as np
from jaxtyping import Float32, Int64

from polydraft.numerics.compiled_code import njit


@njit(cache=True)
def _nodes(
    mask: np.ndarray, positions: np.ndarray, lengths: np.ndarray, parents: np.ndarray, since: int
) -> None:
    for b in range(parents.shape[0]):
        for n in range(since, parents.shape[1]):
            row = mask[b, n - since]
            row[: lengths[b]] = 0
            row[lengths[b] :] = -np.inf
            depth = -1
            m = n
            while m >= 0:
                row[lengths[b] + m] = 0
                depth += 1
                m = parents[b, m]
            positions[b, n - since] = lengths[b] + depth


def node_mask(
    lengths: Int64[np.ndarray, " B"],
    parents: Int64[np.ndarray, "B N"],
    since: int = 0,
) -> tuple[Float32[np.ndarray, "B T C"], Int64[np.ndarray, "B T"]]:
    """Mask and positions of the nodes from `since` on.

    lengths: committed tokens.  parents: as in `TokenTree`; a padding node counts as a root.
    Node m sits in column length + m. C = longest length + N.

    Example:
        >>> mask, positions = node_mask(np.array([2]), np.array([[-1, 0, 0]]))
        >>> (mask[0] == 0).astype(int).tolist(), positions.tolist()
        ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], [[2, 3, 3]])
    """
    B, N = parents.shape
    mask = np.empty((B, N - since, int(lengths.max()) + N), np.float32)
    positions = np.empty((B, N - since), np.int64)
    _nodes(mask, positions, lengths, parents, since)
    return mask, positions


@njit(cache=True)
def _depths(columns: np.ndarray, lengths: np.ndarray, parents: np.ndarray) -> None:
    for b in range(parents.shape[0]):
        for n in range(parents.shape[1]):
            m = parents[b, n]
            columns[b, lengths[b] + n] = lengths[b] if m < 0 else columns[b, lengths[b] + m] + 1


def column_positions(
    lengths: Int64[np.ndarray, " B"], parents: Int64[np.ndarray, "B N"]
) -> Int64[np.ndarray, "B C"]:
    """Positions of what lies in the columns that `node_mask` is over; behind a shorter text's rows they mean nothing.

    Example:
        >>> column_positions(np.array([2]), np.array([[-1, 0, 0, 1]])).tolist()
        [[0, 1, 2, 3, 3, 4]]
    """
    B, N = parents.shape
    columns = np.tile(np.arange(int(lengths.max()) + N), (B, 1))
    _depths(columns, lengths, parents)
    return columns
