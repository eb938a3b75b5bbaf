"""Flow verification: the k draws of a context are one tuple of at most V, and a transport from tuples to tokens says what each child is worth.

Our own verifier, for systematic draws (`DraftSampling.SYSTEMATIC`; docs/papers/flow.md has the proof).

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
Cost: k draws of a context: at most V + k pieces, time O(k V) for each of five passes over them, memory O(k V); O(N k V) for a tree.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, first, gather, host, like, namespace, put, scatter_add, take
from polydraft.methods.papers import method
from polydraft.verifiers.block import tries as one_draw
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.draws import without_repeats
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, reweight
from polydraft.verifiers.residual import positive_part
from polydraft.verifiers.walks.flow import LARGEST, SMALLEST, STEPS, walk


def pieces(q: Float[Array, "M V"], k: int) -> tuple[Float[Array, "M P"], Int[Array, "M P k"]]:
    """The distribution of k systematic draws from each row: probabilities, some of them 0, and tuples of token ids.

    Example:
        >>> probability, draws = pieces(np.array([[0.5, 0.25, 0.25]]), 2)
        >>> there = probability > 0
        >>> probability[there].tolist(), draws[there].tolist()
        ([0.5, 0.5], [[0, 1], [0, 2]])
    """
    xp = namespace(q)
    M, V = q.shape
    j = like(np.arange(k), q)
    F = xp.cumulative_sum(q, axis=1)  # one after the other, as `categorical.choose_systematic` adds them up
    F = F / F[:, -1:]
    turns = xp.reshape(xp.clip(k * F[:, :, None] - j, min=0.0, max=1.0), (M, V * k))  # where u changes draw j
    none = xp.zeros_like(F[:, :1])
    edges = xp.concat([none, xp.sort(turns, axis=1), none + 1], axis=1)
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    steps = (middle[:, :, None] + j) / k
    draws = xp.stack([xp.searchsorted(F[m, :], steps[m, ...], side="right") for m in range(M)])
    last = V - 1 - first(xp.flip(q > 0, axis=1))
    return edges[:, 1:] - edges[:, :-1], xp.minimum(draws, last[:, None, None])


class Flow(NamedTuple):
    """order: places of the draws in the order of visits.  turns: of the visits, -1 where a token was visited before.  mass: T(x|D) there, or 0.

    rest: what the context itself emits, unnormalised.
    """

    order: Int[Array, "M k"]
    turns: Int[Array, "M k"]
    mass: Float[Array, "M k"]
    rest: Float[Array, "M V"]


def look_up(row: Float[Array, "M V"], D: Int[Array, "M P k"]) -> Float[Array, "M P k"]:
    """row[D]."""
    xp = namespace(row)
    return xp.reshape(gather(row, xp.reshape(D, (len(D), -1))), D.shape)


def sum_by_token(
    row: Float[Array, "M V"], D: Int[Array, "M P k"], x: Float[Array, "M P k"]
) -> Float[Array, "M V"]:
    """Sums of x over the places where D holds each token, as a row like this one."""
    xp = namespace(row)
    return scatter_add(xp.zeros_like(row), xp.reshape(D, (len(D), -1)), xp.reshape(x, (len(x), -1)))


def scaled(
    g: Float[Array, "M V"], r: Float[Array, "M V"], P: Float[Array, "M P"], D: Int[Array, "M P k"]
) -> tuple[Float[Array, "M P k"], Float[Array, "M V"]]:
    """T(x|D) at the first copy of each token of each piece, and what it leaves of g = w p."""
    xp = namespace(g)
    is_new = xp.astype(without_repeats(D) >= 0, g.dtype)

    def shares(a: Float[Array, "M V"]) -> tuple[Float[Array, "M P k"], Float[Array, "M V"]]:
        held = look_up(a, D) * is_new
        part = held / (1.0 + xp.sum(held, axis=-1, keepdims=True))
        return part, sum_by_token(g, D, P[..., None] * part)

    a = xp.clip(g / (r - xp.minimum(g, 0.9 * r)), min=SMALLEST, max=LARGEST)
    for _ in range(STEPS):
        _, E = shares(a)
        a = xp.where(E > 0.0, xp.clip(a * g / E, min=SMALLEST, max=LARGEST), a)
    shared, E = shares(a)
    phi = xp.where(g < E, g / E, 1.0)
    return shared * look_up(phi, D), positive_part(g - phi * E)


def filled(
    T: Float[Array, "M P k"], rest: Float[Array, "M V"], P: Float[Array, "M P"], D: Int[Array, "M P k"]
) -> tuple[Float[Array, "M P k"], Float[Array, "M V"]]:
    """The same once the tuples, in the order of D, have given of what they have left as much as the rest allows."""
    xp = namespace(T)
    remaining = 1.0 - xp.sum(T, axis=-1)
    columns = list[Array]()
    for k in range(D.shape[-1]):
        y = D[..., k : k + 1]
        offered = sum_by_token(rest, y, (P * remaining)[..., None])
        part = xp.clip(xp.where(offered > 0.0, rest / offered, 0.0), max=1.0)
        mass_taken = look_up(part, y)[..., 0]
        columns.append(T[..., k] + mass_taken * remaining)
        rest = positive_part(rest - part * offered)
        remaining = remaining * (1.0 - mass_taken)
    return xp.stack(columns, axis=-1), rest


def transport(
    w: Float[Array, " M"], p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M k"]
) -> Flow:
    """What the children are worth at contexts of weight w whose draws from q these are; rows of p and q sum to 1.

    Example:
        >>> p, q = np.array([[0.2, 0.5, 0.3]]), np.array([[0.6, 0.2, 0.2]])
        >>> with np.errstate(invalid="ignore"):
        ...     flow = transport(np.ones(1), p, q, np.array([[0, 1]]))
        >>> flow.order.tolist(), flow.mass[0].round(3).tolist()
        ([[1, 0]], [0.974, 0.026])
    """
    xp = namespace(p)
    P, D = pieces(q, draws.shape[1])
    P = xp.concat([P, xp.zeros_like(P[:, :1])], axis=1)
    D = xp.concat([D, draws[:, None, :]], axis=1)  # the last one is what was drawn
    T, rest = scaled(w[:, None] * p, xp.clip(draws.shape[1] * q, max=1.0), P, D)
    order = xp.argsort(look_up(q, D), axis=-1, stable=True)
    D = gather(D, order)
    T = gather(T, order)
    T, rest = filled(T, rest, P, D)
    tokens = D[:, -1, :]
    is_new = without_repeats(tokens) >= 0
    mass = gather(scatter_add(xp.zeros_like(p), tokens, T[:, -1, :]), tokens)
    turns = xp.where(is_new, xp.cumulative_sum(xp.astype(is_new, xp.int64), axis=1) - 1, -1)
    return Flow(order[:, -1, :], turns, xp.where(is_new, mass, 0.0), rest)


def weights(mass: Float[Array, "M n"]) -> Float[Array, "M n"]:
    """With which the children are entered, one after the other: their mass over what those before have left.

    Example:
        >>> weights(np.array([[0.5, 0.25, 0.25]])).tolist()
        [[0.5, 0.5, 1.0]]
    """
    xp = namespace(mass)
    remaining = 1.0 - xp.cumulative_sum(mass, axis=1) + mass
    share = xp.where((mass <= 0.0) | (remaining <= 0.0), 0.0, mass / remaining)
    return xp.clip(share, max=1.0)


def _transported(at: Contexts, contexts: Int[np.ndarray, " C"], k: int) -> tuple[Float[Array, " C"], Flow]:
    """Weights of those contexts that have k draws, NaN where one of the draws can be none, and their transport."""
    of_contexts = host(at.tokens)[contexts]
    draws = like(of_contexts[of_contexts >= 0].reshape(-1, k), at.p)
    q = take(at.q, contexts)
    xp = namespace(at.p)
    have_mass = xp.all(gather(q, draws) > 0.0, axis=1)
    weight = xp.where(have_mass, take(at.weight, contexts), xp.nan)
    return weight, transport(weight, take(at.p, contexts), q, draws)


def tries(at: Contexts) -> Decision:
    """One draw is block verification; several, all contexts that have as many at a time."""
    xp = namespace(at.p)
    single = one_draw(at._replace(tokens=at.tokens[:, :1]))
    into = xp.zeros_like(at.tokens, dtype=at.p.dtype)
    into = xp.concat([single.weights, into[:, 1:]], axis=1)
    turns = xp.concat([single.turns, xp.full_like(at.tokens[:, 1:], -1)], axis=1)
    stops = xp.asarray(single.stops, copy=True)
    rest = xp.asarray(single.rest, copy=True)
    counts = (host(at.tokens) >= 0).sum(1) * (host(at.weight) != 0.0)
    for k in range(2, at.tokens.shape[1] + 1):
        contexts = np.flatnonzero(counts == k)
        if not len(contexts):
            continue
        weight, moved = _transported(at, contexts, k)
        places = np.broadcast_to(contexts[:, None], moved.order.shape), host(moved.order)
        into = put(into, places, weights(moved.mass))
        turns = put(turns, places, moved.turns)
        stops = put(stops, (contexts,), reweight(weight, xp.sum(moved.rest, axis=1)))
        rest = put(rest, (contexts,), moved.rest)
    return Decision(into, stops, rest, turns)


flow = LeafToRoot(method("flow", "Flow verification", "", {DraftSampling.SYSTEMATIC}, FIXED), tries, walk)
"""The verifier."""
