"""The search of ADED: the triples behind a pair as a game tree, compiled; see `drafters.text.trigram` for paper and symbols.

A pass of the target has driven the rows from the processor's caches, so most of the time goes into waiting for them: a node's row
is looked up once, and that of a node at the last level only if it is drafted.
"""

from typing import NamedTuple

import numpy as np

from polydraft.drafters.grown_tree import add_node, is_full, plant
from polydraft.drafters.text.table import ROWS, find
from polydraft.drafters.text.trigram_store import bump_all
from polydraft.drafters.text.trigram_table import find_row
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.noise import uniform_at

FEWEST, PER_NODE = 64, 4
"""Iterations that every budget is worth, and each node: more change tokens per step by 1.2% at most."""

WORDS, WEIGHTS = ROWS + 1, ROWS + 2
"""Of a store as the search reads it: its rows flat, as integers and as numbers."""
TOKEN, BEFORE, PARENT, CHILD, LAST, AFTER, LEARNT, COUNT, TRIED, MET, AGE, VISITS = range(12)
"""Rows of a search's nodes, a column for each node, column 0 the root. BEFORE: the token above, the other half of the state.
CHILD, LAST, AFTER: tried children as a list. LEARNT, COUNT: of the row of successors; COUNT is -1 where it was not looked up.
MET: nodes met before this one was expanded, -1 if it is not. AGE: the order in which expansions meet the nodes."""


class Search(NamedTuple):
    """How to search. factors: see `explore`.  num_paths: most visited nodes that are kept."""

    levels: int
    iterations: int
    num_paths: int
    factors: np.ndarray


@njit(cache=True)
def with_flat_rows(store):
    """A store as the search reads it."""
    words = store[ROWS].reshape(-1)
    return store + (words, words.view(np.float32))  # noqa: RUF005  (compiled code adds tuples)


@njit(cache=True)
def _row(table, store, a, b):
    """(learnt, begin, count) of what follows a pair: words of the store, or else of the table."""
    at = find(store, (a << 32) | b)
    if at >= 0:
        rows = store[ROWS]
        return True, at * rows.shape[1] + 1, np.int64(rows[at, 0])
    begin, count = find_row(table[0], table[1], a, b)
    return False, 2 * begin, count


@njit(cache=True)
def _entry(table, store, learnt, begin, j):
    """(token, weight) of the j-th successor of a row."""
    at = begin + 2 * j
    if learnt:
        return np.int64(store[WORDS][at]), np.float64(store[WEIGHTS][at + 1])
    return np.int64(table[2][at]), np.float64(table[3][at + 1])


@njit(cache=True)
def explore(iterations, c1, c2):
    """The exploration factor at a node, by its visits."""
    factor = np.empty(iterations + 1)
    for n in range(iterations + 1):
        factor[n] = (c1 + np.log((n + c2 + 1) / c2)) * np.sqrt(n)
    return factor


@njit(cache=True, error_model="numpy")
def search(table, store, a, b, levels, iterations, factors, seed, sample, position):
    """(nodes, begins, size): what was visited, see the rows' names; begins: of the nodes' rows of successors.

    A node is made when it is first visited; successors are tried in their order, so those that have been are the first ones.
    """
    most = 2 * iterations + 1
    nodes, begin, values = np.empty((12, most), np.int32), np.empty(most, np.int64), np.empty((5, most))
    token, before, parent, child, last, after = nodes[0], nodes[1], nodes[2], nodes[3], nodes[4], nodes[5]
    learnt, count, tried, met, age, visits = nodes[6], nodes[7], nodes[8], nodes[9], nodes[10], nodes[11]
    reward, total, prior, mean, urge = values[0], values[1], values[2], values[3], values[4]  # total: weights from the root
    token[0], before[0], parent[0], child[0], last[0], after[0] = b, a, -1, -1, -1, -1  # mean: W/n; urge: M/(1 + n)
    learnt[0], begin[0], count[0] = _row(table, store, a, b)
    tried[0], met[0], age[0], visits[0], reward[0], total[0], prior[0] = 0, -1, 0, 0, 0.0, 0.0, 0.0
    size, all_met, draws = 1, 1, 0
    for _ in range(iterations):
        n, level = 0, 0
        while level < levels and count[n] > 0:
            expanded = met[n] < 0
            if expanded:
                met[n] = all_met
                all_met += count[n]
            if tried[n] < count[n]:
                m, up = size, n
                size += 1
                t, w = _entry(table, store, learnt[up], begin[up], tried[up])
                token[m], before[m], parent[m], age[m] = t, token[up], up, met[up] + tried[up]
                child[m], last[m], after[m], count[m], tried[m], met[m] = -1, -1, -1, -1, 0, -1
                visits[m], reward[m], total[m], prior[m] = 0, 0.0, total[up] + w, w
                if level + 1 < levels:
                    learnt[m], begin[m], count[m] = _row(table, store, np.int64(token[up]), t)
                if last[up] < 0:
                    child[up] = m
                else:
                    after[last[up]] = m
                last[up] = m
                tried[up] += 1
                n = m
            else:
                factor, best_score, m = factors[visits[n]], -np.inf, child[n]
                while m >= 0:
                    score = mean[m] + factor * urge[m]
                    if score > best_score:
                        n, best_score = m, score
                    m = after[m]
            level += 1
            if expanded:
                break
        x, y, gained = np.int64(before[n]), np.int64(token[n]), total[n]
        is_known, at, num = learnt[n] != 0, begin[n], np.int64(count[n])
        while level < levels:
            mass = 0.0
            for j in range(num):
                mass += _entry(table, store, is_known, at, j)[1]
            if mass <= 0:
                break
            remaining = uniform_at(seed, sample, position, 0, draws) * mass
            draws += 1
            j = 0
            t, w = _entry(table, store, is_known, at, 0)
            while j < num - 1 and remaining >= w:
                remaining -= w
                j += 1
                t, w = _entry(table, store, is_known, at, j)
            x, y, gained, level = y, t, gained + w, level + 1
            if level < levels:
                is_known, at, num = _row(table, store, x, y)
        while n >= 0:
            visits[n] += 1
            reward[n] += 1 + gained
            mean[n], urge[n] = reward[n] / visits[n], prior[n] / (1 + visits[n])
            n = np.int64(parent[n])
    return nodes, begin, size


@njit(cache=True)
def _hang(tree, table, store, nodes, begin, size, num_paths):
    """Hang the most visited nodes, those met first among equals, then the heaviest successor of each.

    A node is no more visited than its parent, which was met earlier. Scores: the share of the parent's visits, or one half.
    """
    visits, age, place = nodes[VISITS], nodes[AGE], np.full(size, -1)
    place[0], num_kept = 0, min(num_paths, size - 1)
    order = np.arange(1, size)
    for i in range(num_kept):
        if is_full(tree):
            return
        best = i
        for j in range(i + 1, size - 1):
            m, n = order[j], order[best]
            if visits[m] > visits[n] or (visits[m] == visits[n] and age[m] < age[n]):
                best = j
        order[i], order[best] = order[best], order[i]
        n = order[i]
        up = nodes[PARENT, n]
        if place[up] >= 0:
            place[n] = add_node(tree, place[up], np.int64(nodes[TOKEN, n]), visits[n] / visits[up])
    for i in range(num_kept):
        n = order[i]
        if is_full(tree):
            break
        if place[n] < 0:
            continue
        learnt, at, count = nodes[LEARNT, n] != 0, begin[n], np.int64(nodes[COUNT, n])
        if count < 0:
            learnt, at, count = _row(table, store, np.int64(nodes[BEFORE, n]), np.int64(nodes[TOKEN, n]))
        if count:
            add_node(tree, place[n], _entry(table, store, learnt, at, 0)[0], 0.5)


@njit(cache=True)
def grow(tree, table, store, update, ends, how, key, limits):
    """Bump what is unread, then plant and grow a tree of what the search visits most.

    update: (unread, bump, cap).  ends: the last two tokens, -1 for one that is not there.  how: a `Search`.
    """
    unread, bump, cap = update
    bump_all(table, store, unread, bump, cap)
    (a, b), learned = ends, with_flat_rows(store)
    plant(tree, b, limits)
    if is_full(tree) or a < 0:
        return
    max_nodes, max_depth, _ = limits
    levels, iterations = min(how.levels, max_depth), min(how.iterations, max(FEWEST, PER_NODE * max_nodes))
    nodes, begin, size = search(table, learned, a, b, levels, iterations, how.factors, *key)
    _hang(tree, table, learned, nodes, begin, size, how.num_paths)
