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
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import FIXED, DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.greedy_traversal import BUCKETS, buckets
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, Tries
from polydraft.verifiers.residual import normalise_or
from polydraft.verifiers.traversal import without
from polydraft.verifiers.walks.greedy_traversal_wor import walk


def inverse_others(q: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
    """h; 1 - q of the likeliest token is summed without it, as a difference would lose what a sharp distribution leaves.

    Example:
        >>> inverse_others(torch.tensor([[0.75, 0.25]])).tolist()
        [[4.0, 1.333...]]
    """
    top = q.argmax(1, keepdim=True)
    rest = q.scatter(1, top, 0.0).sum(1, keepdim=True)
    return 1 / (rest + q.gather(1, top) - q).scatter(1, top, rest)


def higher(
    q: Float[Tensor, "M V"], order: Int[Tensor, "M V"], h: Float[Tensor, "M V"]
) -> Float[Tensor, "M V"]:
    """q1.

    Example:
        >>> q = torch.tensor([[0.5, 0.25, 0.25]])
        >>> higher(q, torch.tensor([[2, 1, 0]]), inverse_others(q)).tolist()  # pairs of ids 0 and 1, 0 and 2, 1 and 2: 5/12, 5/12, 2/12
        [[0.8333..., 0.1666..., 0.0]]
    """
    top = q.argmax(1, keepdim=True)
    mass, ratio = (
        q.new_zeros(len(q), BUCKETS).scatter_add(1, order, x) for x in (q.scatter(1, top, 0.0), q * h)
    )
    C = (
        mass.cumsum(1).gather(1, order)
        - q
        + torch.where(order >= order.gather(1, top), q.gather(1, top), 0.0)
    )
    C = C.clamp(min=0).scatter(1, top, mass.cumsum(1).gather(1, order.gather(1, top)))
    A = (ratio.cumsum(1) - ratio).gather(1, order)
    return normalise_or(q * (C * h + A), otherwise=q)


def lower(
    q: Float[Tensor, "M V"], order: Int[Tensor, "M V"], h: Float[Tensor, "M V"], t: Int[Tensor, "M 1"]
) -> Float[Tensor, "M V"]:
    """q2 given the higher token t."""
    bucket = order.gather(1, t)
    rest = q * (h.gather(1, t) * (order <= bucket) + torch.where(order < bucket, h, 0.0))
    return normalise_or(rest.scatter(1, t, 0.0), otherwise=q)


def tries(at: Contexts) -> Decision:
    """All but the last two draws in draw order; these in the order of their buckets."""
    tries = Tries(at)
    count = (at.tokens >= 0).sum(1)
    q = at.q
    assert q is not None
    order = torch.zeros_like(q, dtype=torch.int64)
    two = torch.full_like(count, 2)
    first = torch.zeros_like(count)
    higher_probs = q
    lower_probs = q
    for turn in range(at.tokens.shape[1]):
        opens, closes = ((count >= 2) & (count - turn == remaining) for remaining in (2, 1))
        if opens.any():
            order = torch.where(opens[:, None], buckets(tries.rest, q, two), order)
            held = order.gather(1, at.tokens.clamp(min=0))
            first = torch.where(opens, turn + (held[:, turn + 1] > held[:, turn]).long(), first)
            h = inverse_others(q)
            lower_probs = torch.where(
                opens[:, None],
                lower(q, order, h, at.tokens.gather(1, first[:, None]).clamp(min=0)),
                lower_probs,
            )
            higher_probs = torch.where(opens[:, None], higher(q, order, h), higher_probs)
        draw = torch.where(opens, first, torch.where(closes, 2 * count - 3 - first, turn))
        c = torch.where(opens[:, None], higher_probs, torch.where(closes[:, None], lower_probs, q))
        tries.attempt(draw, c, turn < count)
        q = torch.where((opens | closes)[:, None], q, without(q, at.tokens[:, turn : turn + 1]))
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
