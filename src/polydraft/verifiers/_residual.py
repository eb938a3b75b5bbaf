"""The few pieces that rules share: positive part, normalising, and what an empty residual means.

An empty residual arises only where two laws are equal up to rounding; a rejection then has probability 0, and the law to
go on with is stated by the caller. Never a uniform law and never an added constant: both emit tokens with p = 0.
"""

from jaxtyping import Float
from torch import Tensor

__all__ = ["normalise", "normalise_or", "positive_part"]


def positive_part(x: Tensor) -> Tensor:
    """max(x, 0), elementwise."""
    return x.clamp(min=0)


def normalise(x: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """x / sum(x) over the last axis; the sums must be positive."""
    return x / x.sum(-1, keepdim=True)


def normalise_or(x: Float[Tensor, "*B V"], *, otherwise: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """x / sum(x), or `otherwise` where the sum is 0.

    Example:
        >>> import torch
        >>> normalise_or(torch.zeros(2), otherwise=torch.tensor([0.25, 0.75])).tolist()
        [0.25, 0.75]
    """
    total = x.sum(-1, keepdim=True)
    return (x / total.where(total > 0, total.new_ones(()))).where(total > 0, otherwise)
