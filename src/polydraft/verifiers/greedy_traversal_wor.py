"""Greedy traversal for two draws without replacement: of the last two draws at a node the one of the higher bucket of p/q goes first.

Our own verifier, after GTV (`greedy_traversal`, whose buckets b and gate these are); of one bucket the first drawn goes first.
q is the distribution of what is still to be tried.

    h_t = 1 / (1 - q_t)      C(t)  q-mass of the other tokens up to bucket b(t)      A(t)  sum of q_j h_j over the tokens j below bucket b(t)
    the first token t is tried against  q1(t) = q_t (C(t) h_t + A(t))
    after its rejection the other one   q2(j) proportional to q_j (h_t [b(j) <= b(t)] + h_j [b(j) < b(t)]), j other than t
    each try as in traversal verification: weight min(1, w p(x) / distribution(x)); rejected: p <- N((w p - distribution)+), w <- S / (S + 1 - w)

More than two draws: all but the last two are tried in draw order, as in `traversal`, so one and two draws are what it is made
for. Where drafts already fit all tokens share one bucket, which is draw order for those two as well.
Lossless for draws without replacement, whatever grew the tree, if the number of draws at each node was fixed before its first.
Traps: q2 without h_j, as if the higher token had surely been drawn first; a last draw made only after a look at the first (0.14).
Cost: N nodes, K children of each: time O(N K V), memory O(N V).
"""

from typing import NamedTuple

from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, gather, namespace, scatter
from polydraft.methods.papers import method
from polydraft.verifiers.greedy_traversal import buckets, mass_by_bucket
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Tries
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.traversal import without
from polydraft.verifiers.walks.greedy_traversal_wor import walk


def inverse_others(q: Float[Array, "M V"]) -> Float[Array, "M V"]:
    """h; 1 - q of the likeliest token is summed without it, as a difference would lose what a sharp distribution leaves.

    Example:
        >>> import numpy as np
        >>> inverse_others(np.array([[0.75, 0.25]])).tolist()
        [[4.0, 1.333...]]
    """
    xp = namespace(q)
    top = xp.argmax(q, axis=1, keepdims=True)
    rest = xp.sum(scatter(q, top, 0.0), axis=1, keepdims=True)
    return 1 / scatter(rest + gather(q, top) - q, top, rest)


def higher(q: Float[Array, "M V"], order: Int[Array, "M V"], h: Float[Array, "M V"]) -> Float[Array, "M V"]:
    """q1.

    Example:
        >>> import numpy as np
        >>> q = np.array([[0.5, 0.25, 0.25]])
        >>> higher(q, np.array([[2, 1, 0]]), inverse_others(q)).tolist()  # pairs of ids 0 and 1, 0 and 2, 1 and 2: 5/12, 5/12, 2/12
        [[0.8333..., 0.1666..., 0.0]]
    """
    xp = namespace(q)
    top = xp.argmax(q, axis=1, keepdims=True)
    bucket_of_top = gather(order, top)
    mass = mass_by_bucket(
        order, scatter(q, top, 0.0)
    )  # the likeliest token is added last: it would drown the rest
    up_to = xp.cumulative_sum(mass, axis=1)
    ratio = mass_by_bucket(order, q * h)
    of_top = xp.where(order >= bucket_of_top, gather(q, top), 0.0)
    C = xp.clip(gather(up_to, order) - q + of_top, min=0.0)
    C = scatter(C, top, gather(up_to, bucket_of_top))
    A = gather(xp.cumulative_sum(ratio, axis=1) - ratio, order)
    return normalise_or(q * (C * h + A), otherwise=q)


def lower(
    q: Float[Array, "M V"], order: Int[Array, "M V"], h: Float[Array, "M V"], t: Int[Array, "M 1"]
) -> Float[Array, "M V"]:
    """q2 given the higher token t."""
    xp = namespace(q)
    bucket = gather(order, t)
    before = xp.where(order <= bucket, gather(h, t), 0.0) + xp.where(order < bucket, h, 0.0)
    return normalise_or(scatter(q * before, t, 0.0), otherwise=q)


class LastTwo(NamedTuple):
    """The last two draws of contexts. first: place of the one that is tried first.  higher, lower: distributions of that and of the other."""

    first: Int[Array, " M"]
    higher: Float[Array, "M V"]
    lower: Float[Array, "M V"]


def _last_two(at: Contexts, rest: Float[Array, "M V"], q: Float[Array, "M V"], turn: int) -> LastTwo:
    """Of contexts that have two draws left at this turn. rest: what is still to be emitted there.  q: what both draws are of."""
    xp = namespace(q)
    order = buckets(rest, q, xp.full_like(at.tokens[:, 0], 2))
    tokens = xp.clip(at.tokens, min=0)
    bucket = gather(order, tokens)
    second_goes_first = bucket[:, turn + 1] > bucket[:, turn]
    first = turn + xp.astype(second_goes_first, at.tokens.dtype)
    h = inverse_others(q)
    x = gather(tokens, first[:, None])
    return LastTwo(first, higher(q, order, h), lower(q, order, h, x))


def tries(at: Contexts) -> Decision:
    """All but the last two draws in draw order; these in the order of their buckets."""
    xp = namespace(at.p)
    tries = Tries(at)
    count = xp.count_nonzero(at.tokens >= 0, axis=1)
    q = at.q
    assert q is not None
    pair = LastTwo(xp.zeros_like(count), q, q)
    for turn in range(at.tokens.shape[1]):
        opens = (count >= 2) & (count - turn == 2)
        closes = (count >= 2) & (count - turn == 1)
        if xp.any(opens):
            opened = _last_two(at, tries.rest, q, turn)
            pair = LastTwo(
                xp.where(opens, opened.first, pair.first),
                xp.where(opens[:, None], opened.higher, pair.higher),
                xp.where(opens[:, None], opened.lower, pair.lower),
            )
        draw = xp.where(opens, pair.first, xp.where(closes, 2 * count - 3 - pair.first, turn))
        c = xp.where(opens[:, None], pair.higher, xp.where(closes[:, None], pair.lower, q))
        tries.attempt(draw, c, turn < count)
        q = xp.where((opens | closes)[:, None], q, without(q, at.tokens[:, turn : turn + 1]))
    return tries.decision()


greedy_traversal_wor = LeafToRoot(
    method(
        "greedy_traversal_wor",
        "Greedy traversal verification, draws without replacement",
        "",
        {DraftSampling.WITHOUT_REPLACEMENT},
        FIXED,
    ),
    tries,
    walk,
)
"""The verifier."""
