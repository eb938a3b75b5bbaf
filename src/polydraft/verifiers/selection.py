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

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.verifiers.residual import ranks
from polydraft.verifiers.speculative import residual


def overlap(p: Float[Tensor, "*M V"], q: Float[Tensor, "*M V"]) -> Float[Tensor, "*M"]:
    """sum min(p, q): acceptance of one draw from q.

    Example:
        >>> overlap(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])).item()
        0.75
    """
    return torch.minimum(p, q).sum(-1)


def selection_probs(
    p: Float[Tensor, "M V"], picked: Float[Tensor, "M V"], pi: Float[Tensor, "M n"], draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token, given the distribution `picked` of the token that is picked and the weights `pi` of the draws.

    Example:
        >>> p, q = torch.tensor([[0.3, 0.7]]), torch.tensor([[0.6, 0.4]])
        >>> selection_probs(p, q, torch.tensor([[1.0]]), torch.tensor([[0]])).tolist()
        [[0.5, 0.5]]
    """
    x = draws.clamp(min=0)
    q_drawn = picked.gather(1, x)
    p_drawn = p.gather(1, x)
    accept = torch.where(q_drawn > 0, p_drawn / q_drawn, 0.0).clamp(max=1)
    rejected = (pi * (1 - accept)).sum(1, keepdim=True)
    return (rejected * residual(p, picked)).scatter_add(1, x, pi * accept)


Select = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(p [M, V], q [M, V], draws [M, n], two or more of each row) -> distribution of the picked token [M, V], weights of the draws [M, n]."""


def selected(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"], select: Select
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token where iid draws are selected from, wherever that overlaps more with p than the first draw does."""
    pi = torch.zeros_like(draws, dtype=p.dtype)
    pi[:, 0] = 1.0
    several = ((draws >= 0).sum(1) > 1).nonzero()[:, 0]
    P = p[several]
    Q = q[several]
    distribution, weights = select(P, Q, draws[several])
    better = overlap(P, distribution) >= overlap(P, Q)
    at = several[better]
    return selection_probs(
        p, q.index_copy(0, at, distribution[better]), pi.index_copy(0, at, weights[better]), draws
    )


def highest_probs(
    p: Float[Tensor, "B V"], q: Float[Tensor, "B V"], chance: Float[Tensor, "B M"]
) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B V"], Int[Tensor, "B V"]]:
    """Distribution of the drawn token with the largest p/q (ties by token id; q = 0 last), mass of q below each token, and rank of each token.

    chance: Pr(n draws), n = 0..M-1.

    Example:
        >>> p, q, two_draws = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 0.0, 1.0]])
        >>> highest_probs(p, q, two_draws)[0].tolist()
        [[0.75, 0.25]]
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, stable=True)
    rank = ranks(order)
    sorted_q = q.gather(-1, order)
    below = (sorted_q.cumsum(-1) - sorted_q).gather(-1, rank)
    distribution = torch.zeros_like(q)
    geometric = torch.zeros_like(q)
    power = torch.ones_like(q)
    for n in range(1, chance.shape[-1]):
        geometric = geometric * below + power  # sum_{j<n} b^j a^(n-1-j)
        power = power * (below + q)
        distribution = distribution + chance[:, n, None] * geometric
    return q * distribution, below, rank
