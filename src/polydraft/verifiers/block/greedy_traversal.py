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

Where drafts already fit (sum min(p, q) > 1 - 0.2/n) all tokens share one bucket, which is traversal verification of merged draws.
The stop node is drawn in the order in which visits end, so that a walk need not look beyond it. One path is block verification, its draw too. On paths of unequal lengths the order would give all weight to a short path as to the deep one, so
that the children are tried in draw order, the deepest first, each against q: traversal verification itself. Lossless for iid draws whose number at each node was fixed beforehand; the order may be any function
of prefix, rows and residuals, never of draws not yet looked at (specification 9.2).
Traps: merged duplicates, sorted siblings, a trunk token counted once for each path.
"""

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, Method, NoiseKey, Outcome, SiblingLaw, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.noise import uniform_at
from polydraft.verifiers._rows import compiled, copy_normalised, keep, leftover, reject, reweight, surplus, total
from polydraft.verifiers._verdict import TreeVerdict
from polydraft.verifiers._walk import EXTRA, STOP, arrays, drawn, outcome, soften
from polydraft.verifiers.block.block import _walk as block_walk
from polydraft.verifiers.block.block import block

__all__ = ["GreedyTraversal", "greedy_traversal"]

PER_OCTAVE = 16.0
HALF = 128
BUCKETS = 2 * HALF + 1
GATE = 0.2
FAULTY = -2
SKIPPED = -1.0

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
    one, half, low, high = np.float32(1.0), np.float32(0.5), np.float32(-HALF), np.float32(HALF)
    for t in range(p.size):
        ratio[t] = np.float32(p[t]) / np.float32(q[t]) if p[t] * q[t] > 0.0 else np.float32(0.0)
    bits = ratio.view(np.int32)
    for t in range(p.size):
        exponent = (bits[t] - _LOWEST) >> np.int32(_FRACTION_BITS)
        buckets[t] = exponent
        bits[t] -= exponent << np.int32(_FRACTION_BITS)
    for t in range(p.size):
        s = (ratio[t] - one) / (ratio[t] + one)
        z = s * s
        octaves = np.float32(buckets[t]) + s * (_LOG2[0] + z * (_LOG2[1] + z * (_LOG2[2] + z * _LOG2[3])))
        step = np.floor(np.float32(PER_OCTAVE) * octaves + half)
        buckets[t] = np.int32(min(max(step, low), high)) + np.int32(HALF)


@compiled
def _first_of_highest(q, n, buckets, law):
    """law of the first draw, in draw order, of the highest bucket that holds one of n draws."""
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
        law[t] = q[t] * weight[buckets[t]]


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


@compiled
def _visit(
    u, w, alive, x, p, q, rows, tokens, first, kids, counts, place, P, Q, LAW, order, ratio, ragged, until, stop, weights, path
):
    """Visit context u with weight w; `alive` = probability that nothing was accepted before; returns it after u. ragged: in draw order.

    until: the walk ends at the first context whose visit brings the accepted probability above it, which is where a draw of that
    uniform in the order of the visits stops; p = exp(x - max(x)) is then made of each context that is visited. Above 1: visit all.
    path: where it ended, -1 before, FAULTY at faulty logits; the number of visits that are over; their contexts in order.
    """
    if until <= 1.0 and not soften(x[u], p[u]) > 0.0:
        path[0] = FAULTY
        return alive
    n = counts[u]
    if n == 1:
        c = kids[u, 0]
        t, r = tokens[c], rows[c]
        pu, qu = total(p[u]), total(q[r])
        into = keep(w, p[u, t] / pu, q[r, t] / qu)
        alive = _visit(
            first[c], into, alive, x, p, q, rows, tokens, first, kids, counts, place,
            P, Q, LAW, order, ratio, ragged, until, stop, weights, path,
        )  # fmt: skip
        if path[0] != -1:
            return alive
        weights[u] = w
        w = reweight(w, surplus(w / pu, p[u], 1.0 / qu, q[r]))
    elif n > 1:
        k = place[u]
        copy_normalised(p[u], P[k])
        copy_normalised(q[rows[kids[u, 0]]], Q[k])
        for j in range(n if ragged else 0):
            c = kids[u, j]
            t = tokens[c]
            if not (tokens[kids[u, :j]] == t).any():
                into = keep(w, P[k, t], Q[k, t])
                alive = _visit(
                    first[c], into, alive, x, p, q, rows, tokens, first, kids, counts, place,
                    P, Q, LAW, order, ratio, ragged, until, stop, weights, path,
                )  # fmt: skip
                if path[0] != -1:
                    return alive
            w = reject(w, P[k], Q[k])
        left = kids[u, : 0 if ragged else n].copy()
        while left.size > 0:
            _order(P[k], Q[k], left.size, order[k], ratio)
            _first_of_highest(Q[k], left.size, order[k], LAW[k])
            highest = order[k][tokens[left]].max()
            inside = left[order[k][tokens[left]] == highest]
            left = left[order[k][tokens[left]] < highest]
            while inside.size > 0:
                c = inside[0]
                t = tokens[c]
                into = keep(w, P[k, t], LAW[k, t])
                alive = _visit(
                    first[c], into, alive, x, p, q, rows, tokens, first, kids, counts, place,
                    P, Q, LAW, order, ratio, ragged, until, stop, weights, path,
                )  # fmt: skip
                if path[0] != -1:
                    return alive
                w = reject(w, P[k], LAW[k])
                inside = inside[tokens[inside] != t]
                Q[k, t] = 0.0
                if inside.size > 0:
                    _restrict(Q[k], order[k], highest, highest + 1, LAW[k])
            if left.size > 0:
                _restrict(Q[k], order[k], 0, highest, Q[k])
    stop[u] = alive * w
    path[1] += 1
    path[1 + path[1]] = u
    alive *= 1.0 - w
    if 1.0 - alive > until:
        path[0] = u
    return alive


@compiled
def _unequal(parents):
    """Whether a row has leaves of different depths."""
    N = len(parents)
    depth, leaf, least, most = np.zeros(N, np.int64), np.ones(N, np.bool_), N, 0
    for n in range(1, N):
        if parents[n] >= 0:
            depth[n], leaf[parents[n]] = depth[parents[n]] + 1, False
    for n in range(1, N):
        if parents[n] >= 0 and leaf[n]:
            least, most = min(least, depth[n]), max(most, depth[n])
    return least < most


@compiled
def _after(u, p, q, rows, kids, counts, place, P, weights, out):
    """out = the target row of context u with all that the children took out of it."""
    if counts[u] > 1:
        out[:] = P[place[u]]
    elif counts[u] == 1:
        leftover(weights[u], p[u], q[rows[kids[u, 0]]], out)
    else:
        copy_normalised(p[u], out)


@compiled
def _extra(node, law, p, q, rows, kids, counts, place, P, weights, seed, sample, position):
    """The extra token after a walk that ended at `node`; -1 where there is none."""
    _after(node, p, q, rows, kids, counts, place, P, weights, law)
    return drawn(law, seed, sample, position, EXTRA)


def _chains(parents: np.ndarray) -> np.ndarray:
    """[B] whether a row is one path."""
    return ((parents == np.arange(-1, parents.shape[1] - 1)) | (parents < 0)).all(1)


def _permutation(paths: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """All nodes of each row in the order of the stop's draw: of their visits, then the others; of chains as in block verification, root first."""
    order = np.tile(np.arange(paths.shape[1] - 2), (len(paths), 1))
    for b, (_, count, *nodes) in enumerate(paths.tolist()):
        if not chains[b]:
            order[b] = [*nodes[:count], *({*range(len(nodes))} - {*nodes[:count]})]
    return order


def _law(
    p: np.ndarray,
    q: np.ndarray,
    rows: np.ndarray,
    kids: np.ndarray,
    counts: np.ndarray,
    place: np.ndarray,
    residuals: list[np.ndarray],
    weights: np.ndarray,
    device: torch.device,
    node: Int[Tensor, "B"],
) -> Float[Tensor, "B V"]:
    law = np.empty((len(p), p.shape[-1]))
    for b, u in enumerate(node.tolist()):
        _after(u, p[b], q[b], rows[b], kids[b], counts[b], place[b], residuals[b], weights[b], law[b])
    return torch.from_numpy(law).to(device)


class GreedyTraversal:
    """The verifier."""

    info = Method(
        name="greedy_traversal",
        title="Greedy traversal verification (GTV)",
        authors="polydraft",
        year=2026,
        arxiv="",
        laws=frozenset({SiblingLaw.IID}),
        shapes=frozenset({TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT, TreeShape.RAGGED}),
    )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p = target_probs.cpu().contiguous().numpy()
        q = p[:, :1] if draft.probs is None else draft.probs.cpu().contiguous().numpy()
        rows, (kids, counts, place), stop, weights, residuals, order = self._visited(draft, p, p, q, np.full(len(p), 2.0))
        if np.isnan(stop).any():
            raise InvalidInputError(
                "a drafted token has probability 0 in its row of draft.probs; report the very rows that were sampled."
            )
        device = target_probs.device
        after = partial(_law, p, q, rows, kids, counts, place, residuals, weights, device)
        visits = torch.from_numpy(_permutation(order, _chains(draft.tree.host[1]))).to(device)
        return TreeVerdict(draft.tree, torch.from_numpy(stop).to(device), after, visits)

    @staticmethod
    def _visited(
        draft: Draft, logits: np.ndarray, p: np.ndarray, q: np.ndarray, until: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray, np.ndarray, list[np.ndarray], np.ndarray]:
        """Every node's row, the geometry (children, their number, place among those with several), stops, weights, residual rows and paths, see `_visit`."""
        kids, first = (x.cpu().numpy() for x in (tree.children(draft.tree), tree.first_copies(draft.tree)))
        rows, (tokens, parents) = draft.rows.cpu().contiguous().numpy(), draft.tree.host
        counts = (kids >= 0).sum(-1)
        place = (counts > 1).cumsum(-1) - 1
        stop, weights = np.zeros(tokens.shape), np.ones(tokens.shape)
        residuals: list[np.ndarray] = []
        paths = np.zeros((len(p), 2 + tokens.shape[1]), np.int64)
        paths[:, 0] = -1
        for b in range(
            len(p)
        ):  # not compiled: a caller of a function that calls itself crashes when numba loads it from its cache
            size = 0 if until[b] == SKIPPED else int(place[b, -1]) + 1
            P, Q, LAW = np.empty((3, size, p.shape[-1]), p.dtype)
            order, ratio = np.empty((size, p.shape[-1]), np.int32), np.empty(p.shape[-1], np.float32)
            given = (logits[b], p[b], q[b], rows[b], tokens[b], first[b], kids[b], counts[b], place[b])
            ragged = draft.shape is TreeShape.RAGGED and _unequal(parents[b])
            if until[b] != SKIPPED:
                _visit(0, 1.0, 1.0, *given, P, Q, LAW, order, ratio, ragged, until[b], stop[b], weights[b], paths[b])
            residuals.append(P)
        return rows, (kids, counts, place), stop, weights, residuals, paths

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """What the verdict samples, for float32 logits and laws on the host; chains as block verification, which this rule then is.

        Contexts that come after the end of the walk are not looked at. None where it does not apply, or where what was looked at is faulty.
        """
        if draft.shape is TreeShape.CHAIN:
            return block.walk(draft, logits, key)
        if logits.device.type != "cpu" or draft.probs is None or draft.probs.dtype != torch.float32:
            return None
        done = arrays(draft, logits, key)
        p = np.empty_like(done.logits)
        chains = _chains(done.parents)
        for b in np.flatnonzero(chains):
            block_walk(*(x[b : b + 1] for x in done))
        until = np.array([uniform_at(*at, STOP, 0) for at in zip(done.seed, done.sample, done.position, strict=True)])
        until[chains] = SKIPPED
        rows, geometry, _, weights, residuals, paths = self._visited(draft, done.logits, p, done.laws, until)
        law = np.empty(p.shape[-1])
        for b in np.flatnonzero(~chains):
            node = done.node[b] = paths[b, 0]
            if node < 0:
                return None
            given = (node, law, p[b], done.laws[b], rows[b], *(x[b] for x in geometry), residuals[b], weights[b])
            done.token[b] = _extra(*given, done.seed[b], done.sample[b], done.position[b])
        return outcome(draft, done)


greedy_traversal = GreedyTraversal()
"""The verifier."""
