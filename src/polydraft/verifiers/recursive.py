"""Recursive rejection sampling: try the children in draw order, each against what the earlier ones left over.

With replacement: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), Yang et al. 2024 (MCSD, 2401.06706). Without: Jeon et
al. 2024 (RSD, 2402.14160), Chen et al. 2024 (Sequoia, 2402.12374).

    r    what the target still wants: p at first, then N((r - c)+) after each rejection
    c_j  distribution of draw j given the draws before it: q, or q without them, renormalised

    accept x_j with probability min(1, r(x_j) / c_j(x_j)); if all are rejected emit a token of r.

Lossless iff c_j is the true conditional distribution of draw j. `recursive_merged` counts equal siblings once, as draws without replacement
(`lift.draws`); lossless for iid draws and for draws without replacement.
Traps: skipping duplicates of iid draws; verifying draws without replacement with c_j = q; sorting siblings by q.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.speculative import accept_probability, residual

Accept = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(r [M, V], c [M, V], x [M]) -> probability to accept x, [M]."""


def emitted_probs(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"] | Float[Tensor, "M n V"],
    draws: Int[Tensor, "M n"],
    *,
    replacement: bool,
    accept_probability: Accept = accept_probability,
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token given the draws, in their order; -1 = no draw. q: one distribution a context, or one a draw.

    Example:
        >>> p, q = torch.tensor([[0.3, 0.7]]), torch.tensor([[0.6, 0.4]])
        >>> emitted_probs(p, q, torch.tensor([[0, 0]]), replacement=True).tolist()
        [[0.5, 0.5]]
    """
    r = p
    c = q if q.ndim == 2 else q[:, 0]
    distribution = torch.zeros_like(p)
    alive = torch.ones_like(p[:, 0])
    for j, draw in enumerate(draws.unbind(1)):
        c = q[:, j] if q.ndim == 3 else c
        there = draw >= 0
        x = draw.clamp(min=0)
        accept = torch.where(there, accept_probability(r, c, x), 0.0)
        distribution = distribution.scatter_add(1, x[:, None], (alive * accept)[:, None])
        alive = alive * (1 - accept)
        r = torch.where(there[:, None], residual(r, c), r)
        if not replacement:
            without = c.scatter(
                1, x[:, None], 0.0
            )  # re-summed: 1 - c(x) loses what is left of a sharp distribution
            c = torch.where(there[:, None], normalise_or(without, otherwise=c), c)
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
