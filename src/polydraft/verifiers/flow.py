"""Flow verification: the k draws of a context are one tuple of at most V, and a transport from tuples to tokens says what each child is worth.

Our own rule, for systematic draws (`DraftSampling.SYSTEMATIC`; docs/papers/flow.md has the proof).

    D, P(D)  the pieces: as u runs over [0, 1), the tuple of the k draws changes at most V times
    w        weight with which the context is entered, the root's is 1; what is emitted here has distribution w p
    T(x|D)   >= 0, at most 1 over the distinct x of D, and E[T(x|D)] <= w p(x): the mass that goes on at child x

    children are visited in ascending q, each token once, x with weight T(x|D) / (1 - T visited before)
    then the context itself is accepted with weight S / (S + 1 - w), S = sum rest, and emits N(rest), rest = w p - E[T]

Lossless for any such T, found here by four steps of scaling and a fill:

    a(x) = w p / (r - min(w p, .9 r)), r = min(1, k q)     E(x) = sum over pieces with x of P a(x) / (1 + sum of a over D)
    a <- a w p / E, four times     phi = min(1, w p / E)     T(x|D) = phi(x) a(x) / (1 + sum of a over D)
    fill: in ascending q, draw by draw, a token takes of what its tuples have left as much as its rest allows

One path is block verification, to the last bit. Traps: iid draws; one u for a whole tree; weights T instead of T over what is left; no phi;
E from the marginals of the draws instead of their tuples.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import FIXED, Draft, DraftSampling, NoiseKey, Outcome, TreeShape
from polydraft.noise import uniform_at
from polydraft.papers import method
from polydraft.verifiers.block import _walk as block_walk
from polydraft.verifiers.block import block
from polydraft.verifiers.fast import flow as fast
from polydraft.verifiers.fast.rows import reweight
from polydraft.verifiers.fast.walk import EXTRA, STOP, arrays, drawn, outcome
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Sweep, chains, enter
from polydraft.verifiers.traversal import tries as one_draw

STEPS = 4
"""Of the scaling; two lose 0.1 to 0.4% of the tokens."""
LEAST, MOST = 1e-12, 1e4
"""Of a."""


def pieces(q: Float[np.ndarray, " V"], k: int) -> tuple[Float[np.ndarray, " M"], Int[np.ndarray, "M k"]]:
    """The distribution of k systematic draws from q: probabilities, and tuples of token ids.

    Example:
        >>> probability, draws = pieces(np.array([0.5, 0.25, 0.25]), 2)
        >>> probability.tolist(), draws.tolist()
        ([0.5, 0.5], [[0, 1], [0, 2]])
    """
    F = np.cumsum(q, dtype=np.float64)  # one after the other, as `noise.choose_systematic` adds them up
    F /= F[-1]
    turns = k * F[:, None] - np.arange(k)  # where u changes draw j
    edges = np.unique(np.concatenate([[0.0, 1.0], turns[(turns > 0) & (turns < 1)]]))
    middle = (edges[1:] + edges[:-1]) / 2
    draws = F.searchsorted((middle[:, None] + np.arange(k)) / k, side="right")
    return np.diff(edges), np.minimum(draws, np.flatnonzero(q)[-1])


def first(draws: Int[np.ndarray, "M k"]) -> Bool[np.ndarray, "M k"]:
    """Whether a draw is the first of its token."""
    return ~np.tril(draws[:, :, None] == draws[:, None, :], -1).any(-1)


class Flow(NamedTuple):
    """places: of the draws in the order of visits, each token once.  mass: T(x|D) there.  rest: what the context itself emits, unnormalised."""

    places: Int[np.ndarray, " n"]
    mass: Float[np.ndarray, " n"]
    rest: Float[np.ndarray, " V"]


def scaled(
    g: Float[np.ndarray, " V"], r: Float[np.ndarray, " V"], P: Float[np.ndarray, " M"], D: Int[np.ndarray, "M k"]
) -> tuple[Float[np.ndarray, "M k"], Float[np.ndarray, " V"]]:
    """T(x|D) at the first copy of each token of each piece, and what it leaves of g = w p."""
    new = first(D)

    def shares(a: Float[np.ndarray, " V"]) -> tuple[Float[np.ndarray, "M k"], Float[np.ndarray, " V"]]:
        held = a[D] * new
        part = held / (1.0 + held.sum(1, keepdims=True))
        return part, np.bincount(D.ravel(), (P[:, None] * part).ravel(), len(g))

    with np.errstate(divide="ignore", invalid="ignore"):
        a = np.clip(g / (r - np.minimum(g, 0.9 * r)), LEAST, MOST)
        for _ in range(STEPS):
            _, E = shares(a)
            a = np.where(E > 0.0, np.clip(a * g / E, LEAST, MOST), a)
        shared, E = shares(a)
        phi = np.where(g < E, g / E, 1.0)
    return shared * phi[D], np.maximum(g - phi * E, 0.0)


def filled(
    T: Float[np.ndarray, "M k"], rest: Float[np.ndarray, " V"], P: Float[np.ndarray, " M"], D: Int[np.ndarray, "M k"]
) -> tuple[Float[np.ndarray, "M k"], Float[np.ndarray, " V"]]:
    """The same once the tuples, in the order of D, have given of what they have left as much as the rest allows."""
    T, remaining = T.copy(), 1.0 - T.sum(1)
    for j, y in enumerate(D.T):
        offered = np.bincount(y, P * remaining, len(rest))
        part = np.divide(rest, offered, out=np.zeros_like(rest), where=offered > 0.0).clip(max=1.0)
        T[:, j] += part[y] * remaining
        rest, remaining = np.maximum(rest - part * offered, 0.0), remaining * (1.0 - part[y])
    return T, rest


def transport(w: float, p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], draws: Int[np.ndarray, " k"]) -> Flow:
    """What the children are worth at a context of weight w whose draws from q these are; p and q sum to 1.

    Example:
        >>> p, q = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.2, 0.2])
        >>> flow = transport(1.0, p, q, np.array([0, 1]))
        >>> flow.places.tolist(), flow.mass.round(3).tolist()
        ([1, 0], [0.974, 0.026])
    """
    P, D = pieces(q, len(draws))
    P, D = np.append(P, 0.0), np.vstack([D, draws])  # the last one is what was drawn
    T, rest = scaled(w * p, np.minimum(1.0, len(draws) * q), P, D)
    order = q[D].argsort(1, kind="stable")
    D, T = np.take_along_axis(D, order, 1), np.take_along_axis(T, order, 1)
    T, rest = filled(T, rest, P, D)
    mass, new = np.bincount(D[-1], T[-1], len(p)), first(D[-1:])[0]
    return Flow(order[-1][new], mass[D[-1][new]], rest)


def weights(mass: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """With which the children are entered, one after the other: their mass over what those before have left.

    Example:
        >>> weights(np.array([0.5, 0.25, 0.25])).tolist()
        [0.5, 0.5, 1.0]
    """
    remaining = 1.0 - mass.cumsum() + mass
    return np.divide(mass, remaining, out=np.zeros_like(mass), where=(mass > 0.0) & (remaining > 0.0)).clip(max=1.0)


def tries(contexts: Int[np.ndarray, "M 2"], sweep: Sweep, residual: Float[np.ndarray, "R W"]) -> None:
    """The rule at one context after the other; see `lift.leaf_to_root.Tries`."""
    for i, (b, v) in enumerate(contexts):
        n, w = int(sweep.counts[b, v]), float(sweep.weight[b, v])
        if n == 1:
            one_draw(contexts[i : i + 1], sweep, residual[i : i + 1])
        if n == 1 or w == 0.0:
            continue
        nodes = sweep.draws[b, v, :n]
        tokens = sweep.tokens[b, nodes]
        p, q = (x / x.sum() for x in (sweep.p[b, v].astype(float), sweep.q[b, sweep.rows[b, nodes[0]]].astype(float)))
        if not (q[tokens] > 0.0).all():
            w = np.nan  # which no draw can do
        flow = transport(w, p, q, tokens)
        for turn, (child, into) in enumerate(zip(nodes[flow.places], weights(flow.mass), strict=True)):
            enter(sweep, b, v, turn, child, into)
        s = flow.rest.sum()
        sweep.accept[b, v] = reweight(w, s)
        if residual.size:
            residual[i] = flow.rest / s if s > 0.0 else p


@dataclass(frozen=True)
class FlowRule(LeafToRoot):
    """The verifier, with a walk."""

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """What the verdict samples, for float32 logits and distributions on the host; chains as block verification, which this rule then is.

        None where it does not apply, or where what was looked at is faulty.
        """
        if draft.shape is TreeShape.CHAIN:
            return block.walk(draft, logits, key)
        if draft.probs is None or draft.probs.dtype != torch.float32:
            return None
        done, single = arrays(draft, logits, key), chains(draft.tree.host[1])
        kids, first, depth = (
            x.numpy() for x in (tree.children(draft.tree), tree.first_copies(draft.tree), tree.depths(draft.tree))
        )
        counts, levels, V = (kids >= 0).sum(-1), int(depth.max()) + 1, done.logits.shape[-1]
        p, rest, extra_probs = np.empty((levels, V), np.float32), np.empty((levels, V)), np.empty(V)
        work = fast.room(V, int(counts.max()))
        for b, is_single in enumerate(single.tolist()):
            noise = done.seed[b], done.sample[b], done.position[b]
            if is_single:
                block_walk(*(x[b : b + 1] for x in done))
                continue
            nodes, until = (done.rows[b], done.tokens[b], first[b], kids[b], counts[b], depth[b]), uniform_at(*noise, STOP, 0)
            done.node[b] = fast.walk_row(done.logits[b], done.draft_probs[b], nodes, p, rest, work, until, extra_probs)
            done.token[b] = drawn(extra_probs, *noise, EXTRA) if done.node[b] >= 0 else -1
        return outcome(draft, done)


flow = FlowRule(method("flow", "Flow verification", "", {DraftSampling.SYSTEMATIC}, FIXED), tries, in_turn=True)
"""The verifier."""
