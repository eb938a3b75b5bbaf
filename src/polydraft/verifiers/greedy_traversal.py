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
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.core import FIXED, DraftSampling
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


def buckets(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], n: Int[Tensor, " M"]) -> Int[Tensor, "M V"]:
    """Bucket of every token, rint(16 log2(p/q)) about the middle one; all in one where there is one draw or the gate is closed.

    By a series in float32, as the compiled form: any function of the rows is a legal order.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
        >>> buckets(p, q, torch.tensor([2])).tolist()
        [[144, 112, 128]]
    """
    ratio = torch.where(p * q > 0, p.float() / q.float(), 0.0)
    exponent = (ratio.view(torch.int32) - SQRT_HALF) >> FRACTION_BITS
    mantissa = (ratio.view(torch.int32) - (exponent << FRACTION_BITS)).view(torch.float32)
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    octaves = exponent + s * (LOG2[0] + z * (LOG2[1] + z * (LOG2[2] + z * LOG2[3])))
    order = (PER_OCTAVE * octaves + 0.5).floor().clamp(-HALF, HALF).long() + HALF
    closed = (n == 1) | (torch.minimum(p, q).sum(-1) > 1 - GATE / n.to(p.dtype))
    return torch.where(closed[:, None], 0, order)


def first_of_highest(
    q: Float[Tensor, "M V"], order: Int[Tensor, "M V"], n: Int[Tensor, " M"]
) -> Float[Tensor, "M V"]:
    """Distribution of the first draw, in draw order, of the highest bucket that holds one of n draws.

    Example:
        >>> first_of_highest(torch.tensor([[0.5, 0.5]]), torch.tensor([[1, 0]]), torch.tensor([2])).tolist()
        [[0.75, 0.25]]
    """
    mass = q.new_zeros(len(q), BUCKETS).scatter_add(1, order, q)
    hi = mass.cumsum(1)
    lo = torch.nn.functional.pad(hi[:, :-1], (1, 0))
    weight = torch.zeros_like(hi)
    n = n[:, None]
    for i in range(int(n.max())):
        weight = weight + torch.where(i < n, hi**i * lo ** (n - 1 - i).clamp(min=0), 0.0)
    selected = q * weight.gather(1, order)
    return normalise_or(selected, otherwise=selected)


def _within(q: Float[Tensor, "M V"], inside: Bool[Tensor, "M V"]) -> Float[Tensor, "M V"]:
    """q on some tokens, summed anew; all zero where nothing is left."""
    rest = torch.where(inside, q, 0.0)
    return normalise_or(rest, otherwise=rest)


def tries(at: Contexts) -> Decision:
    """The children in the order of their buckets; neighbours that go on equally deep share one."""
    tries = Tries(at)
    tokens = at.tokens
    q = at.q
    assert q is not None
    groups = torch.nn.functional.pad((at.heights.diff(dim=1) != 0).cumsum(1), (1, 0))
    for group in range(int(groups.max()) + 1):
        remaining = (groups == group) & (tokens >= 0)
        untried = q
        inside = torch.zeros_like(remaining)
        order = torch.zeros_like(q, dtype=torch.int64)
        selected = q
        while (remaining | inside).any():
            opens = ~inside.any(1) & remaining.any(1)  # the next bucket
            order = torch.where(opens[:, None], buckets(tries.rest, untried, remaining.sum(1)), order)
            first = first_of_highest(untried, order, remaining.sum(1))
            selected = torch.where(opens[:, None], first, selected)
            bucket = torch.where(remaining | inside, order.gather(1, tokens.clamp(min=0)), -1)
            highest = bucket.amax(1, keepdim=True)
            inside = torch.where(opens[:, None], remaining & (bucket == highest), inside)
            remaining = remaining & ~inside
            draw = inside.int().argmax(1)
            x = tokens.gather(1, draw[:, None])
            tries.attempt(draw, selected, inside.any(1))
            inside = inside & (tokens != x)
            untried = untried.scatter(1, x.clamp(min=0), 0.0)
            selected = _within(untried, order == highest)
            untried = torch.where(inside.any(1, keepdim=True), untried, _within(untried, order < highest))
    return tries.decision()


greedy_traversal = LeafToRoot(
    method("greedy_traversal", "Greedy traversal verification (GTV)", "", {DraftSampling.IID}, FIXED),
    tries,
    walk,
)
"""The verifier."""
