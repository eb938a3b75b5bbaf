"""The sizes of a round that promise most tokens per second, compiled: chains, K paths, a trunk and then paths, ragged pairs, trees by position.

kept, seen: [B, L] what each sequence's record holds.  priors: [B, L] acceptances.  costs: `RoundCosts.flat`.
asked[b]: gain, most paths (0 where the sequence sits this round out), cached tokens, rounds failed in a row, depth of the chain it drafts so far.
"""

import numpy as np

from polydraft.engine import acceptance
from polydraft.engine.costs import HINGE
from polydraft.engine.tree_search import chances, grow
from polydraft.verifiers.fast.rows import compiled

__all__ = ["base_seconds", "choose", "plain_seconds", "probe", "round_seconds"]

TREE_MARGIN = 0.01
"""Share by which a tree by position must promise to beat all other sizes; none is looked for where a chain is the best of these."""
STAYING = 1.01
"""What the tokens of the chain that is drafted so far count for: rounds of a new size cost 2% more, until the caches have forgotten the last."""
UNEVEN = 1.04
"""Seconds of a batch's drafts of different depths over those of as many tokens to one depth, beside what they are charged (measured, batches of four)."""


@compiled
def _shapes(most, max_trunk, max_short):
    """(width, trunk, short) of all shapes for up to `most` paths, by width: a chain, equal paths, paths behind a trunk, ragged pairs."""
    out = np.zeros((1 + (most - 1) * (max_trunk + 1) + (max_short if most > 1 else 0), 3), np.int64)
    out[0, 0], k = 1, 1
    for w in range(2, most + 1):
        for i in range(1 + max_trunk + (max_short if w == 2 else 0)):
            out[k] = w, (i if i <= max_trunk else 0), max(i - max_trunk, 0)
            k += 1
    return out


@compiled
def _nodes(width, depth, trunk, short):
    """Of paths, the first down to depth, those after it down to short (0: likewise), behind a trunk."""
    return depth + (width - 1) * max((min(depth, short) if short > 0 else depth) - trunk, 0)


@compiled
def plain_seconds(costs, contexts):
    """Seconds of a round without drafts."""
    return costs[10] + costs[11] * contexts.size + costs[12] * contexts.sum() + costs[3] * max(0, contexts.size - HINGE)


@compiled
def base_seconds(costs, contexts):
    """Seconds of a round with drafts but for what is drafted."""
    B = contexts.size
    return costs[0] + (costs[1] + costs[2]) * B + (costs[4] + costs[5]) * contexts.sum() + costs[3] * max(0, B - HINGE)


@compiled
def round_seconds(costs, base, B, nodes, by_context, deepest, drafting, branching):
    """Of a round that drafts `nodes` tokens; by_context: the sum over them of their sequences' cached tokens; see `costs.features`."""
    beyond = max(0, B + nodes - HINGE) - max(0, B - HINGE)
    seconds = base + (costs[2] + costs[7]) * nodes + costs[5] * by_context + costs[3] * beyond
    return seconds + costs[6] * deepest + costs[8] * drafting + costs[9] * branching


@compiled
def probe(kept, seen, priors, asked, costs, max_depth):
    """(depth, loss) of the chain for all who may draft that falls least short of plain decoding; loss: in tokens of each sequence, >= 0."""
    B, L = kept.shape
    base, plain, live, by_context = base_seconds(costs, asked[:, 2]), plain_seconds(costs, asked[:, 2]), 0, 0.0
    rates, tokens, logs = np.empty(L), np.empty(max_depth + 1), np.zeros(max_depth + 1)
    for b in range(B):
        if asked[b, 1] > 0:
            acceptance.by_depth(kept[b], seen[b], priors[b], 1.0, asked[b, 3], rates)
            acceptance.tokens_by_depth(rates, 1, 0, 0, tokens)
            logs += np.log(tokens)
            live += 1
            by_context += asked[b, 2]
    depth, most, loss = 1, 0.0, 0.0
    for d in range(1, max_depth + 1):
        seconds = round_seconds(costs, base, B, d * live, d * by_context, d, live, 0)
        each, rounds = np.exp(logs[d] / live), seconds / plain
        if each / rounds > most:
            depth, most, loss = d, each / rounds, max(rounds - each, 0.0)
    return depth, loss


@compiled
def _trees(chance, width, tokens):
    """tokens[D, n]: expected tokens of the tree of up to n nodes and depth D, at most `width` children a node; see `tree_search.grow`."""
    parents = np.empty(tokens.shape[1], np.int64)
    chance[:, width:] = 0.0
    tokens[0] = 0.0
    for D in range(1, len(tokens)):
        grow(chance, D, parents, tokens[D])


@compiled
def _settle(sizes, chances_of, trees):
    """The parents of each tree that was chosen, and its most children as its width."""
    N = trees.shape[1]
    tokens, children = np.empty(N), np.zeros(N, np.int64)
    for b in range(len(sizes)):
        if sizes[b, 4] > 0:
            grow(chances_of[b], sizes[b, 1], trees[b], tokens)
            children[:] = 0
            for n in range(1, sizes[b, 4] + 1):
                children[trees[b, n]] += 1
            sizes[b, 0] = children.max()


@compiled
def choose(kept, seen, priors, asked, costs, max_depth, max_trunk, max_short, margin, sizes, trees):
    """sizes[b] = (width, depth, trunk, short, nodes of a tree by position or 0) of the highest geometric mean of the sequences' speeds, which is returned.

    trees[b, : 1 + nodes]: parents of that tree; as many nodes as it has room for are considered.  Depth 0 where drafts do not pay.

    The sum of speeds would serve those that draft well first, and leave the others to smaller and dearer batches.
    For every deepest depth D each sequence takes the size of highest log tokens - price x seconds of its own nodes; the price,
    B / seconds of a round, follows from the last choice, each of which is better than the one before (log S <= log S0 + S/S0 - 1).
    """
    gains, widths, contexts = asked[:, 0], asked[:, 1].astype(np.int64), asked[:, 2]
    B, L = kept.shape
    most = 0
    for b in range(B):
        most = max(most, widths[b])
        sizes[b, 0], sizes[b, 1:] = 1, 0
    base = base_seconds(costs, contexts)
    plain = plain_seconds(costs, contexts)
    best = (1.0 + margin) / plain
    if most == 0:
        return 1.0 / plain
    shapes = _shapes(most, max_trunk, max_short)
    rates, tokens = np.empty((B, L)), np.empty((B, len(shapes), max_depth + 1))
    max_nodes = trees.shape[1] - 1 if most > 1 and max_depth > 1 else 0
    planned = B if max_nodes > 0 else 0
    chances_of, tokens_of = np.empty((planned, max_depth, most)), np.zeros((planned, max_depth + 1, max_nodes + 1))
    for b in range(B):
        for k in range(len(shapes)):
            if k < 2 and shapes[k, 0] <= widths[b]:  # a chain, then what parts
                acceptance.by_depth(kept[b], seen[b], priors[b], gains[b] if k else 1.0, asked[b, 3], rates[b])
            if shapes[k, 0] <= widths[b]:
                acceptance.tokens_by_depth(rates[b], shapes[k, 0], shapes[k, 1], shapes[k, 2], tokens[b, k])
        if 0 < asked[b, 4] <= max_depth:
            tokens[b, 0, int(asked[b, 4])] *= STAYING
    room = max(0.0, (HINGE - B) / B)
    tried = np.empty_like(sizes)
    if B == 1:
        for k in range(len(shapes)):
            w, t, s = shapes[k]
            for d in range(max(t, s) + 1, max_depth + 1):
                n = _nodes(w, d, t, s)
                seconds = round_seconds(costs, base, 1, n, n * contexts[0], d, 1, int(w > 1))
                if tokens[0, k, d] / seconds > best:
                    best = tokens[0, k, d] / seconds
                    sizes[0, 0], sizes[0, 1], sizes[0, 2], sizes[0, 3] = w, d, t, s
        least, max_nodes = best * (1.0 + TREE_MARGIN), max_nodes if sizes[0, 0] > 1 else 0
        if max_nodes > 0:
            chances(rates[0], chances_of[0])
            _trees(chances_of[0], widths[0], tokens_of[0])
        for d in range(1, max_depth + 1 if max_nodes > 0 else 1):
            for n in range(d + 1, max_nodes + 1):
                seconds = round_seconds(costs, base, 1, n, n * contexts[0], d, 1, 1)
                if tokens_of[0, d, n] / seconds > least:
                    best = least = tokens_of[0, d, n] / seconds
                    sizes[0, 1], sizes[0, 2], sizes[0, 3], sizes[0, 4] = d, 0, 0, n
        _settle(sizes, chances_of, trees)
        return best
    logs, logs_of_trees, live, cached = np.log(tokens), tokens_of, 0, 0.0
    grown = np.zeros(B, np.bool_)
    for b in range(B):
        live += widths[b] > 0
        cached += contexts[b] if widths[b] > 0 else 0.0
    for deepest in range(1, max_depth + 1):
        seconds = round_seconds(costs, base, B, deepest * live, deepest * cached, deepest, live, 0)
        total = 0.0
        for b in range(B):
            total += logs[b, 0, deepest] if widths[b] > 0 else 0.0
        if np.exp(total / B) / seconds > best:  # all draw as deep a chain; from there on it gets better
            best = np.exp(total / B) / seconds
            for b in range(B):
                sizes[b, 0], sizes[b, 1], sizes[b, 2:] = 1, (deepest if widths[b] > 0 else 0), 0
        for _ in range(4):
            price, before = B / seconds, seconds
            nodes, drafting, branching, reached, depths, total, by_context = 0, 0, 0, 0, 0, 0.0, 0.0
            for b in range(B):
                each, gain, gained = costs[2] + costs[5] * contexts[b] + costs[7], 0.0, 0.0
                tried[b, 0], tried[b, 1:] = 1, 0
                for k in range(len(shapes)):
                    w, t, s = shapes[k]
                    if w > widths[b]:
                        break
                    once = costs[8] + (costs[9] if w > 1 else 0.0)
                    for d in range(max(t, s) + 1, deepest + 1):
                        n = _nodes(w, d, t, s)
                        value = logs[b, k, d] - price * (n * each + costs[3] * max(0.0, n - room) + once)
                        if value > gain:
                            gain, gained = value, logs[b, k, d]
                            tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3] = w, d, t, s
                least, weighed = gain + TREE_MARGIN, max_nodes > 0 and tried[b, 0] > 1
                if weighed and not grown[b]:
                    chances(rates[b], chances_of[b])
                    _trees(chances_of[b], widths[b], tokens_of[b])
                    logs_of_trees[b], grown[b] = np.log(np.maximum(tokens_of[b], 1e-12)), True
                for d in range(1, deepest + 1 if weighed else 1):
                    for n in range(d + 1, max_nodes + 1):
                        if logs_of_trees[b, d, n] <= logs_of_trees[b, d, n - 1]:
                            continue
                        value = logs_of_trees[b, d, n] - price * (n * each + costs[3] * max(0.0, n - room) + costs[8] + costs[9])
                        if value > least:
                            least, gained = value, logs_of_trees[b, d, n]
                            tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3], tried[b, 4] = 2, d, 0, 0, n
                n = tried[b, 4] if tried[b, 4] > 0 else _nodes(tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3])
                nodes += n
                by_context += n * contexts[b]
                drafting += n > 0
                branching += tried[b, 0] > 1
                reached = max(reached, tried[b, 1])
                depths += tried[b, 1]
                total += gained
            if drafting == 0:
                seconds = plain
                break
            seconds = round_seconds(costs, base, B, nodes, by_context, reached, drafting, branching)
            seconds *= UNEVEN if depths < reached * drafting else 1.0
            found = np.exp(total / B) / seconds
            if found > best:
                best = found
                sizes[:] = tried
            if abs(seconds - before) < 0.005 * before:
                break
    _settle(sizes, chances_of, trees)
    return best
