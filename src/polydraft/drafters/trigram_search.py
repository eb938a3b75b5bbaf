"""The search of ADED: the triples behind a pair as a game tree, compiled; see `drafters.trigram` for paper and symbols."""

import numpy as np
from numba import njit

from polydraft.drafters.growth import add_ranked, plant
from polydraft.drafters.recent import find
from polydraft.drafters.trigram_store import ROW, bump_all
from polydraft.drafters.trigram_table import find_row
from polydraft.noise import uniform_at

__all__ = ["explore", "grow", "search"]


@njit(cache=True)
def _row(table, store, a, b):
    """(learnt, begin, count) of what follows a pair: cells of the store, or else of the table."""
    at = find(store[0], (a << 32) | b)
    if at >= 0:
        return True, at * ROW + 1, store[1][at * ROW]
    begin, count = find_row(table[0], table[1], a, b)
    return False, begin, count


@njit(cache=True)
def _entry(table, store, learnt, begin, j):
    """(token, weight) of the j-th successor of a row."""
    at = 2 * (begin + j)
    if learnt:
        return np.int64(store[2][at]), np.float64(store[3][at + 1])
    return np.int64(table[2][at]), np.float64(table[3][at + 1])


@njit(cache=True)
def explore(iterations, c1, c2):
    """The exploration factor at a node, by its visits."""
    factor = np.empty(iterations + 1)
    for n in range(iterations + 1):
        factor[n] = (c1 + np.log((n + c2 + 1) / c2)) * np.sqrt(n)
    return factor


@njit(cache=True, error_model="numpy")
def search(table, store, a, b, levels, iterations, factors, num_paths, seed, sample, position):
    """(tokens, parents, visits) of the draft's candidates, best first; parents index candidates, -1 is the root.

    A node is made when it is first visited; successors are tried in their order, so those that have been are the first ones.
    """
    most = 2 * iterations + 1
    token, before = np.empty(most, np.int64), np.empty(most, np.int64)  # before: the token above, the other half of the state
    parent, age = np.empty(most, np.int32), np.empty(most, np.int32)  # age: the order in which expansions meet the nodes
    child, last, after = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)  # children as a list
    learnt, begin = np.empty(most, np.bool_), np.empty(most, np.int64)  # the row of the successors
    count, tried, met = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32)  # count: -1 not expanded
    visits, reward, total = np.empty(most, np.int32), np.empty(most), np.empty(most)  # total: weights from the root down
    prior, mean, urge = np.empty(most), np.empty(most), np.empty(most)  # mean: W/n; urge: M/(1 + n)
    token[0], before[0], parent[0], age[0], child[0], last[0], after[0] = b, a, -1, 0, -1, -1, -1
    count[0], tried[0], visits[0], reward[0], total[0], prior[0] = -1, 0, 0, 0.0, 0.0, 0.0
    size, all_met, draws = 1, 1, 0
    for _ in range(iterations):
        n, level = 0, 0
        while True:
            if count[n] < 0 and level < levels:
                learnt[n], begin[n], count[n] = _row(table, store, before[n], token[n])
                met[n] = all_met
                all_met += count[n]
                expanded = True
            else:
                expanded = False
            if count[n] <= 0:
                break
            if tried[n] < count[n]:
                m, up = size, n
                size += 1
                t, w = _entry(table, store, learnt[up], begin[up], tried[up])
                token[m], before[m], parent[m], age[m] = t, token[up], up, met[up] + tried[up]
                child[m], last[m], after[m], count[m], tried[m] = -1, -1, -1, -1, 0
                visits[m], reward[m], total[m], prior[m] = 0, 0.0, total[up] + w, w
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
        x, y, gained = before[n], token[n], total[n]
        while level < levels:
            known, at, num = _row(table, store, x, y)
            mass = 0.0
            for j in range(num):
                mass += _entry(table, store, known, at, j)[1]
            if mass <= 0:
                break
            left = uniform_at(seed, sample, position, 0, draws) * mass
            draws += 1
            j = 0
            t, w = _entry(table, store, known, at, 0)
            while j < num - 1 and left >= w:
                left -= w
                j += 1
                t, w = _entry(table, store, known, at, j)
            x, y, gained, level = y, t, gained + w, level + 1
        while n >= 0:
            visits[n] += 1
            reward[n] += 1 + gained
            mean[n], urge[n] = reward[n] / visits[n], prior[n] / (1 + visits[n])
            n = parent[n]
    # the most visited nodes, those met first among equals; a node is no more visited than its parent, which was met earlier
    kept = min(num_paths, size - 1)
    order = np.arange(1, size)
    for i in range(kept):
        best = i
        for j in range(i + 1, size - 1):
            m, n = order[j], order[best]
            if visits[m] > visits[n] or (visits[m] == visits[n] and age[m] < age[n]):
                best = j
        order[i], order[best] = order[best], order[i]
    tokens, parents, ranks = np.empty(2 * kept, np.int64), np.empty(2 * kept, np.int64), np.zeros(2 * kept, np.int64)
    num = kept
    for i in range(kept):
        n, up = order[i], parent[order[i]]
        tokens[i], parents[i], ranks[i] = token[n], -1, visits[n]
        for j in range(i):
            if up and order[j] == up:
                parents[i] = j
        known, at, found = _row(table, store, before[n], token[n])
        if found:
            tokens[num], parents[num] = _entry(table, store, known, at, 0)[0], i
            num += 1
    return tokens[:num], parents[:num], ranks[:num]


@njit(cache=True)
def _shares(parents, visits, iterations):
    """Each candidate's part of its parent's visits; one half for what was not searched."""
    shares = np.empty(len(parents))
    for i in range(len(parents)):
        above = iterations if parents[i] < 0 else max(visits[parents[i]], 1)
        shares[i] = min(1.0, visits[i] / above) if visits[i] else 0.5
    return shares


@njit(cache=True)
def grow(
    tree, table, store, unread, bump, cap, a, b, levels, iterations, per_node, factors, num_paths, seed, sample, position, *limits
):
    """Bump what is unread, then plant and grow a tree of the search's candidates; returns its size."""
    bump_all(table, store, unread, bump, cap)
    max_nodes, max_depth, width = limits
    plant(tree, b, max_nodes, max_depth, width)
    if max_nodes == 0 or max_depth == 0 or a < 0:
        return 1
    levels, iterations = min(levels, max_depth), min(iterations, per_node * max_nodes)
    tokens, parents, visits = search(table, store, a, b, levels, iterations, factors, num_paths, seed, sample, position)
    return add_ranked(tree, tokens, parents, _shares(parents, visits, iterations))
