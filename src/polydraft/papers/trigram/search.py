"""The search of ADED: the triples behind a pair as a game tree, compiled; see `papers.trigram.drafter` for paper and symbols.

A forward pass of the target has driven the rows from the processor's caches, so most of the time goes into waiting for them: a node's row
is looked up once, and that of a node at the last level only if it is drafted.
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.drafters.grown_tree import add_node, is_full, plant
from polydraft.numerics.compiled_code import njit
from polydraft.papers.entry_table import TableArrays, find
from polydraft.papers.trigram.store import bump_all
from polydraft.papers.trigram.table import find_row
from polydraft.sampling.noise import uniform_at

FEWEST = 64
PER_NODE = 4
"""Iterations that every budget is worth, and each node: more change tokens per step by 1.2% at most."""

NODE = np.dtype(
    [("begin", np.int64)]
    + [(name, np.float64) for name in ("reward", "total", "prior", "mean", "urge")]
    + [(name, np.int32) for name in ("token", "before", "parent", "child", "last", "after")]
    + [(name, np.int32) for name in ("learnt", "count", "tried", "met", "age", "visits")]
)
"""Of a search, node 0 the root. before: the token above, the other half of the state.  child, last, after: tried children as a list.
begin, learnt, count: of the row of successors; the count is -1 where it was not looked up.  met: nodes met before this one was expanded, -1 if it
is not.  age: the order in which expansions meet the nodes.  total: weights from the root.  mean: W/n.  urge: M/(1 + n)."""


class Learnt(NamedTuple):
    """A store as the search reads it. words, weights: its entries flat, as integers and as numbers."""

    table: TableArrays
    words: np.ndarray
    weights: np.ndarray


class Search(NamedTuple):
    """How to search. factors: see `explore`.  num_paths: most visited nodes that are drafted."""

    levels: int
    iterations: int
    num_paths: int
    factors: np.ndarray


@njit(cache=True)
def with_flat_rows(store):
    """A store as the search reads it."""
    words = store.entries.reshape(-1)
    return Learnt(store, words, words.view(np.float32))


@njit(cache=True)
def _row(table, store, a, b):
    """(learnt, begin, count) of what follows a pair: words of the store, or else of the table."""
    at = find(store.table, (a << 32) | b)
    if at >= 0:
        _, width, num_words = store.table.entries.shape
        return True, at * width * num_words, np.int64(store.table.links[at].num_entries)
    begin, count = find_row(table, a, b)
    return False, 2 * begin, count


@njit(cache=True)
def _entry(table, store, learnt, begin, j):
    """(token, weight) of the j-th successor of a row."""
    at = begin + 2 * j
    if learnt:
        return np.int64(store.words[at]), np.float64(store.weights[at + 1])
    return np.int64(table.tokens[at]), np.float64(table.weights[at + 1])


@njit(cache=True)
def explore(iterations, c1, c2):
    """The exploration factor at a node, by its visits."""
    factor = np.empty(iterations + 1)
    for n in range(iterations + 1):
        factor[n] = (c1 + np.log((n + c2 + 1) / c2)) * np.sqrt(n)
    return factor


@njit(cache=True)
def _plant(root, table, store, a, b):
    """The root, behind the pair of tokens a, b."""
    root.token = b
    root.before = a
    root.parent = -1
    root.child = -1
    root.last = -1
    root.after = -1
    root.learnt, root.begin, root.count = _row(table, store, a, b)
    root.tried = 0
    root.met = -1
    root.age = 0
    root.visits = 0
    root.reward = 0.0
    root.total = 0.0
    root.prior = 0.0


@njit(cache=True)
def _make(nodes, m, n, table, store, is_inner):
    """Node m, the next successor of node n. is_inner: whether it may have successors."""
    up = nodes[n]
    token, weight = _entry(table, store, up.learnt, up.begin, up.tried)
    node = nodes[m]
    node.token = token
    node.before = up.token
    node.parent = n
    node.age = up.met + up.tried
    node.child = -1
    node.last = -1
    node.after = -1
    node.count = -1
    node.tried = 0
    node.met = -1
    node.visits = 0
    node.reward = 0.0
    node.total = up.total + weight
    node.prior = weight
    if is_inner:
        node.learnt, node.begin, node.count = _row(table, store, np.int64(up.token), token)
    if up.last < 0:
        up.child = m
    else:
        elder = nodes[up.last]
        elder.after = m
    up.last = m
    up.tried += 1


@njit(cache=True)
def _best_child(nodes, n, factor):
    """Of a node whose successors were all tried: the one of the highest upper bound."""
    best = n
    best_score = -np.inf
    m = np.int64(nodes[n].child)
    while m >= 0:
        child = nodes[m]
        score = child.mean + factor * child.urge
        if score > best_score:
            best = m
            best_score = score
        m = np.int64(child.after)
    return best


@njit(cache=True)
def _drawn(table, store, learnt, begin, count, remaining):
    """(token, weight) of the successor in whose part of a row's mass `remaining` lies."""
    j = 0
    token, weight = _entry(table, store, learnt, begin, 0)
    while j < count - 1 and remaining >= weight:
        remaining -= weight
        j += 1
        token, weight = _entry(table, store, learnt, begin, j)
    return token, weight


@njit(cache=True)
def _play_on(node, level, levels, table, store, key, draws):
    """(weights, draws): those of a path drawn from a node on, the node's own included, and how many draws there are now."""
    seed, sample, position = key
    x = np.int64(node.before)
    y = np.int64(node.token)
    gained = node.total
    learnt = node.learnt != 0
    begin = node.begin
    count = np.int64(node.count)
    while level < levels:
        mass = 0.0
        for j in range(count):
            mass += _entry(table, store, learnt, begin, j)[1]
        if mass <= 0:
            break
        remaining = uniform_at(seed, sample, position, 0, draws) * mass
        draws += 1
        token, weight = _drawn(table, store, learnt, begin, count, remaining)
        x = y
        y = token
        gained = gained + weight
        level = level + 1
        if level < levels:
            learnt, begin, count = _row(table, store, x, y)
    return gained, draws


@njit(cache=True, error_model="numpy")
def _reward(nodes, n, gained):
    """A node and those above it were visited once more."""
    while n >= 0:
        node = nodes[n]
        node.visits += 1
        node.reward += 1 + gained
        node.mean = node.reward / node.visits
        node.urge = node.prior / (1 + node.visits)
        n = np.int64(node.parent)


@njit(cache=True)
def search(table, store, a, b, levels, iterations, factors, seed, sample, position):
    """(nodes, size): what was visited, see `NODE`.

    A node is made when it is first visited; successors are tried in their order, so those that have been are the first ones.
    """
    nodes: Any = np.empty(2 * iterations + 1, NODE)
    _plant(nodes[0], table, store, a, b)
    key = (seed, sample, position)
    size = 1
    all_met = 1
    draws = 0
    for _ in range(iterations):
        n = 0
        level = 0
        while level < levels and nodes[n].count > 0:
            up = nodes[n]
            expanded = up.met < 0
            if expanded:
                up.met = all_met
                all_met += up.count
            if up.tried < up.count:
                _make(nodes, size, n, table, store, level + 1 < levels)
                n = size
                size += 1
            else:
                n = _best_child(nodes, n, factors[up.visits])
            level += 1
            if expanded:
                break
        gained, draws = _play_on(nodes[n], level, levels, table, store, key, draws)
        _reward(nodes, n, gained)
    return nodes, size


@njit(cache=True)
def _hang(tree, table, store, nodes, size, num_paths):
    """Hang the most visited nodes, those met first among equals, then the heaviest successor of each.

    A node is no more visited than its parent, which was met earlier. Scores: the share of the parent's visits, or one half.
    """
    place = np.full(size, -1)
    place[0], num_chosen = 0, min(num_paths, size - 1)
    order = np.arange(1, size)
    for i in range(num_chosen):
        if is_full(tree):
            return
        best = i
        for j in range(i + 1, size - 1):
            node = nodes[order[j]]
            first = nodes[order[best]]
            if node.visits > first.visits or (node.visits == first.visits and node.age < first.age):
                best = j
        order[i], order[best] = order[best], order[i]
        node = nodes[order[i]]
        if place[node.parent] >= 0:
            place[order[i]] = add_node(
                tree, place[node.parent], np.int64(node.token), node.visits / nodes[node.parent].visits
            )
    for i in range(num_chosen):
        node = nodes[order[i]]
        if is_full(tree):
            break
        if place[order[i]] < 0:
            continue
        learnt = node.learnt != 0
        at = node.begin
        count = np.int64(node.count)
        if count < 0:
            learnt, at, count = _row(table, store, np.int64(node.before), np.int64(node.token))
        if count:
            add_node(tree, place[order[i]], _entry(table, store, learnt, at, 0)[0], 0.5)


@njit(cache=True)
def grow(tree, table, store, update, last_pair, how, key, limits):
    """Bump what is unread, then plant and grow a tree of what the search visits most.

    update: (unread, bump, cap).  last_pair: the last two tokens, -1 for one that is not there.  how: a `Search`.
    """
    unread, bump, cap = update
    bump_all(table, store, unread, bump, cap)
    a, b = last_pair
    learnt = with_flat_rows(store)
    plant(tree, b, limits)
    if is_full(tree) or a < 0:
        return
    levels = min(how.levels, limits.max_depth)
    iterations = min(how.iterations, max(FEWEST, PER_NODE * limits.max_nodes))
    nodes, size = search(table, learnt, a, b, levels, iterations, how.factors, *key)
    _hang(tree, table, learnt, nodes, size, how.num_paths)
