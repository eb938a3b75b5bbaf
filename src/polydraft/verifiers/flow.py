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

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.papers import method
from polydraft.verifiers.block import tries as one_draw
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot
from polydraft.verifiers.walks.flow import walk
from polydraft.verifiers.walks.rows import reweight

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


def tries(at: Contexts) -> Decision:
    """One draw is block verification; several, at one context after the other, on the host."""
    single, width = one_draw(at._replace(tokens=at.tokens[:, :1])), at.tokens.shape[1]
    into = np.pad(single.weights.cpu().numpy(), ((0, 0), (0, width - 1)))
    turns = np.pad(single.turns.cpu().numpy(), ((0, 0), (0, width - 1)), constant_values=-1)
    assert at.q is not None
    w, p, q, tokens, stops, rest = (
        x.cpu().numpy() for x in (at.weight, at.p, at.q, at.tokens, single.stops, single.rest.clone())
    )
    for i in np.flatnonzero(((tokens >= 0).sum(1) > 1) & (w != 0.0)):
        draws = tokens[i][tokens[i] >= 0]
        weight = w[i] if (q[i, draws] > 0.0).all() else np.nan  # which no draw can do
        flow = transport(weight, p[i], q[i], draws)
        into[i], turns[i] = 0.0, -1
        into[i, flow.places], turns[i, flow.places] = weights(flow.mass), np.arange(len(flow.places))
        stops[i], rest[i] = reweight(weight, flow.rest.sum()), flow.rest
    return Decision(*(torch.from_numpy(x).to(at.p.device) for x in (into, stops, rest, turns)))


flow = LeafToRoot(method("flow", "Flow verification", "", {DraftSampling.SYSTEMATIC}, FIXED), tries, walk)
"""The verifier."""
