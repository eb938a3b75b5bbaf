"""Spare siblings beside a drawn chain, the likeliest to be accepted first, and chains behind them.

What is drawn beside or behind a spare sibling is decided by the chain, and by the spare's own path: the chain is tried before them, and no other
spare is looked at. So verifiers that try siblings in the order of their draws stay exact (`budget.Stop`). Traps, tested as wrong variants: a spare
that is dropped after a look at it, and chains behind spares that are drawn from the row of the first chain at their depth.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from polydraft.core.confidence import acceptance_at
from polydraft.models.growing.rows import Fed, Rules, foretold_row, rows_by_depth
from polydraft.models.growing.stops import Stops
from polydraft.models.growing.tree_nodes import Room, Trees, add_row, draw_child, goes_on, join, set_reach
from polydraft.numerics.compile_time import inner

_f32 = np.float32


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
        token = draw_child(trees, b, parent, size, request, rest)
        if token >= 0:
            trees.tokens[b, size] = token
            join(head, rules, trees, b, size, parent, parent, request)
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
    add_row(sync, behind.rules, trees, b, n, logits[0], request.slot, behind.room)
    if rows_by_depth(behind.head):
        behind.row_at[depth] = trees.row[b, n]


@inner(error_model="numpy")
def _chain_behind(sync, behind, b, spare, size, end, request, num_outputs):
    """Draw a chain behind a spare sibling, before node `end`; returns how many nodes there are then."""
    trees = behind.trees
    n = spare
    depth = trees.parents[b, spare] + 1  # its parent is a token of the chain
    while size < end and depth < request.depth and goes_on(trees, b, n, depth, behind.stops):
        _find_row(sync, behind, b, n, depth, request, num_outputs)
        token = draw_child(trees, b, n, size, request, behind.room.rest)
        if token < 0:
            break
        trees.tokens[b, size] = token
        join(behind.head, behind.rules, trees, b, size, n, depth, request)
        set_reach(trees, b, size, behind.stops)
        n = size
        size += 1
        depth += 1
    return size


@inner(error_model="numpy")
def branch(sync, head, rules, trees, b, most_nodes, request, stops, fed, num_outputs, room):
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
