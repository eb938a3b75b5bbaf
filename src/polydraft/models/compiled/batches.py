"""Batches of padded trees, and the rows of a forward pass over them, which runs only what is real."""

from collections.abc import Sequence

import numpy as np

from polydraft.core import TokenTree


def with_chains(tree: TokenTree, chains: Sequence[Sequence[int]]) -> TokenTree:
    """A batch of trees, and below it chains of tokens.

    Example:
        >>> with_chains(TokenTree.roots(np.array([7])), [[1, 2]]).host.parents.tolist()
        [[-1, -1], [-1, 0]]
    """
    B, N = tree.tokens.shape
    shape = B + len(chains), max(N, *map(len, chains))
    tokens = np.zeros(shape, np.int64)
    parents = np.full(shape, -1)
    tokens[:B, :N] = tree.host.tokens
    parents[:B, :N] = tree.host.parents
    for b, ids in enumerate(chains, B):
        tokens[b, : len(ids)] = ids
        parents[b, : len(ids)] = np.arange(-1, len(ids) - 1)
    return TokenTree.of(tokens, parents)


def padded(rows: np.ndarray, parents: np.ndarray, roots: bool) -> np.ndarray:
    """Rows [R, W] of what is real -> rows [B, T, W] of all places, zero where there is padding.

    parents: [B, T], with the roots first or without them.

    Example:
        >>> padded(np.array([[1], [2], [3]]), np.array([[-1, 0], [-1, -1]]), roots=True).tolist()
        [[[1.0], [2.0]], [[3.0], [0.0]]]
    """
    if parents.shape[1] == roots or all(n >= 0 for row in parents.tolist() for n in row[int(roots) :]):
        return rows[: parents.size].reshape(*parents.shape, -1)
    real = parents >= 0
    real[:, 0] |= roots
    placed = np.zeros((*real.shape, rows.shape[-1]), np.float32)
    placed[real] = rows[: int(real.sum())]
    return placed
