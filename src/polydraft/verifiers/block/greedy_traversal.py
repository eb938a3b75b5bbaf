"""Greedy traversal verification (GTV): try the children of a node in the order of p/q, deepest first, wasting no draw.

Our own rule. It joins the selection of greedy multi-path block verification (Thomas & Pal 2026, arXiv 2602.16961) with the
leaf-to-root walk of traversal verification (Weng et al. 2025, 2505.12398).

    visit(v, w): accepts v or something below it with total probability w; the root has w = 1
    b(t)   bucket of token t: 1/16 octaves of p(t)/q(t); lo_b, hi_b = q-mass below and up to bucket b
    law(t) proportional to q(t) sum_{i<n} hi_b^i lo_b^(n-1-i)    the first draw, in draw order, of the highest bucket drawn

    while draws remain: for the tokens x of the highest bucket that holds a draw, first drawn first:
        visit(x, min(1, w p(x) / law(x)));  p <- N((w p - law)+), S its sum;  w <- S / (S + 1 - w)
        law <- q inside the bucket without the tokens tried
      then q <- q below the bucket, and the order is computed anew on the residual p
    accept v with probability w, and emit a token of p

Where drafts already fit (sum min(p, q) > 1 - 0.2/n) all tokens share one bucket, which is traversal verification. One path
is block verification. Lossless for iid draws whose number at each node was fixed beforehand; the order may be any function
of prefix, rows and residuals, never of draws not yet looked at (specification 9.2).
Traps: merged duplicates, sorted siblings, a trunk token counted once for each path.
"""

import numpy as np

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers._rows import compiled, copy_normalised, keep, reject, scale, total
from polydraft.verifiers.tree.leaf_to_root import LeafToRoot, enter, one_draw

__all__ = ["greedy_traversal"]

BUCKETS = 257
OUTERMOST = 2.0**8  # p/q at the last bucket
SQRT2 = 2.0**0.5
EXPONENT = 1023 - BUCKETS // 2  # of a float64 whose bucket is 0, as stored
GATE = 0.2


@compiled
def _overlap(p, q):  # pragma: no cover - compiled
    s = 0.0
    for t in range(p.size):
        s += min(p[t], q[t])
    return s


@compiled
def _buckets(p, q, bucket):  # pragma: no cover - compiled
    """bucket(t) = round(16 log2(p(t)/q(t))), clipped, counted from 0: the exponent of sqrt(2) (p/q)^16."""
    for t in range(p.size):
        ratio = p[t] / q[t] if q[t] > 0.0 else 1.0
        ratio = min(max(ratio, 1.0 / OUTERMOST), OUTERMOST)
        ratio *= ratio
        ratio *= ratio
        ratio *= ratio
        ratio *= ratio
        bucket[t] = (np.float64(ratio * SQRT2).view(np.int64) >> 52) - EXPONENT


@compiled
def _masses(q, bucket, mass):  # pragma: no cover - compiled
    for t in range(q.size):
        mass[bucket[t]] += q[t]


@compiled
def _weigh(q, bucket, weight, law):  # pragma: no cover - compiled
    for t in range(q.size):
        law[t] = q[t] * weight[bucket[t]]


@compiled
def _first_of_highest(q, n, bucket, law):  # pragma: no cover - compiled
    """law of the first draw, in draw order, of the highest bucket that holds one of n draws from q."""
    mass, weight = np.zeros(BUCKETS), np.zeros(BUCKETS)
    _masses(q, bucket, mass)
    lo, s = 0.0, 0.0
    for j in range(BUCKETS):
        hi, power = lo + mass[j], 1.0
        for _ in range(n):
            weight[j] = weight[j] * lo + power
            power *= hi
        s += mass[j] * weight[j]
        lo = hi
    _weigh(q, bucket, weight / s, law)


@compiled
def _inside(q, bucket, lowest, highest, out):  # pragma: no cover - compiled
    for t in range(q.size):
        out[t] = q[t] if lowest <= bucket[t] <= highest else 0.0


@compiled
def _restrict(q, bucket, lowest, highest, out):  # pragma: no cover - compiled
    """out = q on the buckets from lowest to highest, renormalised; out must not be q."""
    _inside(q, bucket, lowest, highest, out)
    scale(out, 1.0 / total(out))


@compiled
def _visit(b, v, walk, p, q, law, bucket):  # pragma: no cover - compiled
    """The tries at v, all of its draws being rejected; p and q become what is left of them. Returns what is left of w."""
    tokens, w = walk.tokens[b], walk.weight[b, v]
    draws = walk.draws[b, v, : walk.counts[b, v]]
    turn = 0
    while draws.size > 0:
        if draws.size == 1 or _overlap(p, q) > 1.0 - GATE / draws.size:
            bucket[:] = 0
            law[:] = q
        else:
            _buckets(p, q, bucket)
            _first_of_highest(q, draws.size, bucket, law)
        highest = bucket[tokens[draws]].max()
        inside = draws[bucket[tokens[draws]] == highest]
        draws = draws[bucket[tokens[draws]] < highest]
        while inside.size > 0:
            x = tokens[inside[0]]
            into = keep(w, p[x], law[x])
            enter(walk, b, v, turn, inside[0], into)
            if into == 1.0:
                return 0.0
            w = reject(w, p, law)
            turn += 1
            q[x] = 0.0
            inside = inside[tokens[inside] != x]
            if inside.size > 0:
                _restrict(q, bucket, highest, highest, law)
        if draws.size > 0:
            _restrict(q, bucket, 0, highest - 1, law)
            q, law = law, q
    return w


@compiled
def _tries(contexts, walk, p, q, residual):  # pragma: no cover - compiled
    V = p.shape[2]
    rest, left, law = np.empty(V), np.empty(V), np.empty(V)  # not rows of one array: that would hide from the compiler
    bucket = np.empty(V, np.int16)  #                          that they do not overlap, and cost the vector registers
    for i in range(len(contexts)):
        b, v = contexts[i]
        row = walk.rows[b, walk.draws[b, v, 0]]
        if walk.weight[b, v] == 0.0:
            continue
        if walk.counts[b, v] == 1 and residual.size == 0:
            one_draw(walk, b, v, p[b, v], q[b, row])
            continue
        copy_normalised(p[b, v], rest)
        copy_normalised(q[b, row], left)
        walk.accept[b, v] = _visit(b, v, walk, rest, left, law, bucket)
        if residual.size:
            residual[:] = rest


greedy_traversal = LeafToRoot(
    Method(
        name="greedy_traversal",
        title="Greedy traversal verification (GTV)",
        authors="polydraft",
        year=2026,
        arxiv="",
        laws=frozenset({SiblingLaw.IID}),
        shapes=frozenset({TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT}),
    ),
    _tries,
)
"""The verifier."""
