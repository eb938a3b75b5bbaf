"""Block verification: decide how much of a chain to keep from the whole chain at once.

Sun et al. 2024 (arXiv 2403.10444). Row i is the context after i accepted tokens.

    w_0 = 1     w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))          the PRODUCT is clamped, not each factor
    S_i = sum_y max(0, w_i p_i(y) - q_i(y))     h_i = S_i / (S_i + 1 - w_i)     h_L = w_L
    stop at the largest i with u_i < h_i, u_i independent; then emit N((w_i p_i - q_i)+), or p_L at the leaf

Lossless for one chain drawn from q, and no lossless rule keeps more of a single chain. 1 + E[sum w_i] tokens per step.
Traps: clamping each factor; a residual without the weight; an uncapped last position; stopping at the first failure.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome, TreeShape
from polydraft.papers import method
from polydraft.verifiers.fast.rows import compiled, keep, reweight, soften, surplus
from polydraft.verifiers.fast.walk import EXTRA, STOP, arrays, drawn, outcome
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot
from polydraft.verifiers.traversal import tries


@compiled
def _walk(logits, q, rows, tokens, parents, seed, sample, position, node, token):
    """Stop node and extra token of every batch row; p = softmax(logits)."""
    N, V = logits.shape[1:]
    p, extra_probs = np.empty((N, V), np.float32), np.empty(V)
    stop, weights, scale = np.empty(N), np.empty(N), np.empty(N)
    for b in range(len(node)):
        x, t, last, w = logits[b], tokens[b], 0, 1.0
        weights[0] = w
        stop[:] = 0.0
        while True:
            scale[last] = 1.0 / soften(x[last], p[last])
            if last + 1 == N or parents[b, last + 1] < 0:
                break
            w = keep(w, p[last, t[last + 1]] * scale[last], q[b, rows[b, last + 1], t[last + 1]])
            last += 1
            weights[last] = w
        stop[last], alive = w, 1.0 - w
        for i in range(last - 1, -1, -1):
            h = reweight(weights[i], surplus(weights[i] * scale[i], p[i], 1.0, q[b, rows[b, i + 1]]))
            stop[i] = alive * h
            alive *= 1.0 - h
        n = node[b] = drawn(stop, seed[b], sample[b], position[b], STOP)
        if n >= 0:
            a = weights[n] * scale[n]
            for i in range(V):
                extra_probs[i] = p[n, i] if n == last else max(a * p[n, i] - q[b, rows[b, n + 1], i], 0.0)
            token[b] = drawn(extra_probs, seed[b], sample[b], position[b], EXTRA)


@dataclass(frozen=True)
class Block(LeafToRoot):
    """The verifier: the leaf-to-root sweep of a chain, with a walk."""

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """See `_walk`; for float32 logits and distributions. None where it does not apply, or where logits are faulty."""
        if draft.probs is None or draft.probs.dtype != torch.float32:
            return None
        done = arrays(draft, logits, key)
        _walk(*done)
        return outcome(draft, done)


block = Block(method("block", "Block verification", "2403.10444", {DraftSampling.IID}, {TreeShape.CHAIN}), tries)
"""The verifier."""
