"""Greedy traversal for two draws without replacement: of the last two draws at a node the one with the larger p/q goes first.

Our own rule, after GTV (`greedy_traversal`); the order is ascending p/q, ties by id, q the distribution of what is still to be tried.

    C(t)  q-mass below t      A(t) = sum over j below t of q_j / (1 - q_j)      h_t = 1 / (1 - q_t)
    the higher token t is tried against  q1(t) = q_t (C(t) h_t + A(t))
    after its rejection the other one    q2(j) proportional to q_j (h_t + h_j), j below t
    each try as in traversal verification: weight min(1, w p(x) / distribution(x)); rejected: p <- N((w p - distribution)+), w <- S / (S + 1 - w)

More than two draws: all but the last two are tried in draw order, as in `traversal`, so one and two draws are what it is made
for. Where the drafts already fit, sum min(p, q) > 1 - 0.2/2, draw order is kept for those two as well.
Lossless for draws without replacement, whatever grew the tree, if the number of draws at each node was fixed before its first.
Traps: q2 without h_j, as if the higher token had surely been drawn first; a last draw made only after a look at the first (0.14).
"""

import numpy as np

from polydraft.core import DraftSampling
from polydraft.papers import method
from polydraft.verifiers.fast.rows import compiled
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, opened, tried
from polydraft.verifiers.traversal import without

GATE = 0.1


@compiled
def _ordered(p, q, order):
    """Fill the order; whether it is to be used."""
    shared = 0.0
    ratio = np.empty(p.size)
    for t in range(p.size):
        shared += min(p[t], q[t])
        ratio[t] = p[t] / q[t] if q[t] > 0.0 else np.inf
    order[:] = np.argsort(ratio, kind="mergesort")
    return shared <= 1.0 - GATE


@compiled
def _higher(q, order, others, distribution):
    """q1, and others[t] = 1 - q_t, summed from both sides: a difference would lose what is left of a sharp distribution."""
    V = q.size
    below = 0.0
    for i in range(V):
        others[order[i]] = below
        below += q[order[i]]
    above = 0.0
    for i in range(V - 1, -1, -1):
        others[order[i]] += above
        above += q[order[i]]
    C, A, s = 0.0, 0.0, 0.0
    for i in range(V):
        t = order[i]
        distribution[t] = 0.0
        if q[t] > 0.0:
            distribution[t] = q[t] * (C / others[t] + A)
            s += distribution[t]
            C += q[t]
            A += q[t] / others[t]
    for t in range(V):
        distribution[t] /= s


@compiled
def _lower(q, order, others, first, distribution):
    """q2 given the higher token."""
    distribution[:] = 0.0
    s = 0.0
    for i in range(q.size):
        j = order[i]
        if j == first:
            break
        if q[j] > 0.0:
            distribution[j] = q[j] * (1.0 / others[first] + 1.0 / others[j])
            s += distribution[j]
    for t in range(q.size):
        distribution[t] /= s


@compiled
def _tries(contexts, sweep, residual):
    V = sweep.p.shape[2]
    rest, untried, distribution, others = np.empty(V), np.empty(V), np.empty(V), np.empty(V)
    order = np.empty(V, np.int64)
    for i in range(len(contexts)):
        b, v = contexts[i]
        n, w = opened(sweep, b, v, rest, untried, residual), sweep.weight[b, v]
        if n == 0:
            continue
        draws = sweep.draws[b, v, :n]
        tokens = sweep.tokens[b][draws]
        greedy, first = False, 0
        for j in range(n):
            if j == n - 2 and _ordered(rest, untried, order):
                greedy = True
                place = np.argsort(order)
                first = n - 2 if place[tokens[n - 2]] > place[tokens[n - 1]] else n - 1
                _higher(untried, order, others, distribution)
            elif greedy:
                _lower(untried, order, others, tokens[first], distribution)
            else:
                distribution[:] = untried
            k = j if not greedy else (first if j == n - 2 else 2 * n - 3 - first)
            remains = tried(sweep, b, v, j, draws[k], w, rest, distribution)
            if remains < 0.0:
                break
            w = remains
            if not greedy:
                without(untried, tokens[k])
        sweep.accept[b, v] = w
        if residual.size:
            residual[i] = rest


greedy_traversal_wor = LeafToRoot(
    method(
        "greedy_traversal_wor",
        "Greedy traversal verification, draws without replacement",
        "",
        {DraftSampling.WITHOUT_REPLACEMENT},
    ),
    _tries,
)
"""The verifier."""
