"""Sample and match: draw the next token from the target; it is accepted if it was drafted.

Miao et al. 2023, SpecInfer's naive sampling (arXiv 2305.09781).

    p  target distribution at the node       y ~ p       accepted iff y is a child

Lossless for any draft whatever, as p does not look at it; for deterministic children it is optimal, acceptance
P(children). At temperature 0 it is the exact-match test.
Trap: after a mismatch y itself is emitted; drawing again from p is biased.
Cost: time O(V) for each of the nodes that the walk visits, memory O(V); q is never read.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, host
from polydraft.methods.papers import method
from polydraft.numerics.threads import ROWS
from polydraft.sampling.noise import uniform_at
from polydraft.sampling.truncation import soften
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.walks.rows import compiled
from polydraft.verifiers.walks.steps import EXTRA, STOP, arrays, drawn, outcome


def emitted_probs(
    p: Float[Array, "M V"],
    q: Float[Array, "M V"] | Float[Array, "M n V"] | None,
    draws: Int[Array, "M n"],
) -> Float[Array, "M V"]:
    """Distribution of the emitted token: p, whatever was drawn.

    Example:
        >>> emitted_probs(np.array([[0.25, 0.75]]), None, np.array([[1]])).tolist()
        [[0.25, 0.75]]
    """
    return p


@compiled
def _is_child(parents, first, m, u):
    """Whether the node m hangs on u, or on a copy of it."""
    return parents[m] >= 0 and first[parents[m]] == u


@compiled
def _note_inner(is_inner, parents, first):
    """is_inner = the nodes that have children, by their first copies."""
    is_inner[:] = False
    for m in range(1, len(parents)):
        if parents[m] >= 0:
            is_inner[first[parents[m]]] = True


@compiled
def _reached(reach, p, mass, tokens, parents, first, u):
    """reach = probability of each child of u, where p of this mass is u's; that of a stop at u."""
    stop = reach[u]
    for m in range(u + 1, len(reach)):
        if _is_child(parents, first, m, u) and first[m] == m:
            reach[m] = reach[u] * p[tokens[m]] / mass
            stop -= reach[m]
    return stop


@compiled
def _walk(batch, first):
    """Stop node and extra token of every batch row. first: copies of each node.  Nodes are looked at as they are numbered, up to the one where the stop's uniform falls; p is
    made at those of them that have children, and at the last."""
    sync = batch.sync
    logits = batch.logits
    samplings = batch.samplings
    ids = batch.ids
    N, V = logits.shape[1:]
    p = np.empty(V, np.float32)
    reach = np.empty(N)
    is_inner = np.empty(N, np.bool_)
    for b in range(len(batch.node)):
        tokens = batch.tokens[b]
        parents = batch.parents[b]
        _note_inner(is_inner, parents, first[b])
        reach[:] = 0.0
        reach[0] = 1.0
        noise = batch.seed[b], batch.sample[b], batch.position[b]
        n = -1
        latest = -1  # the node that p is of
        below = 0.0
        until = uniform_at(*noise, STOP, 0)
        mass = 1.0
        for u in range(N):
            if reach[u] == 0.0:
                continue
            stop = reach[u]
            if is_inner[u]:
                mass = soften(sync, logits[b, u], samplings[b], p, ids)
                latest = u
                stop = _reached(reach, p, mass, tokens, parents, first[b], u)
            if not mass > 0.0:  # the row of u is faulty
                n = -1
                break
            below += max(stop, 0.0)
            if stop > 0.0:
                n = u
            if below > until:
                break
        batch.node[b] = n
        if n < 0:
            continue
        if latest != n:
            mass = soften(sync, logits[b, n], samplings[b], p, ids)
        for m in range(1, N):
            if _is_child(parents, first[b], m, n):
                p[tokens[m]] = 0.0
        batch.token[b] = drawn(p, *noise, EXTRA) if mass > 0.0 else -1


@dataclass(frozen=True)
class Match(PerNode):
    """The verifier, with a walk."""

    def walk(
        self, draft: Draft, logits: Float[Array, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
    ) -> Outcome | None:
        """See `core.Walking`."""
        batch = arrays(draft, logits, key, samplings)
        with ROWS:
            _walk(batch, host(tree.first_copies(draft.tree)))
        return outcome(batch)


match = Match(method("match", "Sample and match", "2305.09781", DraftSampling), emitted_probs)
"""The verifier."""
