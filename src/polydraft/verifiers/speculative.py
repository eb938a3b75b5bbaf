"""Speculative sampling: accept a sampled draft x with probability min(1, p(x)/q(x)).

Leviathan, Kalman & Matias 2023, Algorithm 1 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).

    p  target distribution at the node       q  draft distribution at the node, the one x was drawn from
    r  residual distribution, proportional to max(0, p - q)

Lossless for one child drawn from q (a chain). Acceptance: sum_x min(p(x), q(x)) = 1 - TV(p, q).
Traps: q must be the distribution after temperature and truncation; drafts that were chosen (top-k, argmax) have no q.
"""

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import DraftSampling, TreeShape
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or, positive_part


def accept_probability(
    p: Float[Tensor, "*M V"], q: Float[Tensor, "*M V"], x: Int[Tensor, "*M"]
) -> Float[Tensor, "*M"]:
    """Chance that the child x is accepted.

    Example:
        >>> import torch
        >>> p, q = torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4])
        >>> accept_probability(p, q, torch.tensor(0)).item()
        0.5
    """
    px = p.gather(-1, x[..., None])
    qx = q.gather(-1, x[..., None])
    return (px / qx).clamp(max=1).squeeze(-1)  # q(x) > 0: x was drawn from q


def residual(p: Float[Tensor, "*M V"], q: Float[Tensor, "*M V"]) -> Float[Tensor, "*M V"]:
    """Distribution of the token that replaces a rejected child."""
    return normalise_or(
        positive_part(p - q), otherwise=p
    )  # empty only where p = q: rejection then has probability 0


def emitted_probs(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token given the one draw."""
    x = draws[:, 0]
    accept = accept_probability(p, q, x)
    distribution = (1 - accept)[:, None] * residual(p, q)
    return distribution.scatter_add(1, x[:, None], accept[:, None])


speculative = PerNode(
    method(
        "speculative", "Speculative sampling", "2211.17192 2302.01318", {DraftSampling.IID}, {TreeShape.CHAIN}
    ),
    emitted_probs,
)
"""The verifier."""
