"""Typical acceptance (not lossless): accept a drafted token that the target finds likely enough, whatever the draft's distribution.

Cai et al. 2024 (Medusa, arXiv 2401.10774).

    x is accepted iff p(x) > min(eps, delta exp(-H(p)))      H  entropy in nats      usual eps 0.09, delta 0.3
    the longest path of accepted tokens is accepted (equal lengths: the largest sum of log p), then one token of p follows

The output follows the draft's distribution wherever that is accepted: `output_probs` says how far from p. A one-hot p gives exact matching.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, DraftSampling, Method
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, double, host, like, namespace, scatter
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise

EPS = 0.09
DELTA = 0.3


def acceptable(p: Float[Array, "*M V"], eps: float = EPS, delta: float = DELTA) -> Float[Array, "*M V"]:
    """1 for the tokens that are accepted, 0 for the others.

    Example:
        >>> acceptable(np.array([0.9, 0.1, 0.0])).tolist()
        [1.0, 1.0, 0.0]
    """
    xp = namespace(p)
    logs = xp.log(xp.where(p > 0, p, 1.0))
    entropy = -xp.sum(p * logs, axis=-1, keepdims=True)
    return xp.astype(p > xp.clip(delta * xp.exp(-entropy), max=eps), p.dtype)


def output_probs(
    p: Float[Array, "*M V"], q: Float[Array, "*M V"], eps: float = EPS, delta: float = DELTA
) -> Float[Array, "*M V"]:
    """Distribution of the next token for one draft from q: what is accepted of q, and p for the rest.

    Example:
        >>> output_probs(np.array([0.5, 0.5]), np.array([1.0, 0.0])).tolist()
        [1.0, 0.0]
    """
    accepted = q * acceptable(p, eps, delta)
    return accepted + (1 - namespace(p).sum(accepted, axis=-1, keepdims=True)) * p


@dataclass(frozen=True)
class Typical:
    """The verifier, with its two thresholds."""

    info: Method
    eps: float = EPS
    delta: float = DELTA

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        p = normalise(double(target_probs))
        tokens, parents = draft.tree.host
        first = host(tree.first_copies(draft.tree))
        batch = np.arange(len(tokens))[:, None]
        above = np.take_along_axis(first, np.maximum(parents, 0), 1)
        place = batch, above, tokens
        is_good = host(acceptable(p, self.eps, self.delta))[place] > 0
        logs = np.log(np.maximum(host(p)[place], 1e-300))
        end = np.zeros(len(tokens), np.int64)
        _deepest(parents, first, is_good, logs, end)
        none = namespace(p).zeros_like(p[..., 0])
        stop = scatter(none, like(end[:, None], p), 1.0)
        rows = like(batch[:, 0], p)
        return TreeVerdict(draft.tree, stop, lambda at: p[rows, at])


@njit(cache=True)
def _deepest(parents, first, good, logs, end):
    """The node at the end of the longest path of good tokens; among equals that of the largest sum of logs, then the first."""
    B, N = parents.shape
    depth = np.empty(N, np.int64)
    score = np.empty(N)
    for b in range(B):
        depth[:] = -1
        depth[0] = 0
        score[0] = 0.0
        end[b] = 0
        for n in range(1, N):
            u = first[b, parents[b, n]] if parents[b, n] >= 0 else -1
            if u >= 0 and depth[u] >= 0 and good[b, n] and first[b, n] == n:
                depth[n], score[n] = depth[u] + 1, score[u] + logs[b, n]
                best = end[b]
                if depth[n] > depth[best] or (depth[n] == depth[best] and score[n] > score[best]):
                    end[b] = n


typical = Typical(method("typical", "Typical acceptance", "2401.10774", DraftSampling, lossless=False))
"""The verifier."""
