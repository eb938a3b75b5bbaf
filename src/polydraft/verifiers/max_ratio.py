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
from polydraft.verifiers.selection import law_of_highest, law_of_selection, overlap

__all__ = ["emitted_law", "max_ratio"]


def emitted_law(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | None, draws: Int[Tensor, "M n"]) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
        >>> emitted_law(p, q, torch.tensor([[1, 0]])).tolist()
        [[1.0, 0.0]]
    """
    assert q is not None
    drawn = draws >= 0
    pi = torch.zeros_like(draws, dtype=p.dtype)
    pi[:, 0] = 1.0
    several = (drawn.sum(1) > 1).nonzero()[:, 0]
    P, Q, x = p[several], q[several], draws[several].clamp(min=0)
    chance = torch.nn.functional.one_hot(drawn[several].sum(1), draws.shape[1] + 1).to(p.dtype)
    law, _, rank = law_of_highest(P, Q, chance)
    highest = torch.where(drawn[several], rank.gather(1, x), -1).argmax(1, keepdim=True)
    better = overlap(P, law) >= overlap(P, Q)
    at = several[better]
    chosen = torch.zeros_like(x, dtype=p.dtype).scatter(1, highest, 1.0)
    return law_of_selection(p, q.index_copy(0, at, law[better]), pi.index_copy(0, at, chosen[better]), draws)


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
    emitted_law,
)
"""The verifier."""
