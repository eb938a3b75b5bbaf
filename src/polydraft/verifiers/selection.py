"""Two-step importance selection: pick one of the drafts by weights, then test it against the distribution of what is picked.

Khisti et al. 2024 (arXiv 2410.18234).

    pi_c(draws)   probability that draw c is picked, any function of the draws and the tables
    q_I(y)        sum over draws of Pr(draws) sum of pi_c over c with x_c = y: the exact distribution of the picked token
    accept x_c with probability min(1, p(x_c) / q_I(x_c)); else emit N((p - q_I)+)

Lossless for any pi as long as q_I is the distribution of the pi that is used; acceptance no less than sum min(p, q_I). Whether to select at
all is decided by that sum, a function of the tables alone: so no verifier made here is below speculative sampling of one draw.
Traps: q_I of other weights than those used, or a choice that looks at the draws; a number of draws that was not fixed before the
first of them, as where copies of a context get theirs in turn and the tree grows by what was drawn.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from polydraft.core.arrays import Array, gather, host, like, namespace, put, scatter_add, take
from polydraft.verifiers.residual import ranks
from polydraft.verifiers.speculative import residual


def overlap(p: Float[Array, "*M V"], q: Float[Array, "*M V"]) -> Float[Array, "*M"]:
    """sum min(p, q): acceptance of one draw from q.

    Example:
        >>> overlap(np.array([0.5, 0.5]), np.array([0.75, 0.25])).item()
        0.75
    """
    xp = namespace(p)
    return xp.sum(xp.minimum(p, q), axis=-1)


def selection_probs(
    p: Float[Array, "M V"], picked: Float[Array, "M V"], pi: Float[Array, "M n"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token, given the distribution `picked` of the token that is picked and the weights `pi` of the draws.

    Example:
        >>> p, q = np.array([[0.3, 0.7]]), np.array([[0.6, 0.4]])
        >>> selection_probs(p, q, np.array([[1.0]]), np.array([[0]])).tolist()
        [[0.5, 0.5]]
    """
    xp = namespace(p)
    x = xp.clip(draws, min=0)
    q_drawn = gather(picked, x)
    p_drawn = gather(p, x)
    accept = xp.clip(xp.where(q_drawn > 0, p_drawn / q_drawn, 0.0), max=1.0)
    rejected = xp.sum(pi * (1 - accept), axis=1, keepdims=True)
    return scatter_add(rejected * residual(p, picked), x, pi * accept)


def first_draw(draws: Int[Array, "M n"], p: Float[Array, "M V"]) -> Float[Array, "M n"]:
    """Weights that pick the first draw, in the type of p.

    Example:
        >>> first_draw(np.array([[4, 2]]), np.array([[0.25, 0.75]])).tolist()
        [[1.0, 0.0]]
    """
    weights = np.zeros(draws.shape, host(p[:1]).dtype)
    weights[:, 0] = 1.0
    return like(weights, p)


Select = Callable[[Array, Array, Array], tuple[Array, Array]]
"""(p [M, V], q [M, V], draws [M, n], two or more of each row) -> distribution of the picked token [M, V], weights of the draws [M, n]."""


def selected(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"], select: Select
) -> Float[Array, "M V"]:
    """Distribution of the emitted token where iid draws are selected from, wherever that overlaps more with p than the first draw does."""
    xp = namespace(p)
    pi = first_draw(draws, p)
    several = np.flatnonzero((host(draws) >= 0).sum(1) > 1)
    P = take(p, several)
    Q = take(q, several)
    distribution, weights = select(P, Q, take(draws, several))
    better = np.flatnonzero(host(overlap(P, distribution) >= overlap(P, Q)))
    at = (several[better],)
    picked = put(xp.asarray(q, copy=True), at, take(distribution, better))
    return selection_probs(p, picked, put(pi, at, take(weights, better)), draws)


def highest_probs(
    p: Float[Array, "B V"], q: Float[Array, "B V"], chance: Float[Array, "B M"]
) -> tuple[Float[Array, "B V"], Float[Array, "B V"], Int[Array, "B V"]]:
    """Distribution of the drawn token with the largest p/q (ties by token id; q = 0 last), mass of q below each token, and rank of each token.

    chance: Pr(n draws), n = 0..M-1.

    Example:
        >>> p, q, two_draws = np.array([[0.9, 0.1]]), np.array([[0.5, 0.5]]), np.array([[0.0, 0.0, 1.0]])
        >>> highest_probs(p, q, two_draws)[0].tolist()
        [[0.75, 0.25]]
    """
    xp = namespace(p)
    order = xp.argsort(xp.where(q > 0, p / q, xp.inf), axis=-1, stable=True)
    rank = ranks(order)
    sorted_q = gather(q, order)
    below = gather(xp.cumulative_sum(sorted_q, axis=-1) - sorted_q, rank)
    distribution = xp.zeros_like(q)
    geometric = xp.zeros_like(q)
    power = xp.ones_like(q)
    for n in range(1, chance.shape[-1]):
        geometric = geometric * below + power  # sum_{j<n} b^j a^(n-1-j)
        power = power * (below + q)
        distribution = distribution + chance[:, n, None] * geometric
    return q * distribution, below, rank
