"""Block verification: decide how much of a chain to keep from the whole chain at once.

Sun et al. 2024 (arXiv 2403.10444). Row i is the context after i accepted tokens.

    w_0 = 1     w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))          the PRODUCT is clamped, not each factor
    S_i = sum_y max(0, w_i p_i(y) - q_i(y))     h_i = S_i / (S_i + 1 - w_i)     h_L = w_L
    stop at the largest i with u_i < h_i, u_i independent; then emit N((w_i p_i - q_i)+), or p_L at the leaf

Lossless for one chain drawn from q, and no lossless rule keeps more of a single chain. 1 + E[sum w_i] tokens per call.
Traps: clamping each factor; a residual without the weight; an uncapped last position; stopping at the first failure.
"""

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, Method, NoiseKey, Outcome, SiblingLaw, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.verifiers.fast import device
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, leftover, reweight, soften, surplus, total
from polydraft.verifiers.fast.walk import EXTRA, STOP, arrays, drawn, outcome
from polydraft.verifiers.lift.verdict import TreeVerdict

__all__ = ["Block", "block"]


@compiled
def _weights(p, q, rows, tokens, parents, stop, weights):
    """Fill stop probabilities and weights w of every batch row."""
    for b in range(len(p)):
        w, last = 1.0, 0
        weights[b, 0] = w
        while last + 1 < tokens.shape[1] and parents[b, last + 1] >= 0:
            x, r = tokens[b, last + 1], rows[b, last + 1]
            w = keep(w, p[b, last, x] / total(p[b, last]), q[b, r, x] / total(q[b, r]))
            last += 1
            weights[b, last] = w
        stop[b, last] = w
        alive = 1.0 - w
        for i in range(last - 1, -1, -1):
            r, w = rows[b, i + 1], weights[b, i]
            h = reweight(w, surplus(w / total(p[b, i]), p[b, i], 1.0 / total(q[b, r]), q[b, r]))
            stop[b, i] = alive * h
            alive *= 1.0 - h


@compiled
def _after(p, q, rows, parents, weights, node, law):
    """law = N((w p - q)+) above the leaf, p at the leaf, for every batch row."""
    for b in range(len(node)):
        n = node[b]
        if n + 1 < parents.shape[1] and parents[b, n + 1] == n:
            leftover(weights[b, n], p[b, n], q[b, rows[b, n + 1]], law[b])
        else:
            copy_normalised(p[b, n], law[b])


@compiled
def _walk(logits, q, rows, tokens, parents, seed, sample, position, node, token):
    """Stop node and extra token of every batch row; p = softmax(logits)."""
    N, V = logits.shape[1:]
    p, law = np.empty((N, V), np.float32), np.empty(V)
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
                law[i] = p[n, i] if n == last else max(a * p[n, i] - q[b, rows[b, n + 1], i], 0.0)
            token[b] = drawn(law, seed[b], sample[b], position[b], EXTRA)


def _law(
    p: np.ndarray,
    q: np.ndarray,
    rows: np.ndarray,
    parents: np.ndarray,
    weights: np.ndarray,
    where: torch.device,
    node: Int[Tensor, "B"],
) -> Float[Tensor, "B V"]:
    law = np.empty((len(p), p.shape[-1]))
    _after(p, q, rows, parents, weights, node.cpu().numpy(), law)
    return torch.from_numpy(law).to(where)


def _rule_for(where: torch.device) -> device.Rule:
    """The kernels where there is a GPU and Triton, else torch operations."""
    if where.type == "cuda" and device.has_triton():
        from polydraft.verifiers.fast import triton

        return triton.block
    return device.block


class Block:
    """The verifier."""

    info = Method(
        name="block",
        title="Block verification",
        authors="Sun et al.",
        year=2024,
        arxiv="2403.10444",
        laws=frozenset({SiblingLaw.IID}),
        shapes=frozenset({TreeShape.CHAIN}),
    )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        stop = np.zeros(draft.tree.tokens.shape)
        weights = np.zeros_like(stop)
        p = target_probs.cpu().contiguous().numpy()
        probs = torch.zeros_like(target_probs[:, :1]) if draft.probs is None else draft.probs  # without q nothing can be drawn
        q = probs.cpu().contiguous().numpy()
        rows, tokens, parents = (x.cpu().contiguous().numpy() for x in (draft.rows, draft.tree.tokens, draft.tree.parents))
        _weights(p, q, rows, tokens, parents, stop, weights)
        if np.isnan(stop).any():
            raise InvalidInputError(
                "a drafted token has probability 0 in its row of draft.probs; report the very rows that were sampled."
            )
        where = target_probs.device
        after = partial(_law, p, q, rows, parents, weights, where)
        return TreeVerdict(draft.tree, torch.from_numpy(stop).to(where), after)

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """See `_walk`; for float32 logits and laws. None where it does not apply, or where logits are faulty."""
        if logits.device.type != "cpu":
            return device.walk(_rule_for(logits.device), draft, logits, key)
        if draft.probs is None or draft.probs.dtype != torch.float32:
            return None
        done = arrays(draft, logits, key)
        _walk(*done)
        return outcome(draft, done)


block = Block()
"""The verifier."""
