"""Speculative sampling: accept a sampled draft x with probability min(1, p(x)/q(x)).

Leviathan, Kalman & Matias 2023, Algorithm 1 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).

    p  target distribution at the node       q  draft distribution at the node, the one x was drawn from
    r  residual distribution, proportional to max(0, p - q)

Lossless for one child drawn from q (a chain). Acceptance: sum_x min(p(x), q(x)) = 1 - TV(p, q).
Traps: q must be the distribution after temperature and truncation; drafts that were chosen (top-k, argmax) have no q.
Cost: time and memory O(V) a node; O(N V) for a chain of N.
"""

from jaxtyping import Float, Int

from polydraft.core import DraftSampling, TreeShape
from polydraft.core.arrays import Array, gather, namespace, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or, positive_part


def accept_probability(
    p: Float[Array, "*M V"], q: Float[Array, "*M V"], x: Int[Array, "*M"]
) -> Float[Array, "*M"]:
    """Chance that the child x is accepted.

    Example:
        >>> import numpy as np
        >>> p, q = np.array([0.3, 0.7]), np.array([0.6, 0.4])
        >>> accept_probability(p, q, np.array(0)).item()
        0.5
    """
    px = gather(p, x[..., None])[..., 0]
    qx = gather(q, x[..., None])[..., 0]
    return namespace(p).clip(px / qx, max=1.0)  # q(x) > 0: x was drawn from q


def residual(p: Float[Array, "*M V"], q: Float[Array, "*M V"]) -> Float[Array, "*M V"]:
    """Distribution of the token that replaces a rejected child."""
    return normalise_or(
        positive_part(p - q), otherwise=p
    )  # empty only where p = q: rejection then has probability 0


def emitted_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the one draw."""
    x = draws[:, 0]
    accept = accept_probability(p, q, x)
    distribution = (1 - accept)[:, None] * residual(p, q)
    return scatter_add(distribution, x[:, None], accept[:, None])


speculative = PerNode(
    method(
        "speculative", "Speculative sampling", "2211.17192 2302.01318", {DraftSampling.IID}, {TreeShape.CHAIN}
    ),
    emitted_probs,
)
"""The verifier."""
