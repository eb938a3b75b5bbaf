"""Selection by ratio: of the iid drafts the one with the largest p/q is picked, then tested.

The closed-form selector of two-step importance selection (Khisti et al. 2024, arXiv 2410.18234; the order is that of greedy
multi-path verification, Thomas & Pal 2026, 2602.16961).

    c_i = q-mass of the tokens up to i in ascending p/q, ties by id      q_I(i) = c_i^n - c_{i-1}^n

Where sum min(p, q_I) is below sum min(p, q) the first draw is picked instead. Good for few draws of a weak drafter; one sort.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import ranks
from polydraft.verifiers.selection import emitted_by, overlap

__all__ = ["emitted", "max_ratio"]


def emitted(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | None, draws: Int[Tensor, "M n"]) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
        >>> emitted(p, q, torch.tensor([[1, 0]])).tolist()
        [[1.0, 0.0]]
    """
    assert q is not None
    pi = torch.zeros_like(draws, dtype=p.dtype)
    pi[:, 0] = 1.0
    several = ((draws >= 0).sum(1) > 1).nonzero()[:, 0]
    P, Q, x = p[several], q[several], draws[several]
    law, place = _of_highest(P, Q, x)
    better = overlap(P, law) >= overlap(P, Q)
    at = several[better]
    chosen = torch.zeros_like(x, dtype=p.dtype).scatter(1, place[:, None], 1.0)
    return emitted_by(p, q.index_copy(0, at, law[better]), pi.index_copy(0, at, chosen[better]), draws)


def _of_highest(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"]
) -> tuple[Float[Tensor, "M V"], Int[Tensor, "M"]]:
    """q_I, and which draw is the highest."""
    drawn = draws >= 0
    order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, stable=True)
    rank = ranks(order)
    upto = q.gather(1, order).cumsum(-1)
    upto = upto / upto[:, -1:]
    below = torch.cat([torch.zeros_like(upto[:, :1]), upto[:, :-1]], -1)
    law = torch.zeros_like(q)  # b^n - a^n = (b - a) sum_{j<n} b^j a^(n-1-j), without cancellation
    share = torch.zeros_like(q)
    power = torch.ones_like(q)
    for n in range(1, draws.shape[1] + 1):
        share = share * below + power
        power = power * upto
        law = torch.where((drawn.sum(1) == n)[:, None], share, law)
    picked = torch.where(drawn, rank.gather(1, draws.clamp(min=0)), -1).argmax(1)
    return q * law.gather(1, rank), picked


max_ratio = PerNode(
    Method(
        name="max_ratio",
        title="Importance selection by ratio",
        authors="Khisti et al.",
        year=2024,
        arxiv="2410.18234",
        laws=frozenset({SiblingLaw.IID}),
        shapes=frozenset(TreeShape) - {TreeShape.GROWN},
    ),
    emitted,
)
"""The verifier."""
