"""Sample and match: draw the next token from the target; it is accepted if it was drafted.

Miao et al. 2023, SpecInfer's naive sampling (arXiv 2305.09781).

    p  target law at the node       y ~ p       accepted iff y is a child

Lossless for any draft whatever, as p does not look at it; for deterministic children it is optimal, acceptance
P(children). At temperature 0 it is the exact-match test.
Trap: after a mismatch y itself is emitted; drawing again from p is biased.
"""

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.tree.topdown import TopDown

__all__ = ["emitted", "match"]


def emitted(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None, draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Law of the emitted token: p, whatever was drawn.

    Example:
        >>> import torch
        >>> emitted(torch.tensor([[0.25, 0.75]]), None, torch.tensor([[1]])).tolist()
        [[0.25, 0.75]]
    """
    return p


match = TopDown(
    Method(
        name="match",
        title="Sample and match",
        authors="Miao et al.",
        year=2023,
        arxiv="2305.09781",
        laws=frozenset(SiblingLaw),
        shapes=frozenset(TreeShape),
    ),
    emitted,
)
"""The verifier."""
