"""What the nodes of a most probable tree are worth, by their place: estimated for each sequence from its own rounds, around a prior.

A tree of n nodes and depth D holds, in the order of falling path probability, all smaller ones: leave out what is deeper than D' and
cut after r nodes, and what is left is the tree of that budget. So one verified round tells of every budget (r, D') within its own

    v  value of a node: the product of the target's probabilities along its path, which is the chance that `match` keeps it
    table[0, D' - 1, r - 1]  mean v of the r-th node within depth D';  [1, ...] its chance to be drafted at all;  [2, ...] to be the first of its depth

and the tokens, drafted nodes and passes of the draft model that a budget yields are sums over its places. Of deterministic drafts all
of this is observed without noise of coins: E[accepted | tree] = sum v. A place that a round left empty, as nothing there was worth
drafting, counts as a node of no value; places beyond a full tree are not judged.
    mean = (seen values + STRENGTH prior x scale) / (looks + STRENGTH);  scale: values seen over values that the prior expected
so that places which were not drafted lately move with those that were.

What the draft's own path probability of a node means for its value is learnt too, by half octaves (a greedy target takes far more than the draft's
law at temperature 1 says): `least` is the path probability above which nodes have been worth a price.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft
from polydraft.engine.acceptance import EVERY_ROUND, Acceptance
from polydraft.theory.tree_plan import grow_by_probability
from polydraft.verifiers.fast.rows import compiled, highest, soften

__all__ = ["BINS", "SHAPE", "SIZE", "assumed", "fit", "least", "means", "observe"]

SHAPE = 3, 12, 24
"""What is told apart: value, drafted, first of its depth; depths; nodes."""
BINS = 12
"""Half octaves of path probability, the first below 1."""
SIZE, LOOKS = math.prod(SHAPE), math.prod(SHAPE[1:])
STRENGTH, STRENGTH_ALL = 8.0, 12.0
DECAY, FORGET = 0.98, 0.85
"""What a look leaves of those before, and of the strength of the prior for all places together."""
LEAST = 1e-4
"""Values below this count as none."""


def fit(record: Acceptance) -> Acceptance:
    """The same record, of these tables if it was of others; its `rate` is then the mean value of the first node.

    kept: the sums of all three tables, then values by path probability.  seen: looks by depth and node, then nodes by path probability.

    Example:
        >>> fit(Acceptance()).kept.shape
        (876,)
    """
    if record.kept.size != SIZE + BINS:
        record.kept, record.seen = np.zeros(SIZE + BINS), np.zeros(LOOKS + BINS)
    return record


def assumed(rates: Sequence[float] | np.ndarray) -> np.ndarray:
    """The means, laid out as `kept`, where only the acceptance of first children is known, by depth: of the rest each next child takes the same share, and path probabilities are right.

    Example:
        >>> assumed([0.5] * 12)[:SIZE].reshape(SHAPE)[0, 1, :3].tolist()
        [0.5, 0.25, 0.25]
    """
    table = np.zeros(SHAPE)
    table[1] = 1.0
    shares = [a * (1.0 - a) ** np.arange(SHAPE[2]) for a in np.asarray(rates, np.float64)]
    for deepest in range(1, SHAPE[1] + 1):
        tokens, parents, _ = grow_by_probability(
            lambda path: shares[min(len(path), len(shares) - 1)], max_nodes=SHAPE[2], max_depth=deepest
        )
        values, depths = [1.0], [0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            depths.append(depths[parent] + 1)
            values.append(values[parent] * shares[min(depths[parent], len(shares) - 1)][token])
        table[0, deepest - 1, : len(values) - 1] = values[1:]
        table[2, deepest - 1, : len(values) - 1] = np.diff(np.maximum.accumulate(depths))
    return np.concatenate([table.ravel(), 2.0 ** (-0.25 - 0.5 * np.arange(BINS))])


@compiled
def means(kept, seen, prior, looks, out):
    """out = the means of the module's formula, laid out as `kept`, of [SIZE + BINS]; those by path probability fall with it."""
    D, N = SHAPE[1], SHAPE[2]
    row, strength = 0, max(STRENGTH_ALL * FORGET**looks, 0.5)
    for d in range(1, D):
        if 2.0 * seen[d * N] >= seen[0] > 0.0:
            row = d  # the deepest trees that are usual
    found, expected = strength, strength
    for r in range(row * N, row * N + N):
        found += kept[r]
        expected += seen[r] * prior[r]
    scale = found / expected
    for i in range(D * N):
        share = 1.0 / (seen[i] + STRENGTH)
        out[i] = min((kept[i] + STRENGTH * prior[i] * scale) * share, 1.0)
        for j in range(i + D * N, SIZE, D * N):
            out[j] = (kept[j] + STRENGTH * prior[j]) * share
    above = 0.0
    for i in range(BINS - 1, -1, -1):
        above = max(above, (kept[SIZE + i] + STRENGTH * prior[SIZE + i]) / (seen[LOOKS + i] + STRENGTH))
        out[SIZE + i] = above


def least(worth: np.ndarray, price: float) -> float:
    """The path probability above which nodes are worth a price, at most that of the first half octave. worth: [BINS] means.

    Example:
        >>> least(assumed([0.5])[SIZE:], 0.3)
        0.353...
    """
    return float(2.0 ** (-0.5 * max(1, int((worth >= price).sum()))))


@compiled
def _look(logits, tokens, parents, scores, greedy, max_nodes, max_depth, kept, seen):
    """Add one row's tree, drafted within `max_nodes` and `max_depth`."""
    N, V = logits.shape
    value, depth = np.zeros(N), np.zeros(N, np.int64)
    top, total, p = np.empty(N, np.float32), np.zeros(N), np.empty(V, np.float32)
    value[0], size = 1.0, 0
    for n in range(1, N):
        parent = parents[n]
        if parent < 0:
            break
        size, depth[n] = size + 1, depth[parent] + 1
        if value[parent] < LEAST:
            continue
        if total[parent] == 0.0:
            top[parent] = highest(logits[parent])
            total[parent] = 1.0 if greedy else soften(logits[parent], p)
        x = logits[parent, tokens[n]]
        if greedy:
            value[n] = value[parent] if x == top[parent] else 0.0
        else:
            value[n] = value[parent] * np.exp(np.float64(x - top[parent])) / total[parent]
    for n in range(1, size + 1):
        i = min(int(-2.0 * np.log2(max(scores[n], 1e-9))), BINS - 1)
        kept[SIZE + i] += value[n]
        seen[LOOKS + i] += 1.0
    for deepest in range(min(max_depth, SHAPE[1])):
        at, end, reached = deepest * SHAPE[2], (deepest + 1) * SHAPE[2], 0
        for n in range(1, size + 1):
            if depth[n] <= deepest + 1 and at < end:
                kept[at] += value[n]
                kept[at + LOOKS] += 1.0
                kept[at + 2 * LOOKS] += depth[n] > reached
                seen[at] += 1.0
                reached = max(reached, depth[n])
                at += 1
        if size < max_nodes:
            seen[at : min(deepest * SHAPE[2] + max_nodes, end)] += 1.0


def observe(
    records: Sequence[Acceptance],
    draft: Draft,
    processed: Float[Tensor, "B N V"],
    greedy: Sequence[bool],
    budgets: Sequence[Budget],
    *,
    decay: float = DECAY,
) -> None:
    """Fold a round into each sequence's record. processed, greedy, decay: as in `acceptance.look`.  budgets: of the draft, without depth where none was asked for."""
    looked = list[int]()
    for b, (record, budget) in enumerate(zip(records, budgets, strict=True)):
        if budget.max_depth:
            record.rounds += 1
            if record.rounds <= EVERY_ROUND or record.rounds % 4 == 0 or decay == 1.0:
                looked.append(b)
    if not looked:
        return
    scores = np.ones(draft.tree.tokens.shape) if draft.scores is None else draft.scores.numpy()
    (tokens, parents), x = draft.tree.host, processed.float().cpu().contiguous().numpy()
    for b in looked:
        r, g = fit(records[b]), budgets[b]
        r.fade(decay)
        _look(x[b], tokens[b], parents[b], scores[b], greedy[b], g.max_nodes, g.max_depth, r.kept, r.seen)
        r.folded += 1
