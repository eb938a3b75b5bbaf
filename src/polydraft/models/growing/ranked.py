"""The most probable trees of a batch in one call: rows, distributions and choices, depth by depth.

    frontier  the `width` best nodes chosen of the depth above: the distributions behind them are looked at
    chosen    the `max_nodes` best candidates of all depths, in the order of falling value; no node is better than its parent
    value     of a path: the product of its tokens' probabilities, or of their calibrated acceptances
    ends      at the budget's depth, where the frontier's values sum up to less than a depth is worth, and before the first node that is not
              worth its row: prices do not fall and values do, so that what is behind it never joins later

`drafters.model.best_first` has the sources, and grows the same trees through any model's `score`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.core.confidence import ranked_acceptance_at
from polydraft.models.growing.rows import fed_by, frontier_forward, head_of, likely_children, likely_room
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit

NODE = np.dtype(
    [(name, np.int64) for name in ("token", "parent", "row")]
    + [(name, np.float64) for name in ("value", "confidence")]
)
"""A chosen node: the scored row of its parent, and its own, -1 while there is none; the value of its path, and the probability of its token."""
RANK = np.dtype([(name, np.int64) for name in ("slot", "depth", "width", "max_nodes", "num_pending")])
"""A request for the most probable tree, within these bounds."""


@njit(cache=True, error_model="numpy")
def join(distribution, ids, weight, row, min_path_prob, acceptance, nodes, size):
    """Children of a scored row join the chosen nodes, which stay in the order of falling value, the earlier first among equals; returns how many there are.

    distribution: behind the row, whose path has the value `weight`, of all tokens or of `ids`.  min_path_prob: see `budget.Budget`.  acceptance: what calibrates it, if not empty.
    nodes: [max_nodes] of NODE.
    """
    for t in range(distribution.size):
        chance = distribution[t]
        if acceptance.size > 0:
            # a token of less confidence is not looked at
            chance = ranked_acceptance_at(chance, acceptance) if chance > 1e-3 else 0.0
        value = weight * chance
        if value <= 0.0 or value < min_path_prob or (size == nodes.size and value <= nodes[size - 1].value):
            continue
        size = min(size + 1, nodes.size)
        at = size - 1
        while at > 0 and nodes[at - 1].value < value:
            nodes[at] = nodes[at - 1]
            at -= 1
        node = nodes[at]
        node.token = ids[t] if ids.size else t
        node.parent = row
        node.row = -1
        node.value = value
        node.confidence = distribution[t]
    return size


@njit(cache=True)
def worth_their_rows(nodes, size, min_chances):
    """How many of the chosen nodes come before the first that is not worth its row. min_chances: of every node but the first, see `budget.Stop`."""
    if min_chances.size == 0 or min_chances[0] == np.inf:  # no prices
        return size
    for n in range(1, size):
        if n > min_chances.size or nodes[n].value < min_chances[n - 1]:
            return n
    return size


@njit(cache=True)
def advance(nodes, size, begin, row, width, chosen):
    """Give the best `width` chosen children of the rows from `begin` on the scored rows from `row` on; returns how many, their places in `chosen`."""
    count = 0
    for i in range(size):
        if nodes[i].parent >= begin and count < width:
            nodes[i].row = row + count
            chosen[count] = i
            count += 1
    return count


@njit(cache=True)
def retreat(nodes, size, row):
    """Take back the scored rows from `row` on; returns how many are left of them, none."""
    for i in range(size):
        if nodes[i].row >= row:
            nodes[i].row = -1
    return 0


@njit(cache=True)
def draft_of(nodes, size, rows, tokens, parents, confidence):
    """Fill the places behind the root of a draft with the chosen nodes in order. rows: as many as were given, or more."""
    places = np.zeros(rows + 1, np.int64)
    for i in range(size):
        node = nodes[i]
        if node.row >= 0:
            places[node.row] = i + 1
        parents[i + 1] = places[node.parent]
        tokens[i + 1] = node.token
        confidence[i + 1] = node.confidence


class Growing(NamedTuple):
    """Most probable trees while they grow. nodes: of each, best first, and `size` of them.  num_rows: rows whose children have joined.

    frontier: how many nodes are looked at next.  weights: their values.
    """

    nodes: Int[np.ndarray, "B M"]
    size: Int[np.ndarray, " B"]
    num_rows: Int[np.ndarray, " B"]
    frontier: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B M"]


@inner
def _begin(requests):
    """Trees of which nothing is chosen, whose frontiers are the roots."""
    B = len(requests)
    most = 1
    for b in range(B):
        most = max(most, requests[b].max_nodes)
    return Growing(
        np.empty((B, most), NODE),
        np.zeros(B, np.int64),
        np.zeros(B, np.int64),
        np.ones(B, np.int64),
        np.ones((B, most)),
    )


@inner
def _begin_depth(requests, trees, depth, fed):
    """What the model reads to look behind the frontiers of a depth; returns behind how many nodes."""
    total = 0
    for b in range(len(requests)):
        if depth >= requests[b].depth:
            trees.frontier[b] = 0
        count = trees.frontier[b]
        fed.first_logits[b] = requests[b].num_pending - 1 + trees.num_rows[b]
        fed.first_nodes[b] = 0 if depth == 0 and count > 0 else fed.first_logits[b]
        fed.node_ends[b] = fed.first_logits[b] + count
        total += count
    return total


@inner(error_model="numpy")
def _expand(sync, head, rules, trees, b, depth, request, stops, fed, logits, room):
    """The children behind a frontier join the tree. logits: of the frontier."""
    is_calibrated = stops.min_reach.shape[1] > 0
    acceptance = stops.acceptance[b] if is_calibrated else stops.acceptance[b, :0]
    nodes = trees.nodes[b, : request.max_nodes]
    size = trees.size[b]
    for f in range(trees.frontier[b]):
        node = fed.first_logits[b] + f
        ids, probs = likely_children(
            sync, head, rules, b, fed, node, depth, f == 0, is_calibrated, logits[f], room
        )
        row = trees.num_rows[b] + f
        min_path_prob = rules.samplings[b].min_path_prob
        size = join(probs, ids, trees.weights[b, f], row, min_path_prob, acceptance, nodes, size)
    trees.size[b] = worth_their_rows(nodes, size, stops.min_spare_chance[b])


@inner
def _next_frontier(trees, b, depth, request, stops, fed, chosen):
    """Behind the frontier the next one: the best of its children; none where they are not worth the forward pass of a depth."""
    nodes = trees.nodes[b]
    begin = trees.num_rows[b]
    row = begin + trees.frontier[b]
    count = advance(nodes, trees.size[b], begin, row, request.width, chosen)
    reach = 0.0
    for f in range(count):
        reach += nodes[chosen[f]].value
    min_reach = stops.min_reach[b]
    if min_reach.size > 0 and reach < min_reach[min(depth, min_reach.size - 1)]:
        count = retreat(nodes, trees.size[b], row)
    for f in range(count):
        child = nodes[chosen[f]]
        n = fed.node_ends[b] + f
        trees.weights[b, f] = child.value
        fed.tokens[b, n] = child.token
        fed.parents[b, n] = request.num_pending - 1 + child.parent
    trees.num_rows[b] = row
    trees.frontier[b] = count


@inner
def _drafts(requests, trees, fed, most_rows):
    """Tokens, parents and confidences of the drafts, the roots first; tokens and parents of what was scored."""
    B = len(requests)
    tokens = np.zeros((B, 1 + trees.size.max()), np.int64)
    parents = np.full(tokens.shape, -1, np.int64)
    confidence = np.ones(tokens.shape)
    scored = np.zeros((B, most_rows), np.int64)
    below = np.full((B, most_rows), -1, np.int64)
    for b in range(B):
        root = requests[b].num_pending - 1
        tokens[b, 0] = fed.tokens[b, root]
        draft_of(trees.nodes[b], trees.size[b], most_rows, tokens[b], parents[b], confidence[b])
        for i in range(trees.num_rows[b]):
            scored[b, i] = fed.tokens[b, root + i]
            below[b, i] = fed.parents[b, root + i] - root if i > 0 else -1
    return tokens, parents, confidence, scored, below


@njit(cache=True, error_model="numpy")
def rank(sync, model, rules, requests, pending, stops):
    """The most probable trees. requests: [B] of `RANK`.  pending: [B, P] tokens, the root last: less the root they lie in the caches then, and the
    tree behind them; lengths are the caller's.  rules: `rows.Rules`.  stops: `stops.Stops`.

    Returns tokens, parents and confidences of the drafts, tokens and parents of what was scored, the root first, and numbers of rows and forward passes.
    """
    most_rows = 1
    deepest = 0
    for b in range(len(requests)):
        g = requests[b]
        deepest = max(deepest, g.depth)
        most_rows = max(most_rows, 1 + min(g.width, g.max_nodes) * g.depth)
    head = head_of(model)
    num_outputs = model.sizes.outputs
    num_tokens = rules.outputs.ids.size if rules.outputs.ids.size else rules.vocab
    fed = fed_by(requests, pending, most_rows)
    trees = _begin(requests)
    most = trees.nodes.shape[1]
    room = likely_room(head, num_outputs, num_tokens, most)
    chosen = np.empty(most, np.int64)
    passes = 0
    for d in range(deepest):
        total = _begin_depth(requests, trees, d, fed)
        if total == 0:
            break
        logits = np.empty((total, num_outputs), np.float32)
        frontier_forward(model, fed, logits)
        passes += 1
        r = 0
        for b in range(len(requests)):
            count = trees.frontier[b]
            if count > 0:
                _expand(sync, head, rules, trees, b, d, requests[b], stops, fed, logits[r : r + count], room)
                _next_frontier(trees, b, d, requests[b], stops, fed, chosen)
                r += count
    tokens, parents, confidence, scored, below = _drafts(requests, trees, fed, most_rows)
    return tokens, parents, confidence, scored, below, trees.num_rows, passes
