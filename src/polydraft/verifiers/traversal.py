"""Traversal verification: try the children of a node in draw order, deepest first, and go on with what their rejection leaves.

Weng et al. 2025 (arXiv 2505.12398), in a form for any known distribution of the draws.

    c_j  distribution of draw j given the draws tried before it      w  weight: P(something at or below the node is accepted)
    try draw j (token x) with weight min(1, w p(x) / c_j(x));  rejected: p <- N((w p - c_j)+), S its sum, w <- S / (S + 1 - w)

    iid                    c_j = q, every draw tried; a repeated token was rejected already, but its update still counts
    without replacement    c_j = q without the tokens tried before
    point mass             c_j = one-hot
    independent            c_j = q_j, as iid
    greedy plus one        the sampled child first, c = q without its siblings; then the others, one-hot

Lossless for all of these, whatever function of the draws so far grew the tree. One chain is block verification.
`traversal_merged` counts equal siblings once, as draws without replacement (`lift.draws`); lossless for iid draws and for draws
without replacement, and accepts a little less of iid draws.
Traps: repeated draws dropped while c_j stays q; children re-sorted; w <- S / (1 - q(x)).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Tries
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.walks.traversal import walk

_SHARED_DRAWS = DraftSampling.COUPLED, DraftSampling.LISTED, DraftSampling.SYSTEMATIC
"""Given the draws before it, a draw is no draw from a row."""


def without(q: Float[Tensor, "M V"], x: Int[Tensor, "M n"]) -> Float[Tensor, "M V"]:
    """q without some tokens (-1: none), summed anew; all zero where nothing else is left.

    Example:
        >>> without(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0, -1]])).tolist()
        [[0.0, 0.5, 0.5]]
    """
    removed = torch.zeros_like(q).scatter_add(1, x.clamp(min=0), (x >= 0).to(q.dtype)) > 0
    rest = torch.where(removed, 0.0, q)
    return torch.where(removed.any(1, keepdim=True), normalise_or(rest, otherwise=rest), q)


def tries(at: Contexts) -> Decision:
    """The children in draw order; the sampled one of greedy drafts first."""
    tries = Tries(at)
    count = (at.tokens >= 0).sum(1)
    q = at.q
    every = torch.arange(at.tokens.shape[1], device=at.p.device)
    order = every.expand_as(at.tokens)
    if at.sampling is DraftSampling.GREEDY_PLUS_ONE and q is not None:
        order = torch.where(every < count[:, None], (every - 1) % count[:, None], every)
        q = without(q, torch.where(every < count[:, None] - 1, at.tokens, -1))
    for turn, draw in enumerate(order.unbind(1)):
        x = at.tokens.gather(1, draw[:, None])
        c = torch.zeros_like(at.p).scatter(1, x.clamp(min=0), 1.0)  # of a token that was not drawn
        if q is not None and q.ndim == 3:
            c = q[:, turn]
        elif q is not None and (at.sampling is not DraftSampling.GREEDY_PLUS_ONE or turn == 0):
            c = (
                torch.where(q.gather(1, x.clamp(min=0)) > 0, q, c)
                if at.sampling is DraftSampling.GREEDY_PLUS_ONE
                else q
            )
        tries.attempt(draw, c)
        if at.sampling is DraftSampling.WITHOUT_REPLACEMENT and q is not None:
            q = without(q, x)
    return tries.decision()


traversal = LeafToRoot(
    method("traversal", "Traversal verification", "2505.12398", {*DraftSampling} - {*_SHARED_DRAWS}),
    tries,
    walk,
)
"""The verifier."""

traversal_merged = LeafToRoot(
    method(
        "traversal_merged",
        "Traversal verification, equal siblings merged",
        "2505.12398",
        {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT},
    ),
    tries,
    walk,
    merged=True,
)
"""The verifier that counts equal siblings once."""
