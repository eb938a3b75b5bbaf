"""Trees by position of most expected tokens, from the acceptance of one draft by depth.

    c_k(d)  chance that the k-th child of a node at depth d is the one that is kept:  A_k - A_(k-1),  A_k = 1 - (1 - a_d)^(1 + b log2 k)
    F       expected tokens of a tree: the sum over its nodes of the products of c along their paths, the root's 1

As c falls with k, the n nodes of largest products are a tree, and the best one of n nodes: `theory/tree_plan.py` finds the same by its
programme. It is grown one by one; what may follow is the next child of each node.
"""

import numpy as np

from polydraft.verifiers._rows import compiled

__all__ = ["chances", "expected", "grow"]

AGAIN = 0.53
"""b, as in `acceptance.tokens_by_depth`."""


@compiled
def chances(acceptance: np.ndarray, out: np.ndarray) -> None:
    """out[d, k] = c_(k+1)(d) of every depth and as many children as it has columns."""
    octaves = np.log2(np.arange(1.0, out.shape[1] + 1.0))
    for d in range(out.shape[0]):
        missed, before = np.log(max(1.0 - acceptance[min(d, acceptance.size - 1)], 1e-12)), 1.0
        for k in range(out.shape[1]):
            left = np.exp(missed * (1.0 + AGAIN * octaves[k]))
            out[d, k] = before - left
            before = left


@compiled
def expected(chance: np.ndarray, parents: np.ndarray) -> float:
    """F of the tree of these parents; -1 is padding but for the root. Children beyond the columns of `chance` add nothing."""
    N, total = len(parents), 1.0
    value, depth, children = np.ones(N), np.zeros(N, np.int64), np.zeros(N, np.int64)
    for n in range(1, N):
        m = parents[n]
        if m >= 0:
            d, k = depth[m], children[m]
            value[n] = value[m] * chance[min(d, len(chance) - 1), k] if k < chance.shape[1] else 0.0
            depth[n], children[m] = d + 1, k + 1
            total += value[n]
    return total


@compiled
def grow(chance: np.ndarray, max_depth: int, parents: np.ndarray, tokens: np.ndarray, depths: np.ndarray) -> None:
    """parents[1:] in the order of growth: the first n of them are the best tree of n nodes down to `max_depth`.

    tokens[n], depths[n]: F and depth of that tree.  Where no node may follow, what is left is as before and its parents -1.
    """
    N, K = len(parents), chance.shape[1]
    value, depth, children, following = np.empty(N), np.empty(N, np.int64), np.zeros(N, np.int64), np.zeros(N)
    parents[:], value[0], depth[0], tokens[0], depths[0] = -1, 1.0, 0, 1.0, 0
    following[0] = chance[0, 0] if max_depth > 0 else 0.0
    for n in range(1, N):
        m = 0
        for i in range(1, n):
            if following[i] > following[m]:
                m = i
        tokens[n], depths[n] = tokens[n - 1], depths[n - 1]
        if following[m] <= 0.0:
            continue
        parents[n], value[n], depth[n] = m, following[m], depth[m] + 1
        tokens[n] += value[n]
        depths[n] = max(depths[n], depth[n])
        children[m] += 1
        following[m] = value[m] * chance[depth[m], children[m]] if children[m] < K else 0.0
        following[n] = value[n] * chance[depth[n], 0] if depth[n] < max_depth else 0.0
