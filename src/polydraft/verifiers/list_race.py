"""Gumbel-max list sampling: every path has clocks of its own, and the target takes the first arrival over those still in play.

Rowan, Phan & Khisti 2025 (arXiv 2506.05632).

    E^(k)_t(i)  Exp(1) clock of token i on path k at absolute position t      draft of path k: argmin_i E^(k)_t(i) / q(i)
    active      the paths that agree with the output so far
    y_t       = argmin_i min over active k of E^(k)_t(i) / p(i | path)

Lossless: the active set was settled by earlier positions, so the earliest of its clocks is exponential for every token, and y_t ~ p.
Acceptance at one node is no less than sum_j K / (sum_i max(p_i / p_j, q_i / q_j) + (K - 1) / p_j).
The clock of path k and token i is number k V + i of the race stream; path 0 is the one of `race`. The j-th child of a node,
j > 0, starts a new path; the first child continues its parent's.
Trap: a path dropped because of the token it drew at this very position biases the distribution (total variation 0.07).
Cost: K vectors of clocks at the root, fewer below: time O(K V) a visited node, memory O(V).
"""

import numpy as np
from jaxtyping import Bool, Int

from polydraft.core import DraftSampling, TokenTree, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import host
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.verifiers.race import Race


@njit(cache=True)
def _number(parents, numbers):
    """Path of every node: the first child continues its parent's, the others start new ones."""
    B, N = parents.shape
    for b in range(B):
        started = 1
        continued = np.zeros(N, np.bool_)
        for n in range(1, N):
            u = parents[b, n]
            if u >= 0:
                numbers[b, n] = started if continued[u] else numbers[b, u]
                started += continued[u]
                continued[u] = True


@njit(cache=True)
def _activate(parents, first, numbers, active):
    """active[b, n, k]: path k agrees with context n: it runs through it, or it starts there."""
    for b in range(len(parents)):
        active[b, 0, 0] = True
        for n in range(1, parents.shape[1]):
            if parents[b, n] >= 0:
                active[b, first[b, n], numbers[b, n]] = True
                active[b, first[b, parents[b, n]], numbers[b, n]] = True


def path_numbers(drafted: TokenTree) -> Int[np.ndarray, "B N"]:
    """Which path each node belongs to; the root is on path 0, padding too.

    Example:
        >>> path_numbers(tree.pad([([0, 5, 6, 7, 8], [-1, 0, 0, 1, 2])])).tolist()
        [[0, 0, 1, 0, 1]]
    """
    numbers = np.zeros(drafted.parents.shape, np.int64)
    _number(drafted.host.parents, numbers)
    return numbers


def active_paths(drafted: TokenTree) -> Bool[np.ndarray, "B N K"]:
    """Which paths are in play at each context."""
    numbers = path_numbers(drafted)
    active = np.zeros((*numbers.shape, int(numbers.max()) + 1), np.bool_)
    _activate(drafted.host.parents, host(tree.first_copies(drafted)), numbers, active)
    return active


list_race = Race(
    method(
        "list_race",
        "Gumbel-max list sampling",
        "2506.05632",
        {DraftSampling.LISTED},
        {TreeShape.CHAIN, TreeShape.PATHS},
        shared_noise=True,
    ),
    active_paths,
)
"""The verifier."""
