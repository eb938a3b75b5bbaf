"""Selection by ratio: of the iid drafts the one with the largest p/q is picked, then tested.

The closed-form selector of two-step importance selection (Khisti et al. 2024, arXiv 2410.18234; the order is that of greedy
multi-path verification, Thomas & Pal 2026, 2602.16961).

    c_i = q-mass of the tokens up to i in ascending p/q, ties by id      q_I(i) = c_i^n - c_{i-1}^n

Where sum min(p, q_I) is below sum min(p, q) the first draw is picked instead. Good for few draws of a weak drafter; one sort.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import FIXED, DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.selection import highest_probs, selected


def emitted_probs(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
        >>> emitted_probs(p, q, torch.tensor([[1, 0]])).tolist()
        [[1.0, 0.0]]
    """
    return selected(p, q, draws, _highest)


def _highest(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"]
) -> tuple[Tensor, Tensor]:
    drawn = draws >= 0
    distribution, _, rank = highest_probs(
        p, q, torch.nn.functional.one_hot(drawn.sum(1), draws.shape[1] + 1).to(p.dtype)
    )
    highest = torch.where(drawn, rank.gather(1, draws.clamp(min=0)), -1).argmax(1, keepdim=True)
    return distribution, torch.zeros_like(draws, dtype=p.dtype).scatter(1, highest, 1.0)


max_ratio = PerNode(
    method("max_ratio", "Importance selection by ratio", "2410.18234", {DraftSampling.IID}, FIXED),
    emitted_probs,
)
"""The verifier."""
