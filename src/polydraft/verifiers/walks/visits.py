"""The walk of leaf-to-root verifiers: a step from logits to an outcome in one compiled call.

    visit(u)   distribution of the target row; then child after child as the verifier's compiled tries say, each only once the visits of those before
               have ended without acceptance; then u itself

Visits end where the stop's uniform falls: rows beyond are not looked at, and what a rejection leaves is made only where something follows it.
Rows are float32 and sums float64; equal to the verdict up to rounding.
"""

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.sampling.noise import uniform_at
from polydraft.sampling.truncation import soften
from polydraft.verifiers.walks.rows import accepted_weight, leftover, reweight, scale, scaled, surplus, total
from polydraft.verifiers.walks.steps import EXTRA, STOP, Tree, drawn, room

FAULTY = -2
"""In the place of a context."""


@njit(error_model="numpy")
def _open(logits, u, at):
    """The target row of u, and the distribution of its first draw; whether the row is sound."""
    mass = soften(at.sync, logits[u], at.params, at.p[u], at.ids)
    at.scale[u] = 1.0 / mass
    at.turn[u] = 0
    if at.several[u]:
        scale(at.p[u], at.scale[u])
    if at.counts[u] > 0 and at.rows[at.kids[u, 0]] >= 0:
        q = at.q[at.rows[at.kids[u, 0]]]
        at.draft_scale[u] = 1.0 / total(q)
        if at.several[u]:
            scaled(q, at.draft_scale[u], at.untried[at.depth[u]])
    return mass > 0.0


@njit(error_model="numpy")
def _try_single(u, at):
    """As `try_next` where one draw from a row is all there is."""
    if at.turn[u] > 0:
        return -1, 0.0
    at.turn[u] = 1
    child = at.kids[u, 0]
    x = at.tokens[child]
    row = at.rows[child]
    return 0, accepted_weight(at.weight[u], at.p[u, x] * at.scale[u], at.q[row, x] * at.draft_scale[u])


@njit(error_model="numpy", inline="always")
def _visit(try_next, logits, at, until):
    """The context where the accepted probability rises above `until`; FAULTY where what was looked at is."""
    u = np.int64(0)
    alive = 1.0
    enters = True  # a literal 0 would compile the tries twice
    at.weight[0] = 1.0
    while True:
        if enters and not _open(logits, u, at):
            return FAULTY
        draw = -1
        into = 0.0
        enters = False
        if at.several[u]:
            draw, into = try_next(u, at)
        elif at.counts[u] == 1:
            draw, into = _try_single(u, at)
        if into != into:
            return FAULTY
        if draw >= 0:
            enters = into > 0.0
            if enters:
                child = at.kids[u, draw]
                at.weight[child] = into
                at.above[child] = u
                u = child
            continue
        a = at.weight[u]
        if at.counts[u] == 1 and not at.several[u]:
            a = reweight(
                a, surplus(at.sync, a * at.scale[u], at.p[u], at.draft_scale[u], at.q[at.rows[at.kids[u, 0]]])
            )
        at.stop[u] = alive * a
        alive *= 1.0 - a
        if u == 0 or 1.0 - alive > until:
            return u
        u = at.above[u]


@njit(error_model="numpy")
def _extra_token(u, at, seed, sample, position):
    """A draw of what is left of the target row."""
    if at.counts[u] != 1 or at.several[u]:
        return drawn(at.p[u], seed, sample, position, EXTRA)
    rest = np.empty(at.p.shape[1])
    leftover(at.sync, at.weight[u], at.p[u], at.q[at.rows[at.kids[u, 0]]], rest)
    return drawn(rest, seed, sample, position, EXTRA)


@njit(error_model="numpy")
def _shape(parents, kids, rows, depths, counts, several):
    """Fill depths, numbers of draws and where the compiled tries say what comes next; returns how many levels of rows those take."""
    deepest = 0
    for n in range(len(parents)):
        depths[n] = depths[parents[n]] + 1 if parents[n] >= 0 else 0
        deepest = max(deepest, depths[n])
        counts[n] = (kids[n] >= 0).sum()
        several[n] = counts[n] > 1 or (counts[n] == 1 and rows[kids[n, 0]] < 0)
    return deepest + 1 if several.any() else 0


@njit(error_model="numpy", inline="always")
def visit_trees(try_next, needs_work, trees):
    """Stop node and extra token of every tree of `steps.TreeBatch`; -1 where what was looked at is faulty.

    try_next: the next child to visit where a context has several draws, and its weight; see `traversal.try_next`. Who calls this is compiled with it.
    needs_work: whether that takes `Tree.work`.
    """
    batch = trees.batch
    kids = trees.draws
    rows = trees.rows
    logits = batch.logits
    parents = batch.parents
    node = batch.node
    N, V = logits.shape[1:]
    W = kids.shape[2]
    depths = np.zeros(N, np.int64)
    counts = np.zeros(N, np.int64)
    several = np.zeros(N, np.bool_)
    p = np.empty((N, V), np.float32)
    work = room(V if needs_work else 0, W, N)
    for b in range(len(node)):
        levels = _shape(parents[b], kids[b], rows[b], depths, counts, several)
        at = Tree(
            batch.sync, batch.samplings[b], batch.ids, p, trees.draft_probs[b], batch.tokens[b], rows[b], kids[b],
            counts, depths, trees.heights[b], several, trees.sampling,
            np.zeros(N), np.zeros(N), np.zeros(N), np.zeros(N), np.zeros(N, np.int64), np.zeros(N, np.int64),
            np.empty((levels, V), np.float32), np.empty((levels, V), np.float32), np.empty((levels, V), np.int32),
            np.zeros((N, W), np.int64), np.zeros((N, W)), work,
        )  # fmt: skip
        seed = batch.seed[b]
        sample = batch.sample[b]
        position = batch.position[b]
        node[b] = _visit(try_next, logits[b], at, uniform_at(seed, sample, position, STOP, 0))
        batch.token[b] = _extra_token(node[b], at, seed, sample, position) if node[b] >= 0 else -1
