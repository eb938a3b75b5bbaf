"""Mixtures of experts: which experts a row chooses, rows grouped by expert, and their products. An expert is read once for all rows.

    scores = softmax(router x), or its sigmoid
    a row chooses the k experts of the largest scores + bias, of the best groups alone where experts have groups
    y = sum of chosen scores, each over their sum where that is so, times scale, times expert(x)

Each row and choice has a place among those of all rows, ordered by expert. A row's bits follow from itself: what it chooses, each product, and the
order of the sum. Routing by groups is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.products import matmul
from polydraft.models.matrices.vectors import aligned
from polydraft.numerics.compile_time import inner
from polydraft.numerics.exponential import exp

SOFTMAX, SIGMOID, SPARSE_MIXER = map(np.int64, range(3))
"""What makes scores of a router's products."""


class Routing(NamedTuple):
    """experts: in all.  chosen: of them, for each row.  score: SOFTMAX, SIGMOID or SPARSE_MIXER, whose noise is that of its training.  groups, best_groups: of experts;
    pairs: whether groups are chosen by the sum of their two best experts, else by the best.
    shares: whether chosen scores are divided by their sum.  scale: of all weights."""

    experts: int
    chosen: int
    score: int = SOFTMAX
    groups: int = 1
    best_groups: int = 1
    shares: bool = True
    scale: np.float32 = np.float32(1.0)
    noise: np.float32 = np.float32(0.0)
    pairs: bool = True


class Choices(NamedTuple):
    """Of the rows in work.

    logits: [rows, E up to whole panels] the router's products.  eligible: [rows, E] experts that may still be chosen.
    experts, weights, places: [rows, k].  counts: [E] rows of each expert.  active: [E] experts that any row chose, in order.  first: [E + 1] their first places.
    """

    logits: np.ndarray
    eligible: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    active: np.ndarray
    first: np.ndarray


def new_choices(rows: int, routing: Routing, outputs: int) -> Choices:
    """Memory for so many rows. outputs: of the router, whole panels."""
    E = routing.experts
    k = routing.chosen
    return Choices(
        logits=aligned(rows, outputs),
        eligible=np.zeros((rows, E), np.uint8),
        experts=np.zeros((rows, k), np.int64),
        weights=aligned(rows, k),
        places=np.zeros((rows, k), np.int64),
        counts=np.zeros(E, np.int64),
        active=np.zeros(E, np.int64),
        first=np.zeros(E + 1, np.int64),
    )


@inner(error_model="numpy")
def _score(row, bias, routing):
    """Products of a router -> scores, in place."""
    n = routing.experts
    top = np.float32(-np.inf)
    total = np.float32(0.0)
    for e in range(len(bias)):
        row[e] += bias[e]
    if routing.score == SIGMOID:
        for e in range(n):
            row[e] = np.float32(1.0) / (np.float32(1.0) + exp(-row[e]))
        return
    for e in range(n):
        top = row[e] if row[e] > top else top
    for e in range(n):
        row[e] = exp(row[e] - top)
        total += row[e]
    for e in range(n):
        row[e] /= total


@inner
def _preference(row, choice, e):
    return row[e] + choice[e] if len(choice) > 0 else row[e]


@inner
def _open_groups(row, choice, routing, eligible):
    """Leave the best groups open: those whose two best experts have the largest sums, or whose best one is."""
    size = routing.experts // routing.groups
    for e in range(routing.experts):
        eligible[e] = 0
    for _ in range(routing.best_groups):
        best = np.int64(-1)
        best_sum = np.float32(0.0)
        for g in range(routing.groups):
            first = np.float32(-np.inf)
            second = np.float32(-np.inf)
            for e in range(g * size, (g + 1) * size):
                value = _preference(row, choice, e)
                if value > first:
                    second = first
                    first = value
                elif value > second:
                    second = value
            total = first + second if routing.pairs else first
            if not eligible[g * size] and (best < 0 or total > best_sum):
                best = np.int64(g)
                best_sum = total
        for e in range(best * size, (best + 1) * size):
            eligible[e] = 1


@inner(error_model="numpy")
def _mix_sparsely(row, routing, eligible, experts, weights):
    """The best expert by its share among those that training may have taken for it, then the best of the others likewise (arXiv 2409.12136, appendix A)."""
    for e in range(routing.experts):
        eligible[e] = 1
    for j in range(routing.chosen):
        best = np.int64(-1)
        for e in range(routing.experts):
            if eligible[e] and (best < 0 or row[e] > row[best]):
                best = np.int64(e)
        top = row[best]
        total = np.float32(0.0)
        for e in range(routing.experts):
            distance = (top - row[e]) / max(abs(row[e]), top)
            if eligible[e] and not distance > np.float32(2.0) * routing.noise:
                total += exp(row[e] - top)
        experts[j] = best
        weights[j] = np.float32(1.0) / total
        eligible[best] = 0


@inner(error_model="numpy")
def choose(row, bias, choice, factors, routing, eligible, experts, weights):
    """The experts of a row, best first, and their weights. row: the router's products, which become scores.

    bias: [E] of the router, or nothing.  choice: [E] added to scores where experts are chosen, or nothing.  factors: [E] of weights, or nothing.  Of equal ones the first is chosen.
    """
    if routing.score == SPARSE_MIXER:
        _mix_sparsely(row, routing, eligible, experts, weights)
        return
    _score(row, bias, routing)
    if routing.groups > 1:
        _open_groups(row, choice, routing, eligible)
    else:
        for e in range(routing.experts):
            eligible[e] = 1
    total = np.float32(0.0)
    for j in range(routing.chosen):
        best = np.int64(-1)
        for e in range(routing.experts):
            if eligible[e] and (best < 0 or _preference(row, choice, e) > _preference(row, choice, best)):
                best = np.int64(e)
        weights[j] = row[best]
        experts[j] = best
        eligible[best] = 0
        total += row[best]
    for j in range(routing.chosen):
        weights[j] *= routing.scale / total if routing.shares else routing.scale
        if len(factors) > 0:
            weights[j] *= factors[experts[j]]


@inner
def group(choices, rows):
    """Give each row and choice its place; returns how many experts are active."""
    counts = choices.counts
    first = choices.first
    active = choices.active
    num_active = np.int64(0)
    for e in range(len(counts)):
        counts[e] = 0
    for t in range(rows):
        for j in range(choices.experts.shape[1]):
            counts[choices.experts[t, j]] += 1
    place = np.int64(0)
    for e in range(len(counts)):
        count = counts[e]
        counts[e] = place
        if count > 0:
            active[num_active] = e
            first[num_active] = place
            num_active += 1
        place += count
    first[num_active] = place
    for t in range(rows):
        for j in range(choices.experts.shape[1]):
            e = choices.experts[t, j]
            choices.places[t, j] = counts[e]
            counts[e] += 1
    return num_active


@inner
def gather(source, choices, out, begin, end):
    """out[place] = source[t] for each choice of rows begin .. end-1."""
    for t in range(begin, end):
        for j in range(choices.places.shape[1]):
            row = source[t]
            target = out[choices.places[t, j]]
            for i in range(len(target)):
                target[i] = row[i]


@inner
def multiply_experts(x, w, offset, rounded, y, choices, begin, end):
    """Items begin .. end-1 of the products of all places: panel by panel of one active expert after the other.

    x, rounded, y: [places, ...], as `products.matmul` takes them.  offset: of the layer's first expert in w.
    """
    while begin < end:
        a = begin // w.panels
        panel = begin % w.panels
        last = min(w.panels, panel + end - begin)
        first = choices.first[a]
        rows = choices.first[a + 1] - first
        matmul(x[first:], w, offset + choices.active[a], rounded[first:], y[first:], panel, last, rows, False)
        begin += last - panel


@inner(error_model="numpy")
def clamped_gate(x, n, bias, limit, alpha, out):
    """out[i] = (clamp(up) + 1) gate sigmoid(alpha gate), gate at most the limit: gpt-oss' activation. x: [>= 2 n] gate and up.  bias: [2 n] of them."""
    for i in range(n):
        gated = min(x[i] + bias[i], limit)
        right = min(max(x[n + i] + bias[n + i], -limit), limit)
        out[i] = (right + np.float32(1.0)) * gated / (np.float32(1.0) + exp(-alpha * gated))


@inner
def combine(y, bias, choices, t, out):
    """out = sum of what the experts of row t gave, by weight. y: [places, >= h].  bias: [E, h or 0] added to what each gave."""
    for j in range(choices.places.shape[1]):
        source = y[choices.places[t, j]]
        weight = choices.weights[t, j]
        for i in range(len(out)):
            out[i] = weight * source[i] if j == 0 else out[i] + weight * source[i]
        if bias.shape[1] > 0:
            added = bias[choices.experts[t, j]]
            for i in range(len(out)):
                out[i] += weight * added[i]
