"""Trees of a head that knows the logits of all depths after one forward pass: a branch costs a row of the target's and no draft step.

    greedy   the most probable tree: nodes join best first, by the product of their calibrated confidences, up to the first that is not worth its row
    sampled  a chain that ends by its own path; beside its tokens spare siblings, drawn without replacement, the likeliest to be accepted first;
             behind each of them a chain again. Those at the root are K paths, each as long as it pays

A depth's distribution is made once, where no drafted token says anything (`heads.markov`). With a Markov part the most probable tree adds its bias to
the CANDIDATES largest of the depth alone, as a tree of point masses may be any; the rows of draws have it in full. Confidence in a token is its
probability, times what a confidence part says of its place.

What is drawn stays, and what is drawn beside or behind a spare sibling is decided by the chain, and by the spare's own path: the chain is tried before
them, and no other spare is looked at. So verifiers that try siblings in the order of their draws stay exact (`budget.Stop`). Traps, tested as wrong
variants: a spare that is dropped after a look at it, and chains behind spares that are drawn from the row of the first chain at their depth.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import SamplingParams, TokenTree
from polydraft.core.budget import Budget
from polydraft.core.confidence import acceptance_at, ranked_acceptance_at
from polydraft.heads.markov import add_bias, bias_vectors
from polydraft.models.compiled.draft_vocabulary import draft_samplings
from polydraft.models.compiled.proposals import Keys, planted
from polydraft.models.compiled.stops import Stops, stops_asked
from polydraft.models.compiled.trees import draft_distribution
from polydraft.models.matrices.kernels import copy_row
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import ROWS, sync
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import DRAFT, uniform_at

__all__ = ["Drawn", "draw_trees", "most_probable_trees"]

CANDIDATES = 256
"""Tokens of a depth to which a Markov part's bias is added."""
_f32 = np.float32
REQUEST = np.dtype(
    [(name, np.int64) for name in ("slot", "root", "seed", "sample", "position", "depth", "nodes", "width")]
)
"""Of a tree: the slot and the last committed token, the noise's key, and the bounds of its budget."""


@inner(error_model="numpy")
def _sure(markov, slot, depth, token):
    """What the head's confidence part says of the place behind a token of this depth."""
    if len(markov.sure_place) == 0:
        return 1.0
    logit = markov.sure[slot, depth]
    for i in range(len(markov.sure_word)):
        logit += markov.words[token, i] * markov.sure_word[i]
    return 1.0 / (1.0 + np.exp(-np.float64(logit)))


@inner(error_model="numpy")
def _largest(values, count, places):
    """Places of the `count` largest values, in their order, the first of equals first; returns how many are positive."""
    size = 0
    for t in range(values.size):
        if values[t] <= 0.0 or (size == count and values[t] <= values[places[size - 1]]):
            continue
        size = min(size + 1, count)
        at = size - 1
        while at > 0 and values[places[at - 1]] < values[t]:
            places[at] = places[at - 1]
            at -= 1
        places[at] = t
    return size


class DraftBatch(NamedTuple):
    """What is drafted. ids: the draft vocabulary.  requests: [B] of `REQUEST`.  samplings, bias: of `draft_vocabulary.draft_samplings`."""

    ids: Int[np.ndarray, " D"]
    requests: np.ndarray
    samplings: np.ndarray
    bias: Float[np.ndarray, "B D"]
    stops: Stops


class _Depths(NamedTuple):
    """Candidates of every depth, made when it opens. tokens, probs: [K, C] of the draft vocabulary.  size: [K].  rest: [K] what others have.
    rows: [K, r, C] of W2."""

    tokens: Int[np.ndarray, "K C"]
    probs: Float[np.ndarray, "K C"]
    size: Int[np.ndarray, " K"]
    rest: Float[np.ndarray, " K"]
    rows: Float[np.ndarray, "K r C"]


@inner(error_model="numpy")
def _open_depth(sync, model, depths, slot, d, bias, sampling, room, probs, ids):
    """The candidates of a depth."""
    copy_row(model.logits[slot, d], room)
    draft_distribution(sync, room, bias, sampling, probs, ids)
    size = _largest(probs, depths.tokens.shape[1], depths.tokens[d])
    total = 0.0
    for c in range(size):
        depths.probs[d, c] = probs[depths.tokens[d, c]]
        total += depths.probs[d, c]
    depths.size[d], depths.rest[d] = size, max(1.0 - total, 0.0)
    for i in range(depths.rows.shape[1]):
        for c in range(size):
            depths.rows[d, i, c] = model.markov.rows[i, depths.tokens[d, c]]


@inner(error_model="numpy")
def _children(model, depths, d, vector, inverse, probs):
    """Probabilities of a depth's candidates behind a node, with what the drafted tokens before it say. inverse: of the temperature."""
    size = depths.size[d]
    if model.markov.kind == 0:
        for c in range(size):
            probs[c] = depths.probs[d, c]
        return
    biases = np.zeros(size)
    top = 0.0
    mean = 0.0
    for i in range(vector.size):
        for c in range(size):
            biases[c] += np.float64(vector[i] * depths.rows[d, i, c])
    for c in range(size):
        top = max(top, biases[c]) if c else biases[c]
        mean += biases[c] / size
    total = depths.rest[d] * np.exp(inverse * (mean - top))
    for c in range(size):
        probs[c] = depths.probs[d, c] * np.exp(inverse * (biases[c] - top))
        total += probs[c]
    for c in range(size):
        probs[c] /= total


@njit(cache=True, error_model="numpy", nogil=True)
def _most_probable(sync, model, batch, tokens, parents, confidence):
    """Fill trees whose roots are there; see the module. Returns how many nodes each has. Without columns of `stops.min_reach` confidences are the
    probabilities alone, uncalibrated."""
    B, N = tokens.shape
    ids = batch.ids
    min_reach = batch.stops.min_reach
    acceptance = batch.stops.acceptance
    min_spare_chance = batch.stops.min_spare_chance
    outputs = model.sizes.outputs
    K = model.logits.shape[1]
    r = model.markov.words.shape[1] if model.markov.kind else 0
    C = CANDIDATES if r else N
    calibrated = min_reach.shape[1] > 0
    num_tokens = ids.size if ids.size else outputs
    room = np.empty(outputs, _f32)
    probs = np.empty(num_tokens, _f32)
    places = np.empty(num_tokens, np.int32)
    sizes = np.ones(B, np.int64)
    vector = np.empty(r, _f32)
    C = min(C, num_tokens)
    for b in range(B):
        g = batch.requests[b]
        sampling = batch.samplings[b]
        if g.depth == 0:
            continue
        depths = _Depths(
            np.empty((K, C), np.int64),
            np.empty((K, C)),
            np.full(K, -1),
            np.empty(K),
            np.empty((K, r, C), _f32),
        )
        behind = np.empty((N, C))
        order = np.empty((N, C), np.int64)  # probabilities of candidates behind a node, and their order
        turn = np.full(N, -1)
        count = np.zeros(N, np.int64)
        sure = np.ones(N)
        values = np.ones(N)
        deep = np.zeros(N, np.int64)
        reach = np.zeros(K + 1)
        expanded = np.zeros(K + 1, np.int64)
        size = 1
        inverse = 1.0 / max(sampling.temperature, 1e-6)
        opened = 0
        while True:
            for n in range(size):  # those behind which rows are to be looked at now
                d = deep[n]
                if turn[n] >= 0 or d >= g.depth or expanded[d] >= g.width:
                    continue
                if d == opened:
                    if d > 0 and calibrated and reach[d] < min_reach[b, min(d, min_reach.shape[1]) - 1]:
                        continue
                    _open_depth(sync, model, depths, g.slot, d, batch.bias[b], sampling, room, probs, places)
                    opened += 1
                if d < opened:
                    if r:
                        bias_vectors(model.markov, g.slot, tokens[b], parents[b], n, d, vector)
                    _children(model, depths, d, vector, inverse, behind[n])
                    count[n] = _largest(behind[n, : depths.size[d]], min(N, C), order[n])
                    turn[n] = 0
                    expanded[d] += 1
                    if calibrated:
                        sure[n] = _sure(model.markov, g.slot, d, tokens[b, n])
            best = -1
            value = 0.0
            certain = 0.0
            for n in range(size):
                if 0 <= turn[n] < count[n]:
                    sure_of = behind[n, order[n, turn[n]]] * sure[n]
                    chance = values[n] * (
                        ranked_acceptance_at(sure_of, acceptance[b]) if calibrated else sure_of
                    )
                    if chance > value:
                        best = n
                        value = chance
                        certain = sure_of
            if best < 0 or size > g.nodes or value < sampling.min_path_prob:
                break
            if (
                min_spare_chance.shape[1] > 0
                and size > 1
                and (size - 2 >= min_spare_chance.shape[1] or value < min_spare_chance[b, size - 2])
            ):
                break
            d = deep[best]
            token = depths.tokens[d, order[best, turn[best]]]
            tokens[b, size] = ids[token] if ids.size else token
            parents[b, size] = best
            confidence[b, size] = certain
            values[size] = value
            deep[size] = d + 1
            reach[d + 1] += value
            turn[best] += 1
            size += 1
        sizes[b] = size
    return sizes


class _Places(NamedTuple):
    """Of one tree while it is drawn. depth: of each node.  row_at: row of `probs` that the nodes of a depth share."""

    depth: Int[np.ndarray, " N"]
    row_at: Int[np.ndarray, " K"]


class _Room(NamedTuple):
    """Where rows are made. logits: [1, outputs].  compact: [D] probabilities of the draft vocabulary.  order: [outputs].  rest: [V] of a row."""

    logits: Float[np.ndarray, "1 outputs"]
    compact: Float[np.ndarray, " D"]
    order: Int[np.ndarray, " outputs"]
    rest: Float[np.ndarray, " V"]


@inner(error_model="numpy")
def _add_row(sync, model, batch, b, n, trees, places, room):
    """The distribution behind a node, made where there is none yet."""
    slot = batch.requests[b].slot
    d = places.depth[n]
    row = trees.num_rows[b]
    if model.markov.kind == 0 and places.row_at[d] >= 0:
        trees.row[b, n] = places.row_at[d]
        return
    copy_row(model.logits[slot, d], room.logits[0])
    if model.markov.kind:
        vectors = np.empty((1, model.markov.words.shape[1]), _f32)
        bias_vectors(model.markov, slot, trees.tokens[b], trees.parents[b], n, d, vectors[0])
        add_bias(model.markov.rows, vectors, room.logits, 1)
    out = room.compact if batch.ids.size else trees.probs[b, row]
    draft_distribution(sync, room.logits[0], batch.bias[b], batch.samplings[b], out, room.order)
    for i in range(batch.ids.size):
        trees.probs[b, row, batch.ids[i]] = room.compact[i]
    trees.row[b, n] = places.row_at[d] = row
    trees.num_rows[b] += 1


@inner(error_model="numpy")
def _draw(model, batch, b, parent, node, trees, places, rest):
    """Node `node`, a child of `parent` that is none of the children that are there; whether the row had one."""
    g = batch.requests[b]
    row = trees.row[b, parent]
    d = places.depth[parent]
    q = trees.probs[b, row]
    copy_row(q, rest)
    for m in range(parent + 1, node):
        if trees.parents[b, m] == parent:
            rest[trees.tokens[b, m]] = 0.0
    token = choose_row(rest, uniform_at(g.seed, g.sample, g.position, DRAFT, node))
    if token < 0:
        return False
    trees.tokens[b, node] = token
    trees.parents[b, node] = parent
    trees.rows[b, node] = row
    places.depth[node] = d + 1
    trees.confidence[b, node] = q[token] * _sure(model.markov, g.slot, d, trees.tokens[b, parent])
    return True


@inner(error_model="numpy")
def _chain_from(sync, model, batch, b, n, size, end, trees, places, room):
    """Draw a chain behind node n, up to node `end` at most. size: how many nodes there are; returns how many there are then."""
    min_reach = batch.stops.min_reach
    acceptance = batch.stops.acceptance
    while size < end and places.depth[n] < batch.requests[b].depth:
        if n > 0 and trees.reach[b, n] < min_reach[b, min(places.depth[n], min_reach.shape[1]) - 1]:
            break
        _add_row(sync, model, batch, b, n, trees, places, room)
        if not _draw(model, batch, b, n, size, trees, places, room.rest):
            break
        trees.reach[b, size] = trees.reach[b, n] * acceptance_at(trees.confidence[b, size], acceptance[b])
        n = size
        size = size + 1
    return size


@njit(cache=True, error_model="numpy", nogil=True)
def _drawn(sync, model, batch, N, num_rows, vocab):
    """Draw trees of N nodes and so many rows at most, see the module; and how many nodes each has."""
    B = len(batch.requests)
    outputs = model.sizes.outputs
    stops = batch.stops
    trees = planted(B, N, num_rows, vocab)
    sizes = np.ones(B, np.int64)
    chances = np.empty(N)
    room = _Room(
        np.empty((1, outputs), _f32),
        np.empty(batch.ids.size, _f32),
        np.empty(outputs, np.int32),
        np.empty(vocab, _f32),
    )
    for b in range(B):
        trees.tokens[b, 0] = batch.requests[b].root
        g = batch.requests[b]
        min_spare_chance = stops.min_spare_chance[b]
        spare_acceptance = stops.spare_acceptance[b]
        places = _Places(np.zeros(N, np.int64), np.full(model.logits.shape[1] + 1, -1))
        size = _chain_from(sync, model, batch, b, 0, 1, g.nodes + 1, trees, places, room)
        length = size
        beside = np.zeros(N, np.int64)
        for n in range(length - 1):
            elder = acceptance_at(trees.confidence[b, n + 1], stops.acceptance[b])
            chances[n] = trees.reach[b, n] * (1.0 - elder) * spare_acceptance
        while size <= g.nodes and length > 1 and size - 2 < min_spare_chance.size:
            parent = chances[: length - 1].argmax()
            if chances[parent] < min_spare_chance[size - 2]:
                break
            if _draw(model, batch, b, parent, size, trees, places, room.rest):
                trees.reach[b, size] = chances[parent]
                size += 1
            beside[parent] += 1
            chances[parent] = chances[parent] * (1.0 - spare_acceptance) if beside[parent] < g.width else -1.0
        end = size
        most = (g.nodes + 1 - size) // max(size - length, 1)  # nodes behind a spare sibling, at most
        for n in range(length, end):
            size = _chain_from(sync, model, batch, b, n, size, size + most, trees, places, room)
        sizes[b] = size
    return trees, sizes


class Drawn(NamedTuple):
    """Trees, each node's row of `probs`, the rows that tokens were drawn from, and the confidence in each."""

    tree: TokenTree
    rows: Int[Tensor, "B N"]
    probs: Float[Tensor, "B R V"]
    confidence: Float[Tensor, "B N"]


def _batch_of(
    model: Any,
    slots: Sequence[int],
    roots: Sequence[int],
    keys: Keys,
    budgets: Sequence[Budget],
    params: Sequence[SamplingParams],
) -> DraftBatch:
    bounds = [(g.max_depth if g.max_nodes else 0, g.max_nodes, g.width) for g in budgets]
    requests = np.array(
        [
            (*about, *bound)
            for about, bound in zip(zip(slots, roots, *keys, strict=True), bounds, strict=True)
        ],
        REQUEST,
    )
    samplings, bias = draft_samplings(params, model.vocab_size, model.draft_ids)
    samplings["min_path_prob"] = [g.min_path_prob for g in budgets]
    return DraftBatch(
        model.draft_ids, requests, samplings, bias, stops_asked(tuple(g.stop for g in budgets), len(budgets))
    )


def most_probable_trees(
    model: Any,
    slots: Sequence[int],
    roots: Sequence[int],
    budgets: Sequence[Budget],
    params: Sequence[SamplingParams],
) -> tuple[TokenTree, Float[np.ndarray, "B N"]]:
    """The most probable tree of each slot, and the confidence in its nodes. model: a `depth_compiled.DepthDistributions` that knows these slots.

    budgets: grown ones, of whose depths `width` nodes are expanded at most; with a stop path probabilities are products of calibrated confidences.
    """
    nothing = [0] * len(slots)
    batch = _batch_of(model, slots, roots, (nothing, nothing, nothing), budgets, params)
    tokens = np.zeros((len(slots), 1 + max(g.max_nodes for g in budgets)), np.int64)
    tokens[:, 0] = roots
    parents = np.full_like(tokens, -1)
    confidence = np.ones(tokens.shape)
    with ROWS:
        sizes = _most_probable(sync, model.arrays, batch, tokens, parents, confidence)
    N = sizes.max()
    return TokenTree.of(tokens[:, :N].copy(), parents[:, :N].copy()), confidence[:, :N].copy()


def draw_trees(
    model: Any,
    slots: Sequence[int],
    roots: Sequence[int],
    keys: Keys,
    budgets: Sequence[Budget],
    params: Sequence[SamplingParams],
) -> Drawn:
    """A drawn tree for each slot: a chain, spare siblings and chains behind them, see the module. model: as of `most_probable_trees`.

    keys: seeds, sample indices and positions of the noise.  budgets: chains, or grown ones, beside whose tokens `width` spare siblings are drawn at
    most; all that draft have a stop.
    """
    batch = _batch_of(model, slots, roots, keys, budgets, params)
    num_nodes = 1 + max(g.max_nodes for g in budgets)
    num_rows = num_nodes if model.arrays.markov.kind else model.depths
    with ROWS:
        trees, sizes = _drawn(sync, model.arrays, batch, num_nodes, num_rows, model.vocab_size)
    N = int(sizes.max())
    used = max(int(trees.num_rows.max()), 1)
    tree = TokenTree.of(trees.tokens[:, :N].copy(), trees.parents[:, :N].copy())
    return Drawn(
        tree,
        *(
            torch.from_numpy(x.copy())
            for x in (trees.rows[:, :N], trees.probs[:, :used], trees.confidence[:, :N])
        ),
    )
