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
Cost: N nodes: time O(N V), a pass over a row for each draw that is tried; memory O(N V).
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import DraftSampling
from polydraft.core.arrays import Array, gather, like, namespace, scatter, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Tries
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.walks.traversal import walk

_SHARED_DRAWS = DraftSampling.COUPLED, DraftSampling.LISTED, DraftSampling.SYSTEMATIC
"""Given the draws before it, a draw is no draw from a row."""


def without(q: Float[Array, "M V"], x: Int[Array, "M n"]) -> Float[Array, "M V"]:
    """q without some tokens (-1: none), summed anew; all zero where nothing else is left.

    Example:
        >>> without(np.array([[0.5, 0.25, 0.25]]), np.array([[0, -1]])).tolist()
        [[0.0, 0.5, 0.5]]
    """
    xp = namespace(q)
    times_removed = scatter_add(xp.zeros_like(q), xp.clip(x, min=0), xp.astype(x >= 0, q.dtype))
    is_removed = times_removed > 0
    rest = xp.where(is_removed, 0.0, q)
    return xp.where(xp.any(is_removed, axis=1, keepdims=True), normalise_or(rest, otherwise=rest), q)


def _point_mass(p: Float[Array, "M V"], x: Int[Array, "M 1"]) -> Float[Array, "M V"]:
    """Distributions of tokens that were not drawn, as rows like p's."""
    xp = namespace(p)
    return scatter(xp.zeros_like(p), xp.clip(x, min=0), 1.0)


def tries(at: Contexts) -> Decision:
    """The children in draw order; the sampled one of greedy drafts first."""
    xp = namespace(at.p)
    tries = Tries(at)
    q = at.q
    is_greedy = at.sampling is DraftSampling.GREEDY_PLUS_ONE and q is not None
    turns = like(np.arange(at.tokens.shape[1]), at.p)
    order = xp.broadcast_to(turns, at.tokens.shape)
    if is_greedy:
        count = xp.count_nonzero(at.tokens >= 0, axis=1)[:, None]
        order = xp.where(turns < count, (turns - 1) % count, turns)  # the last one, then the others
        q = without(q, xp.where(turns < count - 1, at.tokens, -1))
    for turn in range(at.tokens.shape[1]):
        draw = order[:, turn]
        x = gather(at.tokens, draw[:, None])
        if q is None or (is_greedy and turn > 0):
            c = _point_mass(at.p, x)
        elif q.ndim == 3:
            c = q[:, turn]
        elif is_greedy:
            c = xp.where(gather(q, xp.clip(x, min=0)) > 0, q, _point_mass(at.p, x))
        else:
            c = q
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
