"""Drawn trees of a batch in one call: forward passes, distributions and draws, depth by depth.

    by position   the tree of each row is fixed beforehand, see `layout`, or ends earlier by the nodes' own paths (`budget.Stop`). Paths that agree share
                  their rows: a prefix is run through the model once, whatever the number of its copies, and nodes without children not at all
    spares        beside the tokens of a chain: siblings that the chain does not have, the likeliest to be accepted first
    behind them   of a head that foretells all depths, where a branch costs no draft step: a chain again behind each spare sibling

What is drawn stays, and what is drawn beside or behind a spare sibling is decided by the chain, and by the spare's own path: the chain is tried before
them, and no other spare is looked at. So verifiers that try siblings in the order of their draws stay exact (`budget.Stop`). Traps, tested as wrong
variants: a spare that is dropped after a look at it, and chains behind spares that are drawn from the row of the first chain at their depth.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core import DraftSampling
from polydraft.core.confidence import acceptance_at
from polydraft.models.growing.draft_vocabulary import hide_other_texts
from polydraft.models.growing.guesses import MOST_GUESSES, guess
from polydraft.models.growing.rows import (
    Fed,
    Rules,
    certainty,
    draft_distribution,
    draft_forward,
    fed_by,
    foretold_row,
    head_of,
    rows_by_depth,
)
from polydraft.models.growing.stops import Stops
from polydraft.models.matrices.kernels import copy_row
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.categorical import choose_row, choose_systematic
from polydraft.sampling.noise import DRAFT, first_arrivals, uniform_at
from polydraft.sampling.truncation import SAMPLING

_f32 = np.float32
DRAW = np.dtype(
    [
        (name, np.int64)
        for name in ("slot", "seed", "sample", "position", "depth", "width", "most_nodes", "num_pending")
    ]
)
"""A request for a tree that is drawn: the slot, the noise's key, spare siblings of a token at most, nodes that chains behind spares fill, 0 for none, and how
many committed tokens the cache lacks."""
SOFTMAX: Any = np.array([(1.0, 0, 1.0, 0.0, 0.0)], SAMPLING)
"""Sampling parameters that change nothing."""
IID, COUPLED, DISTINCT = (
    s.value for s in (DraftSampling.IID, DraftSampling.COUPLED, DraftSampling.WITHOUT_REPLACEMENT)
)
MISSING = -2
"""Token of a node that its row has too few tokens for; of one that is not drawn it is -1."""


class Trees(NamedTuple):
    """Drafts while they are drawn. first: earliest copy of a node.  row: of `probs` behind a first copy.  surest: largest probability of a row.

    reach: chance that a node is accepted.  goes_on: whether children of a node are drawn.  num_rows: [B] of `probs`.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    rows: Int[np.ndarray, "B N"]
    confidence: Float[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B R V"]
    first: Int[np.ndarray, "B N"]
    row: Int[np.ndarray, "B N"]
    surest: Float[np.ndarray, "B R"]
    reach: Float[np.ndarray, "B N"]
    goes_on: Bool[np.ndarray, "B N"]
    num_rows: Int[np.ndarray, " B"]


class Room(NamedTuple):
    """Where rows and draws are made. compact: [D] probabilities of the draft vocabulary.  order: [V].  rest: [V] of a row.  arrivals: tokens of a context."""

    compact: Float[np.ndarray, " D"]
    order: Int[np.ndarray, " V"]
    rest: Float[np.ndarray, " V"]
    arrivals: Int[np.ndarray, " N"]


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


@inner(error_model="numpy")
def _add_row(sync, rules, trees, b, node, logits, slot, room):
    """The draft distribution behind a node, a new row of `probs`; logits are changed."""
    row = trees.num_rows[b]
    ids = rules.outputs.ids
    bias = rules.bias[b]
    sampling = rules.samplings[b]
    hide_other_texts(logits, rules.outputs.in_text, slot, ids.size if ids.size else rules.vocab)
    out = room.compact if ids.size else trees.probs[b, row]
    if sampling.temperature == 0.0:
        trees.surest[b, row] = draft_distribution(sync, logits, bias, SOFTMAX[0], out, room.order)
        bias = bias[:0]  # it is in the logits now
    draft_distribution(sync, logits, bias, sampling, out, room.order)
    for i in range(ids.size):
        if room.compact[i] > 0.0:
            trees.probs[b, row, ids[i]] = room.compact[i]
    trees.row[b, node] = row
    trees.num_rows[b] += 1


@inner
def _in_context(trees, b, above, begin, end, context):
    """How many of the nodes begin .. end-1 have a parent whose earliest copy is `context`."""
    count = 0
    for m in range(begin, end):
        count += trees.first[b, above[m]] == context
    return count


@inner(error_model="numpy")
def _draw_child(trees, b, parent, n, key, rest):
    """A token for node n that is none of the children that its parent has, or -1 where the row has no other."""
    probs = trees.probs[b, trees.row[b, trees.first[b, parent]]]
    has_elder = False
    for m in range(parent + 1, n):
        if trees.parents[b, m] == parent:
            if not has_elder:
                copy_row(probs, rest)
                has_elder = True
            rest[trees.tokens[b, m]] = 0.0
    if has_elder:
        probs = rest
    return choose_row(probs, uniform_at(key.seed, key.sample, key.position, DRAFT, n))


@inner(error_model="numpy")
def _draw(trees, b, above, depth, n, siblings, key, room):
    """The token of node n, a child of a node that goes on; where draws of a context belong together, those of its later nodes, too. above: of each node."""
    if siblings == DISTINCT:
        trees.tokens[b, n] = _draw_child(trees, b, above[n], n, key, room.rest)
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


@inner(error_model="numpy")
def _join(head, rules, trees, b, n, parent, depth, request):
    """Node n, whose token is drawn, becomes a child of `parent`, a node of this depth."""
    row = trees.row[b, trees.first[b, parent]]
    is_greedy = rules.samplings[b].temperature == 0.0
    probability = trees.surest[b, row] if is_greedy else trees.probs[b, row, trees.tokens[b, n]]
    trees.parents[b, n] = parent
    trees.rows[b, n] = row
    trees.confidence[b, n] = probability * certainty(head, request.slot, depth, trees.tokens[b, parent])
    trees.first[b, n] = n


@inner(error_model="numpy")
def _reach(trees, b, n, stops):
    """Chance that a node is accepted, where anything asks for it."""
    if stops.min_reach.shape[1] > 0:
        acceptance = acceptance_at(trees.confidence[b, n], stops.acceptance[b])
        trees.reach[b, n] = trees.reach[b, trees.parents[b, n]] * acceptance


@inner
def _goes_on(trees, b, n, depth, stops):
    """Whether children of a node of this depth are drawn: where its path is likely enough to be accepted."""
    last = stops.min_reach.shape[1]
    return last == 0 or trees.reach[b, n] >= stops.min_reach[b, min(depth, last) - 1]


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
        _join(head, rules, trees, b, n, parent, d, request)
        _reach(trees, b, n, stops)
        trees.goes_on[b, n] = _goes_on(trees, b, n, d + 1, stops)
        trees.first[b, n] = _first_copy(trees, b, above, depth, n)
        if trees.first[b, n] == n and trees.goes_on[b, n]:
            is_guessed &= fed.tokens[b, root + n] == trees.tokens[b, n]
            fed.tokens[b, root + n] = trees.tokens[b, n]
            fed.parents[b, root + n] = root + trees.first[b, parent]
    return is_guessed


@inner(error_model="numpy")
def _add_spares(head, rules, trees, b, length, end, request, stops, rest):
    """Spare siblings beside a drawn chain of `length` nodes, the likeliest to be accepted first, behind its last node and before node `end`; returns how many
    nodes there are then."""
    chances = np.empty(max(length - 1, 0))  # of acceptance, by the parent of the spare
    beside = np.zeros(chances.size, np.int64)
    for parent in range(chances.size):
        elder = acceptance_at(trees.confidence[b, parent + 1], stops.acceptance[b])
        chances[parent] = trees.reach[b, parent] * (1.0 - elder) * stops.spare_acceptance[b]
    size = length
    while chances.size > 0 and size < end and size - 2 < stops.min_spare_chance.shape[1]:
        parent = chances.argmax()
        if chances[parent] < stops.min_spare_chance[b, size - 2]:
            break
        token = _draw_child(trees, b, parent, size, request, rest)
        if token >= 0:
            trees.tokens[b, size] = token
            _join(head, rules, trees, b, size, parent, parent, request)
            trees.reach[b, size] = chances[parent]
            size += 1
        beside[parent] += 1
        is_last = beside[parent] == request.width
        chances[parent] = -1.0 if is_last else chances[parent] * (1.0 - stops.spare_acceptance[b])
    return size


class Behind(NamedTuple):
    """What chains behind spare siblings are drawn with. row_at: of each depth that has one row, else -1."""

    head: Any
    rules: Rules
    trees: Trees
    stops: Stops
    fed: Fed
    room: Room
    row_at: Int[np.ndarray, " D"]


@inner(error_model="numpy")
def _find_row(sync, behind, b, n, depth, request, num_outputs):
    """The row behind a node behind a spare sibling: that of its depth where there is one, else one of its own."""
    trees = behind.trees
    fed = behind.fed
    node = request.num_pending - 1 + n
    fed.tokens[b, node] = trees.tokens[b, n]
    fed.parents[b, node] = request.num_pending - 1 + trees.parents[b, n]
    if behind.row_at[depth] >= 0:
        trees.row[b, n] = behind.row_at[depth]
        return
    logits = np.empty((1, num_outputs), _f32)
    foretold_row(behind.head, fed, b, node, logits)
    _add_row(sync, behind.rules, trees, b, n, logits[0], request.slot, behind.room)
    if rows_by_depth(behind.head):
        behind.row_at[depth] = trees.row[b, n]


@inner(error_model="numpy")
def _chain_behind(sync, behind, b, spare, size, end, request, num_outputs):
    """Draw a chain behind a spare sibling, before node `end`; returns how many nodes there are then."""
    trees = behind.trees
    n = spare
    depth = trees.parents[b, spare] + 1  # its parent is a token of the chain
    while size < end and depth < request.depth and _goes_on(trees, b, n, depth, behind.stops):
        _find_row(sync, behind, b, n, depth, request, num_outputs)
        token = _draw_child(trees, b, n, size, request, behind.room.rest)
        if token < 0:
            break
        trees.tokens[b, size] = token
        _join(behind.head, behind.rules, trees, b, size, n, depth, request)
        _reach(trees, b, size, behind.stops)
        n = size
        size += 1
        depth += 1
    return size


@inner(error_model="numpy")
def _branch(sync, head, rules, trees, b, most_nodes, request, stops, fed, num_outputs, room):
    """Spare siblings beside a chain, and where the tree grows chains behind them: each has an equal share of the nodes that are left."""
    length = _length(trees, b)
    end = request.most_nodes + 1 if request.most_nodes else most_nodes
    size = _add_spares(head, rules, trees, b, length, end, request, stops, room.rest)
    if request.most_nodes == 0 or size == length:
        return
    row_at = np.full(request.depth + 1, -1)
    if rows_by_depth(head):
        for d in range(length):
            row_at[d] = trees.row[b, d]
    behind = Behind(head, rules, trees, stops, fed, room, row_at)
    share = (request.most_nodes + 1 - size) // (size - length)
    for spare in range(length, size):
        size = _chain_behind(sync, behind, b, spare, size, size + share, request, num_outputs)


@inner
def _length(trees, b):
    """Nodes of a drawn chain, the root among them."""
    length = 1
    while length < trees.parents.shape[1] and trees.parents[b, length] >= 0:
        length += 1
    return length


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
            _add_row(sync, rules, trees, b, node, logits[r], slot, room)
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
        _branch(sync, head, rules, trees, b, N + num_spares, requests[b], stops, fed, num_outputs, room)
    last = _last_node(trees, raw)
    return trees.tokens, trees.parents, trees.rows, trees.confidence, trees.probs, last, passes
