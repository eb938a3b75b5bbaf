"""The most probable tree of a compiled draft model in one call: forward passes, distributions and choices, depth by depth for the whole batch.

`join` collects the best nodes of all depths and `advance` chooses which of them are expanded; see `drafters/model/best_first.py`, which grows the same
trees through any model's `score`.
"""

import numpy as np

from polydraft.core.confidence import ranked_acceptance_at
from polydraft.models.compiled.draft_vocabulary import hide_other_texts
from polydraft.models.compiled.forward import draft_forward
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.truncation import scale_row, soften

NODE = np.dtype(
    [(name, np.int64) for name in ("token", "parent", "row")]
    + [(name, np.float64) for name in ("value", "confidence")]
)
"""A chosen node: the scored row of its parent, and its own, -1 while there is none; the probability of its path, of the tokens' probabilities or of their
calibrated ones, and that of its token."""
_f32 = np.float32


@njit(cache=True, error_model="numpy")
def draft_distribution(sync, logits, bias, sampling, out, ids):
    """out = the distribution that a draft token is drawn from; logits are changed. Returns the largest probability. See `truncation.soften`."""
    for i in range(bias.size):
        logits[i] += bias[i]
    share = 1.0 / soften(sync, logits[: out.size], sampling, out, ids)
    scale_row(out, share)
    return share


@njit(cache=True, error_model="numpy")
def join(distribution, ids, weight, row, min_path_prob, acceptance, nodes, size):
    """Children of a scored row join the chosen nodes, which stay in the order of falling value, the earlier first among equals; returns how many there are.

    distribution: behind the row, whose path has probability `weight`, of all tokens or of `ids`.  min_path_prob: see `budget.Budget`.  acceptance: what calibrates it, if not empty.
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


@njit(cache=True, error_model="numpy")
def grow(sync, model, outputs, vocab, requests, pending, samplings, bias, min_reach, acceptance):
    """requests: [B] of `proposals.GROW`.  pending: [B, P] tokens, the root last.

    samplings: [B] of `truncation.SAMPLING`.  outputs: `OutputTokens`.  min_reach, acceptance: as of proposals.  Lengths of caches are the caller's, as there.
    Returns tokens, parents and confidences of the drafts, tokens and parents of what was scored, the root first, and numbers of rows and forward passes.
    """
    ids = outputs.ids
    B, P = pending.shape
    M = 0
    R = 1
    deepest = 0
    slots = np.empty(B, np.int64)
    first_nodes = np.empty(B, np.int64)  # rows of one array would compile the forward pass twice
    node_ends = np.empty(B, np.int64)
    first_logits = np.empty(B, np.int64)
    for b in range(B):
        g = requests[b]
        slots[b], deepest = g.slot, max(deepest, g.depth)
        M = max(M, g.max_nodes)
        R = max(R, 1 + min(g.width, g.max_nodes) * g.depth)
    tokens = np.zeros((B, 1 + M), np.int64)
    parents = np.full((B, 1 + M), -1, np.int64)
    confidence = np.ones((B, 1 + M))
    fed = np.zeros((B, P + R), np.int64)
    above = np.full((B, P + R), -1, np.int64)
    nodes = np.empty((B, M), NODE)
    size = np.zeros(B, np.int64)
    passes = 0
    calibrated = np.empty((B, 0)) if min_reach.shape[1] == 0 else acceptance
    weights = np.ones((B, max(M, 1)))
    chosen = np.empty(max(M, 1), np.int64)
    count = np.ones(B, np.int64)
    rows = np.zeros(B, np.int64)
    probs = np.empty(ids.size if ids.size else vocab, np.float32)
    room = np.empty(probs.size, np.int32)
    for b in range(B):
        tokens[b, 0] = pending[b, requests[b].num_pending - 1]
        for i in range(requests[b].num_pending):
            fed[b, i] = pending[b, i]
            above[b, i] = i - 1
    for d in range(deepest):
        total = 0
        for b in range(B):
            if d >= requests[b].depth:
                count[b] = 0
            first_logits[b] = requests[b].num_pending - 1 + rows[b]
            first_nodes[b] = 0 if d == 0 and count[b] > 0 else first_logits[b]
            node_ends[b] = first_logits[b] + count[b]
            total += count[b]
        if total == 0:
            break
        logits = np.empty((total, model.sizes.outputs), np.float32)
        draft_forward(model, slots, fed, above, first_nodes, node_ends, first_logits, logits)
        r = 0
        passes = passes + 1
        for b in range(B):
            if count[b] == 0:
                continue
            sampling = samplings[b]
            root = requests[b].num_pending - 1
            most = requests[b].max_nodes
            for f in range(count[b]):
                hide_other_texts(logits[r], outputs.in_text, slots[b], ids.size if ids.size else vocab)
                draft_distribution(sync, logits[r], bias[b], sampling, probs, room)
                row = rows[b] + f
                size[b] = join(
                    probs,
                    ids,
                    weights[b, f],
                    row,
                    sampling.min_path_prob,
                    calibrated[b],
                    nodes[b, :most],
                    size[b],
                )
                r += 1
            begin = rows[b]
            rows[b] += count[b]
            count[b] = advance(nodes[b], size[b], begin, rows[b], requests[b].width, chosen)
            reach = 0.0
            for f in range(count[b]):
                reach += nodes[b, chosen[f]].value
            if min_reach.shape[1] > 0 and reach < min_reach[b, min(d, min_reach.shape[1] - 1)]:
                count[b] = retreat(nodes[b], size[b], rows[b])
            for f in range(count[b]):
                node = nodes[b, chosen[f]]
                n = root + rows[b] + f
                weights[b, f] = node.value
                fed[b, n] = node.token
                above[b, n] = root + node.parent
    scored = np.zeros((B, R), np.int64)
    below = np.full((B, R), -1, np.int64)
    for b in range(B):
        root = requests[b].num_pending - 1
        if rows[b] > 0:
            draft_of(nodes[b], size[b], R, tokens[b], parents[b], confidence[b])
        for i in range(rows[b]):
            scored[b, i] = fed[b, root + i]
            below[b, i] = above[b, root + i] - root if i > 0 else -1
    N = 1 + size.max()
    return tokens[:, :N].copy(), parents[:, :N].copy(), confidence[:, :N].copy(), scored, below, rows, passes
