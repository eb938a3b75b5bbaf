"""Recursive rejection sampling: try the children in draw order, each against what the earlier ones left over.

With replacement: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), Yang et al. 2024 (MCSD, 2401.06706). Without: Jeon et
al. 2024 (RSD, 2402.14160), Chen et al. 2024 (Sequoia, 2402.12374).

    r    what the target still wants: p at first, then N((r - c)+) after each rejection
    c_j  distribution of draw j given the draws before it: q, or q without them, renormalised

    accept x_j with probability min(1, r(x_j) / c_j(x_j)); if all are rejected emit a token of r.

Lossless iff c_j is the true conditional distribution of draw j. `recursive_merged` counts equal siblings once, as draws without replacement
(`lift.draws`); lossless for iid draws and for draws without replacement.
Traps: skipping duplicates of iid draws; verifying draws without replacement with c_j = q; sorting siblings by q.
Cost: K children of a node: time O(K V), memory O(V); only nodes that the walk visits are read.
"""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float, Int

from polydraft.core import DraftSampling
from polydraft.core.arrays import Array, namespace, scatter, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.speculative import accept_probability, residual

Accept = Callable[[Array, Array, Array], Array]
"""(r [M, V], c [M, V], x [M]) -> probability to accept x, [M]."""


def emitted_probs(
    p: Float[Array, "M V"],
    q: Float[Array, "M V"] | Float[Array, "M n V"],
    draws: Int[Array, "M n"],
    *,
    replacement: bool,
    accept_probability: Accept = accept_probability,
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws, in their order; -1 = no draw. q: one distribution a context, or one a draw.

    Example:
        >>> import numpy as np
        >>> p, q = np.array([[0.3, 0.7]]), np.array([[0.6, 0.4]])
        >>> emitted_probs(p, q, np.array([[0, 0]]), replacement=True).round(12).tolist()
        [[0.5, 0.5]]
    """
    xp = namespace(p)
    r = p
    c = q if q.ndim == 2 else q[:, 0]
    distribution = xp.zeros_like(p)
    alive = xp.ones_like(p[:, 0])
    for j in range(draws.shape[1]):
        draw = draws[:, j]
        c = q[:, j] if q.ndim == 3 else c
        there = draw >= 0
        x = xp.clip(draw, min=0)
        accept = xp.where(there, accept_probability(r, c, x), 0.0)
        distribution = scatter_add(distribution, x[:, None], (alive * accept)[:, None])
        alive = alive * (1 - accept)
        r = xp.where(there[:, None], residual(r, c), r)
        if not replacement:
            # Summed anew: 1 - c(x) loses what is left of a sharp distribution.
            without = scatter(c, x[:, None], 0.0)
            c = xp.where(there[:, None], normalise_or(without, otherwise=c), c)
    return distribution + alive[:, None] * r


def _verifier(
    name: str, how: str, papers: str, sampling: set[DraftSampling], *, replacement: bool, merged: bool = False
) -> PerNode:
    info = method(name, f"Recursive rejection, {how}", papers, sampling)
    return PerNode(info, partial(emitted_probs, replacement=replacement), merged)


_WITHOUT = "2402.14160 2402.12374"

recursive = _verifier(
    "recursive",
    "with replacement",
    "2401.06706 2305.09781",
    {DraftSampling.IID, DraftSampling.INDEPENDENT},
    replacement=True,
)
"""The verifier for iid draws."""

recursive_wor = _verifier(
    "recursive_wor", "without replacement", _WITHOUT, {DraftSampling.WITHOUT_REPLACEMENT}, replacement=False
)
"""The verifier for draws without replacement."""

recursive_merged = _verifier(
    "recursive_merged",
    "equal siblings merged",
    _WITHOUT,
    {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT},
    replacement=False,
    merged=True,
)
"""The verifier that counts equal siblings once."""
