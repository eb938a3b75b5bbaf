"""Traversal verification of merged siblings: equal draws count once, as draws without replacement.

Weng et al. 2025 (arXiv 2505.12398). Distinct tokens in the order of their first appearance follow q without the tokens
before them, however often each was drawn:

    try the distinct children x in that order with weight min(1, w p(x) / c(x)), c = N(q without the tokens before x)
    rejected: p <- N((w p - c)+), S its sum, w <- S / (S + 1 - w)

Lossless for iid draws and for draws without replacement; for iid draws `traversal`, which tests every draw, keeps a little more.
Trap: merging with c = q (total variation 0.012 in a four-token model).
"""

import numpy as np

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, reject
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, enter, one_draw
from polydraft.verifiers.traversal import without

__all__ = ["traversal_merged"]


@compiled
def _tries(contexts, walk, p, q, residual):
    rest, law = np.empty(p.shape[2]), np.empty(p.shape[2])
    for i in range(len(contexts)):
        b, v = contexts[i]
        n, w = walk.counts[b, v], walk.weight[b, v]
        draws = walk.draws[b, v, :n]
        tokens, row = walk.tokens[b][draws], walk.rows[b, draws[0]]
        if w == 0.0:
            continue
        if n == 1 and residual.size == 0:
            one_draw(walk, b, v, p[b, v], q[b, row])
            continue
        copy_normalised(p[b, v], rest)
        copy_normalised(q[b, row], law)
        turn = 0
        for j in range(n):
            x = tokens[j]
            if (tokens[:j] == x).any():
                continue
            into = keep(w, rest[x], law[x])  # pyright: ignore[reportArgumentType]
            enter(walk, b, v, turn, draws[j], into)
            turn += 1
            if into == 1.0:
                break
            w = reject(w, rest, law)
            without(law, x)
        walk.accept[b, v] = w
        if residual.size:
            residual[i] = rest


traversal_merged = LeafToRoot(
    Method(
        name="traversal_merged",
        title="Traversal verification, equal siblings merged",
        authors="Weng et al.",
        year=2025,
        arxiv="2505.12398",
        laws=frozenset({SiblingLaw.IID, SiblingLaw.WITHOUT_REPLACEMENT}),
        shapes=frozenset(TreeShape),
    ),
    _tries,
)
"""The verifier."""
