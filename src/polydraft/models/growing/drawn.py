"""Drawn trees of a batch in one call: forward passes, distributions and draws, depth by depth.

    by position   the tree of each row is fixed beforehand, see `layout`, or ends earlier by the nodes' own paths (`budget.Stop`). Paths that agree share
                  their rows: a prefix is run through the model once, whatever the number of its copies, and nodes without children not at all
    spares        beside the tokens of a chain: siblings that the chain does not have, the likeliest to be accepted first, see `spares`
    behind them   of a head that foretells all depths, where a branch costs no draft step: a chain again behind each spare sibling

What is drawn stays.
"""

from typing import NamedTuple

import numpy as np

from polydraft.core import DraftSampling
from polydraft.models.growing.guesses import MOST_GUESSES, guess
from polydraft.models.growing.rows import draft_forward, fed_by, head_of, rows_by_depth
from polydraft.models.growing.spares import branch
from polydraft.models.growing.tree_nodes import Room, Trees, add_row, draw_child, goes_on, join, set_reach
from polydraft.models.matrices.kernels import copy_row
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.categorical import choose_row, choose_systematic
from polydraft.sampling.noise import DRAFT, first_arrivals, uniform_at

_f32 = np.float32
DRAW = np.dtype(
    [
        (name, np.int64)
        for name in ("slot", "seed", "sample", "position", "depth", "width", "most_nodes", "num_pending")
    ]
)
"""A request for a tree that is drawn: the slot, the noise's key, spare siblings of a token at most, nodes that chains behind spares fill, 0 for none, and how
many committed tokens the cache lacks."""
IID, COUPLED, DISTINCT = (
    s.value for s in (DraftSampling.IID, DraftSampling.COUPLED, DraftSampling.WITHOUT_REPLACEMENT)
)
MISSING = -2
"""Token of a node that its row has too few tokens for; of one that is not drawn it is -1."""


class Depth(NamedTuple):
    """Where the nodes below depth `depth` begin and end in a tree by position."""

    begin: int
    end: int
    depth: int


@inner
def _planted(B, N, num_rows, vocab):
    """Trees of which nothing is drawn, with room for so many nodes and rows of `probs`."""
    nowhere = np.full((B, N), -1, np.int64)
    certain = np.ones((B, N))
    return Trees(
        np.zeros((B, N), np.int64),
        nowhere,
        nowhere.copy(),
        certain,
        np.zeros((B, num_rows, vocab), _f32),
        np.zeros((B, N), np.int64),
        nowhere.copy(),
        np.ones((B, num_rows)),
        certain.copy(),
        np.ones((B, N), np.bool_),
        np.zeros(B, np.int64),
    )


@inner
def _most_rows(places, requests, by_depth):
    """Of `probs`, of the tree with most nodes that have children. by_depth: whether a depth has one row."""
    most = 1
    for b in range(len(places.parents)):
        count = 0
        for d in range(places.inner.shape[1]):
            count += places.inner[b, d] - places.starts[b, d]
        if requests[b].most_nodes > 0:
            count = requests[b].depth if by_depth else requests[b].most_nodes + 1
        most = max(most, count)
    return most


@inner
def _most_nodes(places, requests, num_spares):
    """Nodes of the largest tree, roots and spare siblings among them."""
    most = places.parents.shape[1] + num_spares
    for b in range(len(requests)):
        most = max(most, requests[b].most_nodes + 1)
    return most


@inner
def _in_context(trees, b, above, begin, end, context):
    """How many of the nodes begin .. end-1 have a parent whose earliest copy is `context`."""
    count = 0
    for m in range(begin, end):
        count += trees.first[b, above[m]] == context
    return count


@inner(error_model="numpy")
def _draw(trees, b, above, depth, n, siblings, key, room):
    """The token of node n, a child of a node that goes on; where draws of a context belong together, those of its later nodes, too. above: of each node."""
    if siblings == DISTINCT:
        trees.tokens[b, n] = draw_child(trees, b, above[n], n, key, room.rest)
        return
    context = trees.first[b, above[n]]
    probs = trees.probs[b, trees.row[b, context]]
    if siblings == IID:
        trees.tokens[b, n] = choose_row(probs, uniform_at(key.seed, key.sample, key.position, DRAFT, n))
        return
    if _in_context(trees, b, above, depth.begin, n, context):
        return  # drawn with the first of them
    drawn = room.arrivals[: _in_context(trees, b, above, n, depth.end, context)]
    if siblings == COUPLED:
        first_arrivals(probs, key.seed, key.sample, key.position + depth.depth, drawn)
    else:
        choose_systematic(probs, uniform_at(key.seed, key.sample, key.position, DRAFT, context), drawn)
    turn = 0
    for m in range(n, depth.end):
        if trees.first[b, above[m]] == context:
            again = siblings == COUPLED and turn > 0 and drawn[turn] == drawn[turn - 1]
            trees.tokens[b, m] = MISSING if again else drawn[turn]
            turn += 1


@inner
def _first_copy(trees, b, above, depth, n):
    """The earliest node of this depth that spells the same path."""
    context = trees.first[b, above[n]]
    for m in range(depth.begin, n):
        is_same = trees.tokens[b, m] == trees.tokens[b, n]
        if is_same and (depth.depth == 0 or trees.first[b, above[m]] == context):
            return trees.first[b, m]
    return n


@inner
def _begin_depth(trees, places, requests, d, fed):
    """What the model reads to go on behind the nodes of depth d; returns behind how many of them rows are wanted."""
    num_logits = 0
    for b in range(len(requests)):
        root = requests[b].num_pending - 1
        begin = places.starts[b, d]
        end = places.inner[b, d]
        fed.first_logits[b] = root + begin
        fed.first_nodes[b] = 0 if d == 0 else fed.first_logits[b]
        fed.node_ends[b] = root + end if end > begin else fed.first_nodes[b]
        for node in range(begin, end):
            num_logits += trees.goes_on[b, node]
    return num_logits


@inner(error_model="numpy")
def _draw_depth(head, rules, trees, b, places, d, request, siblings, stops, fed, room):
    """Draw the children of the nodes of depth d; returns whether all that goes on stands in what the model sees already, as it was guessed."""
    root = request.num_pending - 1
    above = places.parents[b]
    depth = Depth(places.starts[b, d + 1], places.starts[b, d + 2], d)
    is_guessed = True
    for n in range(depth.begin, depth.end):
        parent = above[n]
        if trees.tokens[b, parent] < 0 or not trees.goes_on[b, parent]:
            trees.tokens[b, n] = -1
        else:
            _draw(trees, b, above, depth, n, siblings, request, room)
        if trees.tokens[b, n] < 0:
            trees.goes_on[b, n] = False
            continue
        join(head, rules, trees, b, n, parent, d, request)
        set_reach(trees, b, n, stops)
        trees.goes_on[b, n] = goes_on(trees, b, n, d + 1, stops)
        trees.first[b, n] = _first_copy(trees, b, above, depth, n)
        if trees.first[b, n] == n and trees.goes_on[b, n]:
            is_guessed &= fed.tokens[b, root + n] == trees.tokens[b, n]
            fed.tokens[b, root + n] = trees.tokens[b, n]
            fed.parents[b, root + n] = root + trees.first[b, parent]
    return is_guessed


@inner
def _last_node(trees, raw):
    """Behind the last node that is drawn; copies get the logits of their first ones."""
    last = 1
    for b in range(len(trees.tokens)):
        for n in range(1, trees.tokens.shape[1]):
            if trees.parents[b, n] >= 0:
                last = max(last, n + 1)
            elif trees.tokens[b, n] == -1:
                trees.tokens[b, n] = 0
        for n in range(raw.shape[1]):
            if trees.first[b, n] != n:
                copy_row(raw[b, trees.first[b, n]], raw[b, n])
    return last


@inner
def _room_for(rules, siblings, num_spares, num_nodes):
    return Room(
        np.empty(rules.outputs.ids.size, _f32),
        np.empty(rules.vocab, np.int32),
        np.empty(rules.vocab if siblings == DISTINCT or num_spares else 0, _f32),
        np.empty(num_nodes, np.int64),
    )


@inner(error_model="numpy")
def _add_rows(sync, rules, trees, b, begin, end, slot, logits, r, raw, room):
    """The rows behind nodes that go on, of the logits from r on; returns behind the last of them."""
    for node in range(begin, end):
        if trees.first[b, node] == node and trees.goes_on[b, node]:
            add_row(sync, rules, trees, b, node, logits[r], slot, room)
            if raw.shape[1] > 0:
                copy_row(logits[r], raw[b, node])
            r += 1
    return r


@inner
def _guess_ahead(places, d, fed, texts):
    """How many tokens are guessed ahead of a single chain, which are fed behind the last one of depth d; see `guesses`."""
    N = places.parents.shape[1]
    is_chain = len(places.parents) == 1 and places.starts.shape[1] > N and places.starts[0, N - 1] == N - 1
    last_run = places.inner[0].max() - 1
    if not is_chain or texts.tokens.size == 0 or d >= last_run:
        return 0
    most = min(MOST_GUESSES, last_run - d)
    count = guess(texts, fed.slots[0], fed.tokens[0], fed.parents[0], fed.node_ends[0], most)
    fed.node_ends[0] += count
    return count


@njit(cache=True, error_model="numpy", nogil=True)
def draw(sync, model, rules, requests, pending, places, siblings, raw, stops, texts):
    """Drawn trees. requests: [B] of `DRAW`.  pending: [B, P] tokens, the root last: less the root they lie in the caches then, and the tree behind them;
    lengths are the caller's, see `CompiledProposals._committed`.  rules: `rows.Rules`.  places: `layout.Layout`, of a tree that grows its chain.
    siblings: value of the DraftSampling of the draws.  raw: [B, N, all outputs], what the logits after each node are written to; or no nodes.
    texts: `guesses.Texts`, whose tokens a forward pass of a single chain guesses ahead.

    Returns tokens, parents, rows and confidences [B, N], probs [B, R, V], the end of the last node that is drawn, and the number of
    forward passes; a node that is not drawn has parent -1.
    """
    B, N = places.parents.shape
    head = head_of(model)
    num_outputs = model.sizes.outputs
    num_spares = min(stops.min_spare_chance.shape[1], N - 1)
    most_nodes = _most_nodes(places, requests, num_spares)
    trees = _planted(B, most_nodes, _most_rows(places, requests, rows_by_depth(head)), rules.vocab)
    room = _room_for(rules, siblings, num_spares, N)
    fed = fed_by(requests, pending, most_nodes)
    for b in range(B):
        trees.tokens[b, 0] = pending[b, requests[b].num_pending - 1]
    num_ahead = 0
    passes = 0
    logits = np.empty((0, 0), _f32)
    r = 0
    for d in range(places.inner.shape[1] - 1):
        num_logits = _begin_depth(trees, places, requests, d, fed)
        if num_logits == 0:
            break
        if num_ahead > 0:
            num_ahead -= 1
        else:
            num_ahead = _guess_ahead(places, d, fed, texts)
            logits = np.empty((num_logits + num_ahead, num_outputs), _f32)
            draft_forward(
                model,
                fed.slots,
                fed.tokens,
                fed.parents,
                fed.first_nodes,
                fed.node_ends,
                fed.first_logits,
                logits,
            )
            r = 0
            passes += 1
        for b in range(B):
            begin = places.starts[b, d]
            end = places.inner[b, d]
            r = _add_rows(sync, rules, trees, b, begin, end, fed.slots[b], logits, r, raw, room)
            is_guessed = _draw_depth(
                head, rules, trees, b, places, d, requests[b], siblings, stops, fed, room
            )
            num_ahead *= is_guessed
    for b in range(B if num_spares else 0):
        branch(sync, head, rules, trees, b, N + num_spares, requests[b], stops, fed, num_outputs, room)
    last = _last_node(trees, raw)
    return trees.tokens, trees.parents, trees.rows, trees.confidence, trees.probs, last, passes
