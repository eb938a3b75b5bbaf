"""Greedy traversal verification (GTV): try the children of a node in the order of p/q, deepest first, wasting no draw.

Our own verifier. It joins the selection of greedy multi-path block verification (Thomas & Pal 2026, arXiv 2602.16961) with the
leaf-to-root walk of traversal verification (Weng et al. 2025, 2505.12398).

    visit(v, w): accepts v or something below it with total probability w; the root has w = 1
    b(t)   bucket of token t: 1/16 octaves of p(t)/q(t); lo_b, hi_b = q-mass below and up to bucket b
    distribution(t) proportional to q(t) sum_{i<n} hi_b^i lo_b^(n-1-i)    the first draw, in draw order, of the highest bucket drawn

    while draws remain: for the tokens x of the highest bucket that holds a draw, first drawn first:
        visit(x, min(1, w p(x) / distribution(x)));  p <- N((w p - distribution)+), S its sum;  w <- S / (S + 1 - w)
        distribution <- q inside the bucket without the tokens tried
      then q <- q below the bucket, and the order is computed anew on the residual p
    accept v with probability w, and emit a token of p

Where drafts already fit (sum min(p, q) > 1 - 0.2/n) all tokens share one bucket, which is traversal verification of merged draws.
The stop node is drawn in the order in which visits end, so that a walk need not look beyond it. One path is block verification, its draw too.
The order gives a child with little below it as much weight as one with much. In trees by position only neighbours in draw order that
go on equally deep share it; such groups, often of one child, are tried in draw order, a child alone against q: on ragged pairs this is
traversal verification itself.
Lossless for iid draws whose number at each node was fixed beforehand; the order may be any function of prefix, rows and residuals,
never of draws not yet looked at.
Traps: merged duplicates, sorted siblings, a trunk token counted once for each path.
Cost: N nodes, K children of each: time O(N K V), a sum by bucket in the place of a sort; memory O(N V).
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, first, gather, host, like, namespace, scatter, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Tries
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.walks.greedy_traversal import (
    BUCKETS,
    FRACTION_BITS,
    GATE,
    HALF,
    LOG2,
    PER_OCTAVE,
    SQRT_HALF,
    walk,
)


def buckets(p: Float[Array, "M V"], q: Float[Array, "M V"], n: Int[Array, " M"]) -> Int[Array, "M V"]:
    """Bucket of every token, rint(16 log2(p/q)) about the middle one; all in one where there is one draw or the gate is closed.

    By a series in float32, as the compiled form: any function of the rows is a legal order.

    Example:
        >>> p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
        >>> buckets(p, q, np.array([2])).tolist()
        [[144, 112, 128]]
    """
    xp = namespace(p)
    order = like(_buckets_of(host(p), host(q)), p)
    shared_mass = xp.sum(xp.minimum(p, q), axis=-1)
    closed = (n == 1) | (shared_mass > 1 - GATE / xp.astype(n, p.dtype))
    return xp.where(closed[:, None], 0, order)


def _buckets_of(p: Float[np.ndarray, "M V"], q: Float[np.ndarray, "M V"]) -> Int[np.ndarray, "M V"]:
    """On the host, as it reads the bits of a number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(p * q > 0, p.astype(np.float32) / q.astype(np.float32), np.float32(0.0))
        bits = ratio.view(np.int32)
        exponent = (bits - np.int32(SQRT_HALF)) >> FRACTION_BITS
        mantissa = (bits - (exponent << FRACTION_BITS)).view(np.float32)
        s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    coefficients = np.array(LOG2, np.float32)
    series = coefficients[0] + z * (coefficients[1] + z * (coefficients[2] + z * coefficients[3]))
    octaves = exponent.astype(np.float32) + s * series
    steps = np.floor(np.float32(PER_OCTAVE) * octaves + np.float32(0.5))
    return np.clip(steps, -HALF, HALF).astype(np.int64) + HALF


def mass_by_bucket(order: Int[Array, "M V"], q: Float[Array, "M V"]) -> Float[Array, "M buckets"]:
    """Sum of q over the tokens of each bucket."""
    none = np.zeros((len(q), BUCKETS), host(q[:1]).dtype)
    return scatter_add(like(none, q), order, q)


def first_of_highest(
    q: Float[Array, "M V"], order: Int[Array, "M V"], n: Int[Array, " M"]
) -> Float[Array, "M V"]:
    """Distribution of the first draw, in draw order, of the highest bucket that holds one of n draws.

    Example:
        >>> first_of_highest(np.array([[0.5, 0.5]]), np.array([[1, 0]]), np.array([2])).tolist()
        [[0.75, 0.25]]
    """
    xp = namespace(q)
    hi = xp.cumulative_sum(mass_by_bucket(order, q), axis=1)
    lo = xp.concat([xp.zeros_like(hi[:, :1]), hi[:, :-1]], axis=1)
    weight = xp.zeros_like(hi)
    n = n[:, None]
    for i in range(int(xp.max(n))):
        below = lo ** xp.astype(xp.clip(n - 1 - i, min=0), q.dtype)
        weight = weight + xp.where(i < n, hi**i * below, 0.0)
    selected = q * gather(weight, order)
    return normalise_or(selected, otherwise=selected)


def _within(q: Float[Array, "M V"], inside: Bool[Array, "M V"]) -> Float[Array, "M V"]:
    """q on some tokens, summed anew; all zero where nothing is left."""
    rest = namespace(q).where(inside, q, 0.0)
    return normalise_or(rest, otherwise=rest)


def tries(at: Contexts) -> Decision:
    """The children in the order of their buckets; neighbours that go on equally deep share one."""
    xp = namespace(at.p)
    tries = Tries(at)
    tokens = at.tokens
    q = at.q
    assert q is not None
    for of_group in _groups(host(at.heights)):
        remaining = like(of_group, q) & (tokens >= 0)
        untried = q
        inside = xp.zeros_like(remaining)
        order = xp.zeros_like(q, dtype=xp.int64)
        selected = q
        while xp.any(remaining | inside):
            opens = ~xp.any(inside, axis=1) & xp.any(remaining, axis=1)  # the next bucket
            count = xp.count_nonzero(remaining, axis=1)
            order = xp.where(opens[:, None], buckets(tries.rest, untried, count), order)
            selected = xp.where(opens[:, None], first_of_highest(untried, order, count), selected)
            bucket = xp.where(remaining | inside, gather(order, xp.clip(tokens, min=0)), -1)
            highest = xp.max(bucket, axis=1, keepdims=True)
            inside = xp.where(opens[:, None], remaining & (bucket == highest), inside)
            remaining = remaining & ~inside
            draw = first(inside)
            x = gather(tokens, draw[:, None])
            tries.attempt(draw, selected, xp.any(inside, axis=1))
            inside = inside & (tokens != x)
            untried = scatter(untried, xp.clip(x, min=0), 0.0)
            selected = _within(untried, order == highest)
            lower = _within(untried, order < highest)
            untried = xp.where(xp.any(inside, axis=1, keepdims=True), untried, lower)
    return tries.decision()


def _groups(heights: Int[np.ndarray, "M n"]) -> list[Bool[np.ndarray, "M n"]]:
    """Which draws are in each group of neighbours that go on equally deep, from the first on."""
    starts = np.pad(np.diff(heights, axis=1) != 0, ((0, 0), (1, 0)))
    number = starts.cumsum(1)
    return [number == group for group in range(int(number.max()) + 1)]


greedy_traversal = LeafToRoot(
    method("greedy_traversal", "Greedy traversal verification (GTV)", "", {DraftSampling.IID}, FIXED),
    tries,
    walk,
)
"""The verifier."""
