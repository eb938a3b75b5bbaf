"""Traversal verification: try the children of a node in draw order, deepest first, and keep what their rejection leaves.

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
without replacement, and keeps a little less of iid draws.
Traps: repeated draws dropped while c_j stays q; children re-sorted; w <- S / (1 - q(x)).
"""

import numpy as np

from polydraft.core import DraftSampling
from polydraft.papers import method
from polydraft.verifiers.fast.rows import compiled, copy_normalised, reject, total
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, opened, tried

INDEPENDENT = DraftSampling.INDEPENDENT.value
POINT_MASS = DraftSampling.POINT_MASS.value
WITHOUT_REPLACEMENT = DraftSampling.WITHOUT_REPLACEMENT.value
GREEDY_PLUS_ONE = DraftSampling.GREEDY_PLUS_ONE.value
_SHARED_DRAWS = DraftSampling.COUPLED, DraftSampling.LISTED, DraftSampling.SYSTEMATIC
"""Given the draws before it, a draw is no draw from a row."""


@compiled
def without(q, x):
    """The distribution without token x, summed anew; all zero where nothing else is left."""
    q[x] = 0.0
    s = total(q)
    if s > 0.0:
        for t in range(q.size):
            q[t] /= s


@compiled
def _one_hot(q, x):
    q[:] = 0.0
    q[x] = 1.0


@compiled
def tries(contexts, sweep, residual):
    """The rule at one context; see `lift.leaf_to_root.Tries`."""
    rest, q = np.empty(sweep.p.shape[2]), np.empty(sweep.p.shape[2])
    for i in range(len(contexts)):
        b, v = contexts[i]
        n, w, turn = opened(sweep, b, v, rest, q, residual), sweep.weight[b, v], 0
        if n == 0:
            continue
        draws = sweep.draws[b, v, :n]
        if sweep.sampling == GREEDY_PLUS_ONE:
            draws = np.roll(draws, 1)
        tokens = sweep.tokens[b][draws]
        if sweep.sampling == GREEDY_PLUS_ONE:
            for x in tokens[1:]:
                without(q, x)
        for j in range(n):
            x = tokens[j]
            if sweep.sampling == INDEPENDENT and j > 0:
                copy_normalised(sweep.q[b, sweep.rows[b, draws[j]]], q)
            if sweep.sampling == WITHOUT_REPLACEMENT and j > 0:
                without(q, tokens[j - 1])
            elif sweep.sampling == POINT_MASS or (sweep.sampling == GREEDY_PLUS_ONE and (j > 0 or q[x] == 0.0)):
                _one_hot(q, x)
            if (tokens[:j] == x).any():
                w = reject(w, rest, q)
                continue
            remaining = tried(sweep, b, v, turn, draws[j], w, rest, q)
            if remaining < 0.0:
                break
            w, turn = remaining, turn + 1
        sweep.accept[b, v] = w
        if residual.size:
            residual[i] = rest


traversal = LeafToRoot(method("traversal", "Traversal verification", "2505.12398", {*DraftSampling} - {*_SHARED_DRAWS}), tries)
"""The verifier."""

traversal_merged = LeafToRoot(
    method(
        "traversal_merged",
        "Traversal verification, equal siblings merged",
        "2505.12398",
        {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT},
    ),
    tries,
    merged=True,
)
"""The verifier that counts equal siblings once."""
