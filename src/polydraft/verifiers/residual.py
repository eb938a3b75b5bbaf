"""The few pieces that verifiers share: positive part, normalising, what an empty residual means, and places in an order.

An empty residual arises only where two distributions are equal up to rounding; a rejection then has probability 0, and the distribution to
go on with is stated by the caller. Never a uniform distribution and never an added constant: both emit tokens with p = 0.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def positive_part(x: Tensor) -> Tensor:
    """max(x, 0), elementwise."""
    return x.clamp(min=0)


def normalise(x: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """x / sum(x) over the last axis; the sums must be positive."""
    return x / x.sum(-1, keepdim=True)


def normalise_or(x: Float[Tensor, "*B V"], *, otherwise: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """x / sum(x), or `otherwise` where the sum is 0.

    Example:
        >>> normalise_or(torch.zeros(2), otherwise=torch.tensor([0.25, 0.75])).tolist()
        [0.25, 0.75]
    """
    total = x.sum(-1, keepdim=True)
    return (x / total.where(total > 0, total.new_ones(()))).where(total > 0, otherwise)


def ranks(order: Int[Tensor, "M V"]) -> Int[Tensor, "M V"]:
    """Place of each token in an order of them.

    Example:
        >>> ranks(torch.tensor([[2, 0, 1]])).tolist()
        [[1, 2, 0]]
    """
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)
