"""Sample and match: draw the next token from the target; it is accepted if it was drafted.

Miao et al. 2023, SpecInfer's naive sampling (arXiv 2305.09781).

    p  target distribution at the node       y ~ p       accepted iff y is a child

Lossless for any draft whatever, as p does not look at it; for deterministic children it is optimal, acceptance
P(children). At temperature 0 it is the exact-match test.
Trap: after a mismatch y itself is emitted; drawing again from p is biased.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome
from polydraft.papers import method
from polydraft.threads import ROWS
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.walks.rounds import EXTRA, STOP, arrays, drawn, outcome
from polydraft.verifiers.walks.rows import compiled, soften


def emitted_probs(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None, draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token: p, whatever was drawn.

    Example:
        >>> import torch
        >>> emitted_probs(torch.tensor([[0.25, 0.75]]), None, torch.tensor([[1]])).tolist()
        [[0.25, 0.75]]
    """
    return p


@compiled
def _walk(sync, logits, draft_probs, first, tokens, parents, seed, sample, position, node, token):
    """Stop node and extra token of every batch row; p = softmax(logits) is made at nodes that have children."""
    N, V = logits.shape[1:]
    p, here = np.empty((N, V), np.float32), np.empty(V, np.float32)
    stop, reach, scale = np.empty(N), np.empty(N), np.empty(N)
    for b in range(len(node)):
        reach[:], stop[:], scale[:] = 0.0, 0.0, 0.0
        reach[0] = stop[0] = 1.0
        for n in range(1, N):
            if parents[b, n] < 0 or first[b, n] != n:
                continue
            u = first[b, parents[b, n]]
            if scale[u] == 0.0:
                scale[u] = 1.0 / soften(sync, logits[b, u], p[u])
            reach[n] = stop[n] = reach[u] * p[u, tokens[b, n]] * scale[u]
            stop[u] -= reach[n]
        n = node[b] = drawn(np.maximum(stop, 0.0), seed[b], sample[b], position[b], STOP)
        if n < 0:
            continue
        if scale[n] == 0.0:
            scale[n] = 1.0 / soften(sync, logits[b, n], p[n])
        for v in range(V):
            here[v] = p[n, v]
        if not scale[n] > 0.0:
            here[0] = np.nan
        for m in range(1, N):
            if parents[b, m] >= 0 and first[b, parents[b, m]] == n:
                here[tokens[b, m]] = 0.0
        token[b] = drawn(here, seed[b], sample[b], position[b], EXTRA)


@dataclass(frozen=True)
class Match(PerNode):
    """The verifier, with a walk."""

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """The verdict's outcome for p = softmax(logits), float32, in one call; None where logits are faulty."""
        done = arrays(draft, logits, key)
        first = tree.first_copies(draft.tree).numpy()
        with ROWS:
            _walk(*done._replace(draft_probs=done.logits[:, :0], rows=first))
        return outcome(draft, done)


match = Match(method("match", "Sample and match", "2305.09781", DraftSampling), emitted_probs)
"""The verifier."""
