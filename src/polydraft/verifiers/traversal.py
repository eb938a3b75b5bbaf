"""Traversal verification: try the children of a node in draw order, deepest first, and keep what their rejection leaves.

Weng et al. 2025 (arXiv 2505.12398), in a form for any known law of the draws.

    c_j  law of draw j given the draws tried before it      w  weight: P(something at or below the node is accepted)
    try draw j (token x) with weight min(1, w p(x) / c_j(x));  rejected: p <- N((w p - c_j)+), S its sum, w <- S / (S + 1 - w)

    iid                    c_j = q, every draw tried; a repeated token was rejected already, but its update still counts
    without replacement    c_j = q without the tokens tried before
    point mass             c_j = one-hot
    independent            c_j = q_j, as iid
    greedy plus one        the sampled child first, c = q without its siblings; then the others, one-hot

Lossless for all of these, whatever function of the draws so far grew the tree. One chain is block verification.
Traps: repeated draws dropped while c_j stays q; children re-sorted; w <- S / (1 - q(x)).
"""

import numpy as np

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, reject, total
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, enter, one_draw

__all__ = ["traversal", "without"]

INDEPENDENT = SiblingLaw.INDEPENDENT.value
POINT_MASS = SiblingLaw.POINT_MASS.value
WITHOUT_REPLACEMENT = SiblingLaw.WITHOUT_REPLACEMENT.value
GREEDY_PLUS_ONE = SiblingLaw.GREEDY_PLUS_ONE.value


@compiled
def without(law, x):
    """The law without token x, summed anew; all zero where nothing else is left."""
    law[x] = 0.0
    s = total(law)
    if s > 0.0:
        for t in range(law.size):
            law[t] /= s


@compiled
def _one_hot(law, x):
    law[:] = 0.0
    law[x] = 1.0


@compiled
def _tries(contexts, walk, p, q, residual):
    rest, law = np.empty(p.shape[2]), np.empty(p.shape[2])
    for i in range(len(contexts)):
        b, v = contexts[i]
        n, w = walk.counts[b, v], walk.weight[b, v]
        draws = walk.draws[b, v, :n]
        if walk.law == GREEDY_PLUS_ONE:
            draws = np.roll(draws, 1)
        tokens, row = walk.tokens[b][draws], walk.rows[b, draws[0]]
        if w == 0.0:
            continue
        if n == 1 and row >= 0 and residual.size == 0:
            one_draw(walk, b, v, p[b, v], q[b, row])
            continue
        copy_normalised(p[b, v], rest)
        if row >= 0:
            copy_normalised(q[b, row], law)
        if walk.law == GREEDY_PLUS_ONE:
            for x in tokens[1:]:
                without(law, x)
        turn = 0
        for j in range(n):
            x = tokens[j]
            if walk.law == INDEPENDENT and j > 0:
                copy_normalised(q[b, walk.rows[b, draws[j]]], law)
            if walk.law == WITHOUT_REPLACEMENT and j > 0:
                without(law, tokens[j - 1])
            elif walk.law == POINT_MASS or (walk.law == GREEDY_PLUS_ONE and (j > 0 or law[x] == 0.0)):
                _one_hot(law, x)
            if not (tokens[:j] == x).any():
                into = keep(w, rest[x], law[x])  # pyright: ignore[reportArgumentType]
                enter(walk, b, v, turn, draws[j], into)
                turn += 1
                if into == 1.0:
                    break
            w = reject(w, rest, law)
        walk.accept[b, v] = w
        if residual.size:
            residual[i] = rest


traversal = LeafToRoot(
    Method(
        name="traversal",
        title="Traversal verification",
        authors="Weng et al.",
        year=2025,
        arxiv="2505.12398",
        laws=frozenset(SiblingLaw) - {SiblingLaw.COUPLED, SiblingLaw.LISTED},
        shapes=frozenset(TreeShape),
    ),
    _tries,
)
"""The verifier."""
