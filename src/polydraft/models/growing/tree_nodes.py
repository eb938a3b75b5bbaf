"""Nodes of drawn trees: what is known of each, its row of `probs`, the draw of its token, and how likely it is accepted."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core.confidence import acceptance_at
from polydraft.models.growing.draft_vocabulary import hide_other_texts
from polydraft.models.growing.rows import certainty, draft_distribution
from polydraft.models.matrices.kernels import copy_row
from polydraft.numerics.compile_time import inner
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import DRAFT, uniform_at
from polydraft.sampling.truncation import SAMPLING

SOFTMAX: Any = np.array([(1.0, 0, 1.0, 0.0, 0.0)], SAMPLING)
"""Sampling parameters that change nothing."""


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


@inner(error_model="numpy")
def add_row(sync, rules, trees, b, node, logits, slot, room):
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


@inner(error_model="numpy")
def draw_child(trees, b, parent, n, key, rest):
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
def join(head, rules, trees, b, n, parent, depth, request):
    """Node n, whose token is drawn, becomes a child of `parent`, a node of this depth."""
    row = trees.row[b, trees.first[b, parent]]
    is_greedy = rules.samplings[b].temperature == 0.0
    probability = trees.surest[b, row] if is_greedy else trees.probs[b, row, trees.tokens[b, n]]
    trees.parents[b, n] = parent
    trees.rows[b, n] = row
    trees.confidence[b, n] = probability * certainty(head, request.slot, depth, trees.tokens[b, parent])
    trees.first[b, n] = n


@inner(error_model="numpy")
def set_reach(trees, b, n, stops):
    """Chance that a node is accepted, where anything asks for it."""
    if stops.min_reach.shape[1] > 0:
        acceptance = acceptance_at(trees.confidence[b, n], stops.acceptance[b])
        trees.reach[b, n] = trees.reach[b, trees.parents[b, n]] * acceptance


@inner
def goes_on(trees, b, n, depth, stops):
    """Whether children of a node of this depth are drawn: where its path is likely enough to be accepted."""
    last = stops.min_reach.shape[1]
    return last == 0 or trees.reach[b, n] >= stops.min_reach[b, min(depth, last) - 1]
