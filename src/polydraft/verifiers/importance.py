"""Importance selection by linear programme: of two drafts pick the one by optimal weights; more drafts play a tournament.

Khisti et al. 2024 (arXiv 2410.18234), also for drafts of different models.

    w_ij   probability to pick i of {i, j}      m_ij = a_i b_j + a_j b_i      a, b  distributions of the two drafts
    q_I(i) = a_i b_i + sum_{j != i} w_ij m_ij
    maximise sum z_i,  z_i <= p_i,  z_i <= q_I(i),  0 <= w_ij = 1 - w_ji <= 1

    truncated    w is free among the first s tokens by p - a b only; elsewhere the earlier one in this order wins
    tournament   the winner of the first two, whose distribution is q_I, against the third draft, and so on

The programme is a flow: each pair hands its mass m_ij out to its two tokens, of which token i can use p_i. From "the earlier one
wins", mass is led along shortest paths of pairs from tokens that have too much to tokens that lack some, until no path is
left: a maximal flow, which is the optimum, by levels (Dinitz 1970): O(s^2) for each of a few levels.

With s >= V and two drafts it attains the optimum. Lossless whatever the flow is: w is used as it is, and q_I is computed
from that w. Each stage picks its first or its second draft always where that overlaps more with p.
Trap: q in the place of q_I, which accepts what a tournament favours too often.
Cost: n draws of a node: time O(n (V log V + levels s^2)), memory O(V + s^2). A stage sorts the rows of all contexts
in one call and solves their programmes in another.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, gather, host, like, namespace, put, scatter, take
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import ranks
from polydraft.verifiers.selection import first_draw, overlap, selection_probs

FREE_TOKENS = 256
"""Two drafts of the embedded pair are accepted with .848, .876, .891, .901 at 32, 128, 256, 512 (K-SEQ .864, optimum .906), in .4, .4, .9, 6.7 ms a context."""
NOTHING = 1e-15
"""Mass that is not worth a path: rounding of masses that sum to one."""


@dataclass(frozen=True)
class Pairs:
    """Weights for M pairs of drafts.

    distribution: [M, V] q_I.  rank: [M, V] place of each token; the lower place wins.  free: [M, s, s] w among the first s places.
    fixed_choice: [M] 0 where w decides, 1 where the first draft is picked whatever they are, 2 the second.
    """

    distribution: Float[Array, "M V"]
    rank: Int[Array, "M V"]
    free: Float[Array, "M s s"]
    fixed_choice: Int[Array, " M"]

    def first_wins(self, i: Int[Array, "M C"], j: Int[Array, "M C"]) -> Float[Array, "M C"]:
        """w_ij of tokens i (first draft) and j (second); 1 where they are equal."""
        xp = namespace(self.free)
        a = gather(self.rank, i)
        b = gather(self.rank, j)
        s = self.free.shape[1]
        pair = xp.clip(a, max=s - 1) * s + xp.clip(b, max=s - 1)
        w = gather(xp.reshape(self.free, (-1, s * s)), pair)
        is_free = (a < s) & (b < s)
        w = xp.where(is_free, w, xp.astype(a < b, w.dtype))
        w = xp.where(i == j, 1.0, w)
        which = self.fixed_choice[:, None]
        return xp.where(which == 0, w, xp.astype(which == 1, w.dtype))


@njit(cache=True)
def _levels(excess, given, level, queue):
    """Of each token how many pairs away it is from one that has too much, -1 where no path leads; whether one that lacks some is reached."""
    s = excess.size
    size = 0
    for i in range(s):
        level[i] = -1
        if excess[i] > NOTHING:
            level[i] = 0
            queue[size] = i
            size += 1
    at = 0
    is_reached = False
    while at < size:
        i = queue[at]
        at += 1
        for j in range(s):
            if level[j] < 0 and given[i, j] > NOTHING:
                level[j] = level[i] + 1
                queue[size] = j
                size += 1
                is_reached = is_reached or excess[j] < -NOTHING
    return is_reached


@njit(cache=True)
def _hand_on(source, excess, given, level, following, path):
    """Lead mass from one token along paths of rising levels until it has none too much or no path is left."""
    s = excess.size
    depth = 0
    path[0] = source
    while excess[source] > NOTHING:
        i = path[depth]
        if depth > 0 and excess[i] < -NOTHING:
            mass = min(excess[source], -excess[i])
            for k in range(depth):
                mass = min(mass, given[path[k], path[k + 1]])
            for k in range(depth):
                given[path[k], path[k + 1]] -= mass
                given[path[k + 1], path[k]] += mass
            excess[source] -= mass
            excess[i] += mass
            depth = 0
            continue
        while following[i] < s:
            j = following[i]
            if level[j] == level[i] + 1 and given[i, j] > NOTHING:
                break
            following[i] += 1
        if following[i] < s:
            depth += 1
            path[depth] = following[i]
        elif depth == 0:
            return
        else:
            depth -= 1
            following[path[depth]] += 1


@njit(cache=True)
def _balance(excess, given):
    """A maximal flow from tokens with too much to those that lack some: by levels, all shortest paths at once."""
    s = excess.size
    level = np.empty(s, np.int64)
    queue = np.empty(s, np.int64)
    path = np.empty(s, np.int64)
    following = np.empty(s, np.int64)
    while _levels(excess, given, level, queue):
        following[:] = 0
        for i in range(s):
            if level[i] == 0:
                _hand_on(i, excess, given, level, following, path)


@njit(cache=True)
def _free_weights(p, a, b, base, w):
    """w [M, s, s] of the maximal flows; p, a, b [M, s] at the first s places, base [M, s] what each token has anyway."""
    M, s = p.shape
    given = np.empty((s, s))
    excess = np.empty(s)
    for k in range(M):
        given[:] = 0.0
        for i in range(s):
            excess[i] = base[k, i] - p[k, i]
            for j in range(i + 1, s):
                given[i, j] = a[k, i] * b[k, j] + a[k, j] * b[k, i]
                excess[i] += given[i, j]
        _balance(excess, given)
        for i in range(s):
            w[k, i, i] = 1.0
            for j in range(i + 1, s):
                m = given[i, j] + given[j, i]
                w[k, i, j] = given[i, j] / m if m > 0.0 else 1.0
                w[k, j, i] = 1.0 - w[k, i, j]


def _after(x: Float[Array, "M V"]) -> Float[Array, "M V"]:
    """Sum of what comes later in each row, from the small end."""
    xp = namespace(x)
    from_here = xp.flip(xp.cumulative_sum(xp.flip(x, axis=1), axis=1), axis=1)
    return xp.concat([from_here[:, 1:], xp.zeros_like(x[:, :1])], axis=1)


def select_pairs(
    p: Float[Array, "M V"], a: Float[Array, "M V"], b: Float[Array, "M V"], free_tokens: int = FREE_TOKENS
) -> Pairs:
    """The best weights for a draft from each row of a and one from the same row of b.

    Example:
        >>> p, q = np.array([[0.5, 0.5]]), np.array([[0.9, 0.1]])
        >>> found = select_pairs(p, q, q)  # the optimum for two drafts is 0.69
        >>> round(overlap(p, found.distribution).item(), 6)
        0.69
    """
    xp = namespace(p)
    order = xp.argsort(b * a - p, axis=1, stable=True)
    rank = ranks(order)
    P, A, B = (gather(x, order) for x in (p, a, b))
    distribution, free = _picked_in_order(P, A, B, min(free_tokens, p.shape[1]))
    own_order = scatter(distribution, order, distribution)
    fixed_choice = xp.argmax(xp.stack([overlap(p, x) for x in (own_order, a, b)]), axis=0)
    only = fixed_choice[:, None]
    picked = xp.where(only == 0, own_order, xp.where(only == 1, a, b))
    return Pairs(picked, rank, free, fixed_choice)


def _picked_in_order(
    p: Float[Array, "M V"], a: Float[Array, "M V"], b: Float[Array, "M V"], s: int
) -> tuple[Float[Array, "M V"], Float[Array, "M s s"]]:
    """q_I and the weights among the first s places, of rows that stand in the order of places."""
    xp = namespace(p)
    later_a = _after(a)
    later_b = _after(b)
    earlier_wins = a * b + a * later_b + b * later_a
    F = a[:, :s]
    G = b[:, :s]
    base = F * G + F * later_b[:, s - 1 : s] + G * later_a[:, s - 1 : s]
    w = np.empty((len(p), s, s))
    _free_weights(*(host(x).astype(np.float64, copy=False) for x in (p[:, :s], F, G, base)), w)
    free = xp.astype(like(w, p), p.dtype)
    m = F[:, :, None] * G[:, None] + F[:, None] * G[:, :, None]
    with_itself = 2 * F * G
    among_free = base + xp.sum(free * m, axis=2) - with_itself
    return xp.concat([among_free, earlier_wins[:, s:]], axis=1), free


def emitted_probs(
    p: Float[Array, "M V"],
    q: Float[Array, "M V"] | Float[Array, "M n V"],
    draws: Int[Array, "M n"],
    free_tokens: int = FREE_TOKENS,
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw. q: one distribution a context, or one a draw.

    Example:
        >>> p = np.array([[0.25, 0.75]])
        >>> emitted_probs(p, p, np.array([[0, 1]]))[0].sum().item()
        1.0
    """
    xp = namespace(p)
    distribution = xp.asarray(q if q.ndim == 2 else q[:, 0], copy=True)
    pi = first_draw(draws, p)
    for k in range(1, draws.shape[1]):
        at = np.flatnonzero(host(draws)[:, k] >= 0)
        challenger = take(q, at) if q.ndim == 2 else take(q[:, k], at)
        pairs = select_pairs(take(p, at), take(distribution, at), challenger, free_tokens)
        x = take(draws, at)
        stays = pairs.first_wins(x[:, :k], xp.broadcast_to(x[:, k : k + 1], (len(at), k)))
        before = take(pi, at)
        held = before[:, :k] * stays
        handed_on = xp.sum(before[:, :k] * (1 - stays), axis=1, keepdims=True)
        pi = put(pi, (at,), xp.concat([held, handed_on, before[:, k + 1 :]], axis=1))
        distribution = put(distribution, (at,), pairs.distribution)
    return selection_probs(p, distribution, pi, draws)


def of(free_tokens: int) -> PerNode:
    """The verifier whose weights are free among so many tokens, `s` of the paper: more accept more and take longer.

    Raises:
        InvalidInputError: fewer than two.

    Example:
        >>> of(256).info.name
        'importance'
    """
    if free_tokens < 2:
        raise InvalidInputError(
            f"free_tokens={free_tokens} was given; expected at least 2, the tokens of one pair. Give more: {FREE_TOKENS} is the default."
        )
    return PerNode(INFO, partial(emitted_probs, free_tokens=free_tokens))


INFO = method(
    "importance",
    "Importance selection, truncated linear programme",
    "2410.18234",
    {DraftSampling.IID, DraftSampling.INDEPENDENT},
    FIXED,
)
importance = of(FREE_TOKENS)
"""The verifier."""
