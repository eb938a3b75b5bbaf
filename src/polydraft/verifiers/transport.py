"""Optimal transport, solved: a selector of iid drafts whose weights come from the optimal coupling, exactly lossless.

Optimum: Hu et al. 2025 (arXiv 2502.18779). Coupling by convex optimisation over softmax weights: Thomas & Pal 2025 (Global
Resolution, 2511.15898), which is lossless up to its tolerance. Here the optimiser only proposes weights; the distribution q_I of the
picked token is computed from the very weights used (importance selection), so an unfinished optimisation costs acceptance
and never exactness.

    buckets  tokens in ascending p/q, cut where (p + q)/2-mass crosses multiples of 1/m; a bucket counts as one token, and the
             first draw in it stands for it: q_I(t) = q(t) / q(bucket) q_I(bucket)
    psi      P(H) - q(H)^n over the beginnings H of this order; H* = its minimiser
    targets  t_b = P_b less the change of psi's lowest value seen from the other side: at most P_b outside H*, no less than P_b inside
    levels   where psi is that lowest value, drafts inside H serve H alone and all others none of it: a new level begins,
             and draws of the highest level present are picked
    e^a      weights: within that level, bucket b is picked with probability e^a_b / sum over the buckets present
    step     e^a_b <- e^a_b t_b / q_I(b), which ascends the likelihood of the choice model

Exact optimum (up to convergence) where every token has a bucket; else the loss is the spread of p/q within buckets. One draw:
speculative sampling. A sort, and 200 steps over at most 800 sets of buckets; one compiled call for all contexts.
Trap: the optimiser's targets in the place of q_I, which is biased by what the optimisation lacks.
Cost: n draws of a node, m buckets: time O(V log V + 200 x 800 m), memory O(V + 800 m).
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, host, like
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.selection import selected

STEPS = 200
"""Of the scaling, at most; it ends sooner where the targets are met to 1e-13."""
BUCKETS = (1, 24, 16, 12, 10, 9, 8, 8)
"""For 1, 2, ... draws: at most 800 sets of so many buckets. Six for more."""


@njit(cache=True)
def _cut(p, q, m, bucket):
    """Bucket of every token with q > 0 (else -1), and how many there are."""
    V = q.size
    ratio = np.empty(V)
    support = 0
    for t in range(V):
        ratio[t] = p[t] / q[t] if q[t] > 0.0 else np.inf
        support += q[t] > 0.0
        bucket[t] = -1
    order = np.argsort(ratio, kind="mergesort")
    count = 0
    before = -1
    mass = 0.0
    for i in range(V):
        t = order[i]
        if q[t] <= 0.0:
            continue
        place = i if support <= m else min(m - 1, int(m * mass))
        if place != before:
            count += 1
            before = place
        bucket[t] = count - 1
        mass += (p[t] + q[t]) / 2.0
    return count


@njit(cache=True)
def _sets(Q, n):
    """Sets of at most n buckets, [S, n] padded with -1, and the probability that n draws fall in exactly those.

    n! times the coefficient of x^n in the product of (e^(Q_b x) - 1): positive terms only.
    """
    m = Q.size
    room = 0
    ways = 1.0
    factorial = 1.0
    for k in range(1, n + 1):
        ways *= (m - k + 1) / k
        factorial *= k
        room += int(np.rint(ways))
    members = np.full((room, n), -1, np.int64)
    chance = np.empty(room)
    chosen = np.empty(n, np.int64)
    depth = 0
    following = 0
    count = 0
    series = np.zeros((n + 1, n + 1))
    series[0, 0] = 1.0
    while count < room:
        if depth == n or following == m:  # back to the last choice, and on from there
            depth -= 1
            following = chosen[depth] + 1
            continue
        chosen[depth] = following
        for k in range(n + 1):
            series[depth + 1, k] = 0.0
            term = 1.0
            for j in range(1, k + 1):
                term *= Q[following] / j
                series[depth + 1, k] += series[depth, k - j] * term
        depth = depth + 1
        following = following + 1
        members[count, :depth] = chosen[:depth]
        chance[count] = factorial * series[depth, n]
        count += 1
    return members, chance


@njit(cache=True)
def _targets(P, Q, n, target, level):
    """Target and level of every bucket."""
    m = Q.size
    psi = np.zeros(m + 1)
    tight = np.zeros(m + 1, np.bool_)
    inside = 0.0
    drafted = 0.0
    for b in range(m):
        inside += P[b]
        drafted += Q[b]
        psi[b + 1] = inside - min(drafted, 1.0) ** n
    cut = np.argmin(psi)
    lowest = 0.0
    for b in range(cut):
        new = min(lowest, psi[b + 1])
        target[b] = P[b] + lowest - new
        lowest = new
        tight[b + 1] = lowest == psi[b + 1]
    lowest = psi[m]
    for b in range(m - 1, cut - 1, -1):
        new = min(lowest, psi[b])
        target[b] = max(P[b] + new - lowest, 0.0)
        lowest = new
        tight[b] = lowest == psi[b]
    at = 0
    for b in range(m):
        at += tight[b]
        level[b] = at


@njit(cache=True)
def _keep_highest(members, level):
    """Of each set the buckets of its highest level, in front; the rest becomes -1."""
    for s in range(len(members)):
        top = level[members[s, 0]]
        size = 0
        for b in members[s]:
            if b >= 0:
                top = max(top, level[b])
        for k in range(members.shape[1]):
            b = members[s, k]
            if b >= 0 and level[b] == top:
                members[s, size] = b
                size += 1
        members[s, size:] = -1


@njit(cache=True)
def _picked(members, chance, weight, picked):
    """picked[b] = probability that bucket b is picked."""
    n = members.shape[1]
    picked[:] = 0.0
    for s in range(len(members)):
        total = 0.0
        size = 0
        while size < n and members[s, size] >= 0:
            total += weight[members[s, size]]
            size += 1
        share = chance[s] / total
        for k in range(size):
            picked[members[s, k]] += share * weight[members[s, k]]


@njit(cache=True)
def _select(p, q, n, m, bucket, weight, level):
    """Fill buckets, weights and levels; returns q_I of the buckets over their q-mass."""
    count = _cut(p, q, m, bucket)
    P = np.zeros(count)
    Q = np.zeros(count)
    for t in range(q.size):
        if bucket[t] >= 0:
            P[bucket[t]] += p[t]
            Q[bucket[t]] += q[t]
    Q /= Q.sum()
    target = np.empty(count)
    picked = np.empty(count)
    _targets(P, Q, n, target, level)
    members, chance = _sets(Q, n)
    _keep_highest(members, level)
    weight[:] = 0.0
    weight[:count] = target / Q + 1e-12
    for _ in range(STEPS):
        _picked(members, chance, weight, picked)
        furthest = 0.0
        for b in range(count):
            if picked[b] > 0.0:
                furthest = max(furthest, abs(target[b] - picked[b]))
                weight[b] = min(max(weight[b] * target[b] / picked[b], 1e-100), 1e100)
        if furthest < 1e-13:
            break
    _picked(members, chance, weight, picked)
    return picked / chance.sum() / Q


@njit(cache=True)
def _selected_probs(q, bucket, share, distribution):
    for t in range(q.size):
        distribution[t] = q[t] * share[bucket[t]] if bucket[t] >= 0 else 0.0


@njit(cache=True)
def _select_all(p, q, draws, count, room, distribution, pi):
    """distribution [M, V] and weights pi [M, n] of the draws, for every context with more than one; room: buckets by number of draws."""
    bucket = np.empty(q.shape[1], np.int64)
    weight = np.empty(room.max())
    level = np.empty(room.max(), np.int64)
    for i in range(len(draws)):
        n = count[i]
        _selected_probs(
            q[i], bucket, _select(p[i], q[i], n, room[n - 1], bucket, weight, level), distribution[i]
        )
        top = -1
        total = 0.0
        for c in range(n):
            top = max(top, level[bucket[draws[i, c]]])
        for c in range(n):
            held = bucket[draws[i, c]]
            first = True
            for earlier in range(c):
                first = first and bucket[draws[i, earlier]] != held
            pi[i, c] = weight[held] if first and level[held] == top else 0.0
            total += pi[i, c]
        pi[i, :n] /= total


def _room(n: int) -> int:
    return BUCKETS[n - 1] if n <= len(BUCKETS) else 6


def select(
    p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], n: int
) -> tuple[Float[np.ndarray, " V"], Int[np.ndarray, " V"], Float[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """(q_I, bucket of each token or -1, weight and level of each bucket) for n iid draws.

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> distribution = select(p, q, 2)[0]
        >>> round(float(np.minimum(p, distribution).sum()), 9)  # the optimum
        0.69
    """
    m = _room(n)
    bucket = np.empty(len(q), np.int64)
    weight = np.empty(m)
    level = np.zeros(m, np.int64)
    share = _select(p, q, n, m, bucket, weight, level)
    distribution = np.empty(len(q))
    _selected_probs(q, bucket, share, distribution)
    return distribution, bucket, weight, level


def emitted_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p, q = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]])
        >>> emitted_probs(p, q, np.array([[0, 1]]))[0].round(4).tolist()
        [0.0, 1.0]
    """
    return selected(p, q, draws, _coupled)


def _coupled(p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]) -> tuple[Array, Array]:
    P = host(p)
    Q = host(q)
    X = host(draws)
    room = np.array([_room(n) for n in range(1, draws.shape[1] + 1)])
    distribution = np.empty(P.shape)
    weights = np.zeros(X.shape)
    _select_all(P, Q, X, (X >= 0).sum(1), room, distribution, weights)
    return like(distribution.astype(P.dtype, copy=False), p), like(weights.astype(P.dtype, copy=False), p)


transport = PerNode(
    method(
        "transport",
        "Optimal transport by importance selection",
        "2511.15898 2502.18779",
        {DraftSampling.IID},
        FIXED,
    ),
    emitted_probs,
)
"""The verifier."""
