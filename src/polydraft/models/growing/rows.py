"""Rows of probabilities behind the nodes of trees: from forward passes of a draft model, or from what a head foretold of all depths.

A kind of arrays that foretells is in `FORETELLING`, and all others are run through `draft_forward`, which each kind of model overloads.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numba.extending import overload

from polydraft.models.growing.draft_vocabulary import OutputTokens, hide_other_texts
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.truncation import scale_row, soften

_f32 = np.float32


class Rules(NamedTuple):
    """How logits become the distributions that tokens are drawn from. vocab: all tokens.  outputs: tokens of the logits.

    samplings, bias: of `draft_vocabulary.draft_samplings`, a row each.
    """

    vocab: int
    outputs: OutputTokens
    samplings: Int[np.ndarray, " B"]
    bias: Float[np.ndarray, "B D"]


class Fed(NamedTuple):
    """The trees that a model sees: pending committed tokens of each slot, the root last among them, then nodes.

    first_nodes, node_ends: of each, what the next forward pass reads.  first_logits: behind which of it logits are wanted.
    """

    slots: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B P+N"]
    parents: Int[np.ndarray, "B P+N"]
    first_nodes: Int[np.ndarray, " B"]
    node_ends: Int[np.ndarray, " B"]
    first_logits: Int[np.ndarray, " B"]


@inner
def fed_by(requests, pending, num_nodes):
    """Roots alone, with room for so many nodes. requests: records with `slot` and `num_pending`.  pending: [B, P]."""
    B, P = pending.shape
    fed = Fed(
        np.empty(B, np.int64),
        np.zeros((B, P + num_nodes), np.int64),
        np.full((B, P + num_nodes), -1, np.int64),
        np.empty(B, np.int64),  # rows of one array would compile the forward pass twice
        np.empty(B, np.int64),
        np.empty(B, np.int64),
    )
    for b in range(B):
        fed.slots[b] = requests[b].slot
        for i in range(requests[b].num_pending):
            fed.tokens[b, i] = pending[b, i]
            fed.parents[b, i] = i - 1
    return fed


@njit(cache=True, error_model="numpy")
def draft_distribution(sync, logits, bias, sampling, out, order):
    """out = the distribution that a draft token is drawn from; logits are changed. Returns the largest probability. See `truncation.soften`."""
    for i in range(bias.size):
        logits[i] += bias[i]
    share = 1.0 / soften(sync, logits[: out.size], sampling, out, order)
    scale_row(out, share)
    return share


class Foretelling(NamedTuple):
    """Compiled functions of a kind of arrays that foretells: what the functions below do for it. row: of (head, slot, tokens, parents, node, logits)."""

    rows_by_depth: Any
    row: Any
    certainty: Any
    likely_room: Any
    likely_children: Any


FORETELLING: dict[type, Foretelling] = {}
"""By the type of its arrays."""


def _code(head: Any) -> Foretelling | None:
    """Of the type that `head_of` gives."""
    return FORETELLING.get(getattr(head, "instance_class", type(None)))


def draft_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits) -> None:
    """A draft step's forward pass, of whatever kind of model: `forward.compiled_forward` without hidden states and auxiliary rows."""


def head_of(model) -> Any:
    """The arrays of a head that foretells, of another model none: what the functions below take, as a model's hundred arrays cost time at each call."""
    raise NotImplementedError


@overload(head_of)
def _(model):
    return (lambda model: model) if _code(model) else (lambda model: False)


def rows_by_depth(head) -> bool:
    """Whether nodes of a depth have one row, whatever is drafted before them."""
    raise NotImplementedError


@overload(rows_by_depth)
def _(head):
    if code := _code(head):
        by_depth = code.rows_by_depth
        return lambda head: by_depth(head)
    return lambda head: False


def certainty(head, slot, depth, token) -> float:
    """What a head's confidence part says of the place behind a token of this depth, by which the token's probability is multiplied; else 1."""
    raise NotImplementedError


@overload(certainty)
def _(head, slot, depth, token):
    if code := _code(head):
        of_head = code.certainty
        return lambda head, slot, depth, token: of_head(head, slot, depth, token)
    return lambda head, slot, depth, token: 1.0


def foretold_row(head, fed, b, node, logits) -> None:
    """The logits behind a node of what a model sees, [1, outputs], where they need no forward pass: behind spare siblings nothing is drawn otherwise."""
    raise NotImplementedError


@overload(foretold_row)
def _(head, fed, b, node, logits):
    if code := _code(head):
        row = code.row
        return lambda head, fed, b, node, logits: row(
            head, fed.slots[b], fed.tokens[b], fed.parents[b], node, logits
        )
    return lambda head, fed, b, node, logits: None


class LikelyRoom(NamedTuple):
    """Where distributions are made. probs: of the logits' tokens.  order: as many places."""

    probs: Float[np.ndarray, " D"]
    order: Int[np.ndarray, " D"]


def likely_room(head, num_outputs, num_tokens, most) -> Any:
    """Room for `likely_children`: logits of so many outputs, for so many tokens, of which a head looks at `most` or more."""
    raise NotImplementedError


@overload(likely_room)
def _(head, num_outputs, num_tokens, most):
    if code := _code(head):
        of_head = code.likely_room
        return lambda head, num_outputs, num_tokens, most: of_head(head, num_outputs, num_tokens, most)
    return lambda head, num_outputs, num_tokens, most: LikelyRoom(
        np.empty(num_tokens, _f32), np.empty(num_tokens, np.int32)
    )


def frontier_forward(model, fed, logits) -> None:
    """The forward pass behind the nodes of a frontier, where their rows need one."""
    raise NotImplementedError


@overload(frontier_forward)
def _(model, fed, logits):
    if _code(model):
        return lambda model, fed, logits: None
    return lambda model, fed, logits: draft_forward(
        model, fed.slots, fed.tokens, fed.parents, fed.first_nodes, fed.node_ends, fed.first_logits, logits
    )


def likely_children(sync, head, rules, b, fed, node, depth, is_first, is_calibrated, logits, room) -> Any:
    """Tokens that may follow a node of a frontier, of all tokens where there are none, and how likely each is.

    node: in what the model sees, of this depth below the root.  is_first: of its frontier.  is_calibrated: whether a confidence part counts.
    logits: behind it, which are changed.
    """
    raise NotImplementedError


@overload(likely_children)
def _(sync, head, rules, b, fed, node, depth, is_first, is_calibrated, logits, room):
    if code := _code(head):
        of_head = code.likely_children
        return lambda sync, head, rules, b, fed, node, depth, is_first, is_calibrated, logits, room: of_head(
            sync, head, rules, b, fed, node, depth, is_first, is_calibrated, room
        )

    def run(sync, head, rules, b, fed, node, depth, is_first, is_calibrated, logits, room):
        hide_other_texts(logits, rules.outputs.in_text, fed.slots[b], room.probs.size)
        draft_distribution(sync, logits, rules.bias[b], rules.samplings[b], room.probs, room.order)
        return rules.outputs.ids, room.probs

    return run
