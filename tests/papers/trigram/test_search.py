"""ADED: the search against a plain one, what it hangs on a draft, and what a table takes."""

from dataclasses import replace

import numpy as np
import pytest

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree
from polydraft.papers.trigram.drafter import TrigramDrafter, TrigramStore, TrigramTable
from polydraft.papers.trigram.search import explore, with_flat_rows
from polydraft.papers.trigram.search import search as searched
from tests.drafters.sessions import requests, trigram_table

WIDE = Budget.grown(64, 4, width=24)
TABLE = trigram_table([[0, 1, 2, 3, 4, 0, 1, 2, 4, 3, 0, 1, 3, 2, 0, 1, 2, 3, 1, 0, 1, 4] * 3], 5)


def drafted(drafter, state, budget):
    return drafter.propose([state], [budget]).tree.tokens[0].tolist()


def search(table, tokens=(0, 1), iterations=150, c1=32.0, c2=8.0, levels=3, seed=0):
    """Visits by path, those met first among equals."""
    nodes, size = searched(
        table.arrays,
        with_flat_rows(TrigramStore(1).arrays),
        *tokens,
        levels,
        iterations,
        explore(iterations, c1, c2),
        seed,
        0,
        9,
    )
    paths = list[tuple[int, ...]]([()])
    for token, parent in nodes[["token", "parent"]][1:size].tolist():
        paths.append((*paths[parent], token))
    order = sorted(range(1, size), key=lambda n: (-nodes["visits"][n], nodes["age"][n]))
    return {paths[n]: int(nodes["visits"][n]) for n in order}


def naive_search(table, a, b, levels, iterations, c1, c2, uniform):
    """The search on linked dictionaries; returns visits by path."""
    root = {"path": (), "state": (a, b), "n": 0, "W": 0.0, "M": 0.0, "sum": 0.0, "children": None, "up": None}
    all_nodes = [root]
    draws = 0
    for _ in range(iterations):
        node = root
        while node["children"]:
            explore = (c1 + np.log((node["n"] + c2 + 1) / c2)) * np.sqrt(node["n"])
            node = max(
                node["children"],
                key=lambda m: np.inf if m["n"] == 0 else m["W"] / m["n"] + explore * m["M"] / (1 + m["n"]),
            )
        if len(node["path"]) < levels and node["children"] is None:
            node["children"] = [
                {
                    "path": (*node["path"], c),
                    "state": (node["state"][1], c),
                    "n": 0,
                    "W": 0.0,
                    "M": w,
                    "sum": node["sum"] + w,
                    "children": None,
                    "up": node,
                }
                for c, w in table.successors(*node["state"])
            ]
            all_nodes += node["children"]
            node = node["children"][0] if node["children"] else node
        state = node["state"]
        gained = node["sum"]
        level = len(node["path"])
        while level < levels and (row := table.successors(*state)):
            left = uniform(draws) * sum(w for _, w in row)
            draws = draws + 1
            c = row[-1][0]
            for token, w in row:
                if left < w:
                    c = token
                    break
                left -= w
            w = dict(row)[c]
            state = (state[1], c)
            gained = gained + w
            level = level + 1
        while node is not None:
            node["n"], node["W"], node = node["n"] + 1, node["W"] + 1 + gained, node["up"]
    return {m["path"]: m["n"] for m in all_nodes[1:] if m["n"]}


@pytest.mark.parametrize(("c1", "iterations", "levels"), [(32.0, 150, 3), (0.0, 40, 2), (4.0, 80, 4)])
def test_the_compiled_search_visits_what_a_plain_one_visits(c1, iterations, levels):
    from polydraft.sampling.noise import uniform_at

    found = search(TABLE, iterations=iterations, c1=c1, levels=levels)
    assert found == naive_search(
        TABLE, 0, 1, levels, iterations, c1, 8.0, lambda i: uniform_at(0, 0, 9, 0, i)
    )
    order = {path: i for i, path in enumerate(found)}
    assert all(order[path[:-1]] < i for path, i in order.items() if len(path) > 1)


def test_a_small_budget_is_searched_as_often_as_it_has_room():
    prompts = [[0, 1], [1, 2], [3, 4]]
    for nodes, iterations in ((1, 64), (16, 64), (24, 96), (60, 150)):
        short = TrigramDrafter(TABLE, iterations=iterations)
        capped = TrigramDrafter(TABLE)
        for prompt in prompts:
            assert drafted(short, *short.start(requests(prompt)), Budget.grown(nodes, 4, 24)) == drafted(
                capped, *capped.start(requests(prompt)), Budget.grown(nodes, 4, 24)
            )


@pytest.mark.parametrize(
    "table", [TABLE, trigram_table([np.random.default_rng(0).integers(0, 30, 20_000)], 30)]
)
@pytest.mark.parametrize(
    "budget", [WIDE, Budget.grown(500, 9, 500), Budget.grown(12, 4, 2), Budget.grown(9, 2, 9)]
)
def test_the_most_visited_paths_then_a_successor_of_each_make_the_draft(table, budget):
    """One after the other, as far as each fits; what hangs on a refused one is refused."""
    drafter = TrigramDrafter(table, num_paths=20, bump=0)
    (state,) = drafter.start([replace(requests([0, 1])[0], prompt_token_ids=(3, 2, 4, 1, 0, 2, 0, 0, 1))])
    state.store = TrigramStore(1)
    iterations = min(150, max(64, 4 * budget.max_nodes))
    visits = search(table, iterations=iterations, levels=min(3, budget.max_depth))
    kept = list(visits)[:20]
    expected = GrownTree.rooted(1, budget)
    nodes = {(): 0}
    for path in kept:
        share = visits[path] / (visits[path[:-1]] if len(path) > 1 else iterations)
        nodes[path] = expected.add(nodes[path[:-1]], path[-1], share) if nodes[path[:-1]] >= 0 else -1
    for path in kept:
        following = table.successors(*(0, 1, *path)[-2:])
        if following and nodes[path] >= 0:
            expected.add(nodes[path], following[0][0], 0.5)
    found = drafter.continuations(state, budget)
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert found.scores == pytest.approx(expected.scores)


def test_more_iterations_concentrate_visits_on_the_heavier_paths():
    def share(iterations):
        roots = {path[0]: n for path, n in search(TABLE, iterations=iterations).items() if len(path) == 1}
        return roots[TABLE.successors(0, 1)[0][0]] / sum(roots.values())

    assert share(400) > share(3)


def test_exploration_changes_the_draft():
    assert list(search(TABLE, c1=0.0)) != list(search(TABLE, c1=32.0))


def test_the_draft_is_a_function_of_seed_and_position():
    flat = trigram_table([np.random.default_rng(0).integers(0, 9, 4000)], 9)
    a, b, c = (list(search(flat, seed=seed, c1=0.0)) for seed in (0, 0, 5))
    assert a == b != c


def test_an_entry_takes_ten_bytes():
    V = 1_000
    F = 32
    top = 10
    rng = np.random.default_rng(0)
    followers = (np.arange(V)[:, None] * 7 + rng.integers(1, 30, (V, F)).cumsum(1)) % V
    second = followers.ravel()
    token = followers[second[:, None], np.arange(top)].ravel()
    weight = np.sort(rng.dirichlet(np.ones(top), len(second)), axis=1)[:, ::-1]
    table = TrigramTable.of_rows(
        np.repeat(np.arange(V), F), second, np.full(len(second), top), token, weight.ravel()
    )
    assert table.num_entries == V * F * top and table.num_bytes < 10.1 * table.num_entries
