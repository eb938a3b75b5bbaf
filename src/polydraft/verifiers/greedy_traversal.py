"""Greedy traversal verification (GTV): try the children of a node in the order of p/q, deepest first, wasting no draw.

Our own rule. It joins the selection of greedy multi-path block verification (Thomas & Pal 2026, arXiv 2602.16961) with the
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

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import FIXED, Draft, DraftSampling, NoiseKey, Outcome, TreeShape
from polydraft.noise import uniform_at
from polydraft.papers import method
from polydraft.verifiers.block import _walk as block_walk
from polydraft.verifiers.block import block
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, leftover, reject, reweight, soften, surplus, total
from polydraft.verifiers.fast.walk import EXTRA, STOP, arrays, drawn, outcome
from polydraft.verifiers.lift.leaf_to_root import chains, check_stop, host_rows, in_turn
from polydraft.verifiers.lift.verdict import TreeVerdict

PER_OCTAVE, HALF, GATE = 16.0, 128, 0.2
"""Buckets of an octave, buckets on either side of p = q, and the acceptance that is missing, over n, below which all tokens share one."""
BUCKETS = 2 * HALF + 1
FAULTY = -2
ALL = 2.0
"""Where a walk ends that visits every context."""

_FRACTION_BITS = 23
_LOWEST = np.int32(np.float32(0.5**0.5).view(np.int32))
_LOG2 = tuple(np.float32(2.0 / np.log(2.0) / k) for k in (1, 3, 5, 7))  # log2(m) = sum of these times s^k, s = (m - 1)/(m + 1)


@compiled
def _order(p, q, n, buckets, ratio):
    """Bucket of every token, rint(16 log2(p/q)) about the middle one; all in one where there is one draw or the gate is closed.

    In float32 and by a series, so that it runs in vector registers: any function of the rows is a legal order.
    """
    shared = 0.0
    for t in range(p.size):
        shared += min(p[t], q[t])
    if n == 1 or shared > 1.0 - GATE / n:
        buckets[:] = 0
        return
    whole, half, low, high = np.float32(1.0), np.float32(0.5), np.float32(-HALF), np.float32(HALF)
    for t in range(p.size):
        ratio[t] = np.float32(p[t]) / np.float32(q[t]) if p[t] * q[t] > 0.0 else np.float32(0.0)
    bits = ratio.view(np.int32)
    for t in range(p.size):
        exponent = (bits[t] - _LOWEST) >> np.int32(_FRACTION_BITS)
        buckets[t] = exponent
        bits[t] -= exponent << np.int32(_FRACTION_BITS)
    for t in range(p.size):
        s = (ratio[t] - whole) / (ratio[t] + whole)
        z = s * s
        octaves = np.float32(buckets[t]) + s * (_LOG2[0] + z * (_LOG2[1] + z * (_LOG2[2] + z * _LOG2[3])))
        step = np.floor(np.float32(PER_OCTAVE) * octaves + half)
        buckets[t] = np.int32(min(max(step, low), high)) + np.int32(HALF)


@compiled
def _first_of_highest(q, n, buckets, distribution):
    """distribution of the first draw, in draw order, of the highest bucket that holds one of n draws."""
    mass = np.zeros((2, BUCKETS))
    for t in range(0, q.size - 1, 2):  # two tables: a bucket that repeats need not wait for its last sum
        mass[0, buckets[t]] += q[t]
        mass[1, buckets[t + 1]] += q[t + 1]
    if q.size % 2:
        mass[0, buckets[q.size - 1]] += q[q.size - 1]
    weight = np.zeros(BUCKETS)
    lo, s = 0.0, 0.0
    for j in range(BUCKETS):
        inside = mass[0, j] + mass[1, j]
        if inside > 0.0:
            hi = lo + inside
            for i in range(n):
                weight[j] += hi**i * lo ** (n - 1 - i)
            s += inside * weight[j]
            lo = hi
    weight /= s
    for t in range(q.size):
        distribution[t] = q[t] * weight[buckets[t]]


@compiled
def _restrict(q, buckets, low, high, out):
    """out = q on the buckets low <= b < high, renormalised; all zero where nothing is left."""
    s = 0.0
    for t in range(q.size):
        out[t] = q[t] if low <= buckets[t] < high else 0.0
        s += out[t]
    if s > 0.0:
        scale = 1.0 / s
        for t in range(q.size):
            out[t] *= scale


class _Walk(NamedTuple):
    """One row of a batch, as the compiled walk sees it.

    x: logits, of which p = exp(x - max(x)) is made at each context that is visited, where `until` <= 1; else p is given.  q: distributions of the draft.
    rows, tokens: as in the draft.  first: earliest copy of each node.  kids, counts: children, and how many.
    place: of contexts with several children, their row in P: what is left of p.  height: of each node, how deep the tree goes on below it, where this was fixed before any draw.
    until: the walk ends at the first context whose visit brings the accepted probability above it, where a draw of that uniform in
        the order of the visits stops.
    stop, weights: of each context.  trace: where the walk ended (-1 before, FAULTY at faulty logits), visits that are over, their contexts.
    """

    x: np.ndarray
    p: np.ndarray
    q: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    kids: np.ndarray
    counts: np.ndarray
    place: np.ndarray
    P: np.ndarray
    height: np.ndarray
    until: float
    stop: np.ndarray
    weights: np.ndarray
    trace: np.ndarray


@compiled
def _visit(u, w, alive, at):
    """Visit context u with weight w; `alive` = probability that nothing was accepted before; returns it after u, or where the walk ends."""
    p, q, tokens, trace = at.p, at.q, at.tokens, at.trace
    if at.until <= 1.0 and not soften(at.x[u], p[u]) > 0.0:
        trace[0] = FAULTY
        return alive
    n, kids = at.counts[u], at.kids[u]
    if n == 1:
        c = kids[0]
        t, r = tokens[c], at.rows[c]
        pu, qu = total(p[u]), total(q[r])
        alive = _visit(at.first[c], keep(w, p[u, t] / pu, q[r, t] / qu), alive, at)
        if trace[0] != -1:
            return alive
        at.weights[u] = w
        w = reweight(w, surplus(w / pu, p[u], 1.0 / qu, q[r]))
    elif n > 1:
        P = at.P[at.place[u]]
        Q, SELECTED = np.empty_like(P), np.empty_like(P)
        order, ratio = np.empty(P.size, np.int32), np.empty(P.size, np.float32)
        copy_normalised(p[u], P)
        copy_normalised(q[at.rows[kids[0]]], Q)
        end = 0
        while end < n:
            begin, end = end, end + 1
            while end < n and at.height[kids[end]] == at.height[kids[begin]]:
                end += 1
            before, remaining = tokens[kids[:begin]], kids[begin:end].copy()
            while remaining.size > 0:
                _order(P, Q, remaining.size, order, ratio)
                _first_of_highest(Q, remaining.size, order, SELECTED)
                highest = order[tokens[remaining]].max()
                inside = remaining[order[tokens[remaining]] == highest]
                remaining = remaining[order[tokens[remaining]] < highest]
                while inside.size > 0:
                    c = inside[0]
                    t = tokens[c]
                    if not (before == t).any():
                        alive = _visit(at.first[c], keep(w, P[t], SELECTED[t]), alive, at)
                        if trace[0] != -1:
                            return alive
                    w = reject(w, P, SELECTED)
                    inside = inside[tokens[inside] != t]
                    Q[t] = 0.0
                    if inside.size > 0:
                        _restrict(Q, order, highest, highest + 1, SELECTED)
                if remaining.size > 0:
                    _restrict(Q, order, 0, highest, Q)
            if end < n:
                copy_normalised(q[at.rows[kids[0]]], Q)
    at.stop[u] = alive * w
    trace[1] += 1
    trace[1 + trace[1]] = u
    alive *= 1.0 - w
    if 1.0 - alive > at.until:
        trace[0] = u
    return alive


@compiled
def _heights(parents):
    """How deep a row goes on below each of its nodes."""
    height = np.zeros(len(parents), np.int64)
    for n in range(len(parents) - 1, 0, -1):
        if parents[n] >= 0:
            height[parents[n]] = max(height[parents[n]], 1 + height[n])
    return height


@compiled
def _after(u, at, out):
    """out = the target row of context u with all that the children took out of it."""
    if at.counts[u] > 1:
        out[:] = at.P[at.place[u]]
    elif at.counts[u] == 1:
        leftover(at.weights[u], at.p[u], at.q[at.rows[at.kids[u, 0]]], out)
    else:
        copy_normalised(at.p[u], out)


def _after_nodes(walks: list[_Walk], device: torch.device, node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    distribution = np.empty((len(walks), walks[0].p.shape[-1]))
    for u, at, out in zip(node.tolist(), walks, distribution, strict=True):
        _after(u, at, out)
    return torch.from_numpy(distribution).to(device)


class GreedyTraversal:
    """The verifier."""

    info = method("greedy_traversal", "Greedy traversal verification (GTV)", "", {DraftSampling.IID}, FIXED)

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p, q = host_rows(draft, target_probs)
        walks = self._walks(draft, p, p, q, dict.fromkeys(range(len(p)), ALL))
        stop = np.stack([at.stop for at in walks])
        check_stop(stop)
        device, order = target_probs.device, in_turn(np.stack([at.trace[2:] for at in walks]), draft.tree.host[1])
        after = partial(_after_nodes, walks, device)
        return TreeVerdict(draft.tree, torch.from_numpy(stop).to(device), after, torch.from_numpy(order).to(device))

    @staticmethod
    def _walks(draft: Draft, logits: np.ndarray, p: np.ndarray, q: np.ndarray, until: dict[int, float]) -> list[_Walk]:
        """The finished walks of the rows b in `until`, each until[b] long; see `_Walk`."""
        kids, first = (x.cpu().numpy() for x in (tree.children(draft.tree), tree.first_copies(draft.tree)))
        rows, (tokens, parents) = draft.rows.cpu().contiguous().numpy(), draft.tree.host
        counts = (kids >= 0).sum(-1)
        place = (counts > 1).cumsum(-1) - 1
        (N, V), walks = p.shape[1:], list[_Walk]()
        # The loop is not compiled: a caller of a function that calls itself crashes when numba loads it from its cache.
        for b, end in until.items():
            size = int(place[b, -1]) + 1
            at = _Walk(
                *(x[b] for x in (logits, p, q, rows, tokens, first, kids, counts, place)),
                np.empty((size, V), p.dtype),
                _heights(parents[b]) if draft.shape in (TreeShape.RAGGED, TreeShape.BY_POSITION) else np.zeros(N, np.int64),
                end,
                np.zeros(N),
                np.ones(N),
                np.array([-1, 0, *[-1] * N]),
            )
            _visit(0, 1.0, 1.0, at)
            walks.append(at)
        return walks

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """What the verdict samples, for float32 logits and distributions; chains as block verification, which this rule then is.

        Contexts that come after the end of the walk are not looked at. None where it does not apply, or where what was looked at is faulty.
        """
        if draft.shape is TreeShape.CHAIN:
            return block.walk(draft, logits, key)
        if draft.probs is None or draft.probs.dtype != torch.float32:
            return None
        done = arrays(draft, logits, key)
        p, single = np.empty_like(done.logits), chains(done.parents)
        for b in np.flatnonzero(single):
            block_walk(*(x[b : b + 1] for x in done))
        noise = list(zip(done.seed, done.sample, done.position, strict=True))
        until = {int(b): uniform_at(*noise[b], STOP, 0) for b in np.flatnonzero(~single)}
        distribution = np.empty(p.shape[-1])
        for b, at in zip(until, self._walks(draft, done.logits, p, done.draft_probs, until), strict=True):
            done.node[b] = at.trace[0]
            if done.node[b] < 0:
                return None
            _after(done.node[b], at, distribution)
            done.token[b] = drawn(distribution, *noise[b], EXTRA)
        return outcome(draft, done)


greedy_traversal = GreedyTraversal()
"""The verifier."""
