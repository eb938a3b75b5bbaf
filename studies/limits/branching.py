"""Draft trees of equal size on real text: paths that part at the root, paths that part twice, and the tree of ERSD.

paths       4 paths of 8 tokens
branching   2 children of the root, 2 of each of these, and one path behind each
race tree   `theory.trees.race_tree` of the ranks that the target's pick has in the draft's race, counted at the contexts of single nodes
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polydraft.core import Budget, NoiseKey, Request
from polydraft.core import geometry as trees
from polydraft.sampling import noise
from polydraft.theory.trees import race_tree
from studies.limits.contexts import Pair
from studies.limits.paths import Paths
from studies.theory import efficiency

NODES = 32
"""Below the root."""
RANKS = 8
CLOCKS = 16
"""Races of a context in which ranks are counted."""
RULES: dict[str, tuple[str, ...]] = {
    "paths": ("traversal", "greedy_traversal", "recursive"),
    "without_replacement": ("traversal", "greedy_traversal_wor", "recursive_wor"),
    "greedy_plus_one": ("traversal",),
    "coupled": ("race",),
    "systematic": ("flow",),
}
"""Kind of model drafter -> rules measured on its drafts."""


def places(pair: Pair) -> np.ndarray:
    """[RANKS] how often the target takes the first, second, ... arrival of the draft's race."""
    s = pair.settings
    counted = np.zeros(RANKS)
    contexts = pair.contexts(s.node_contexts)
    for index, context in enumerate(contexts):
        p, q = pair.last_distributions(context, [s.temperature])[s.temperature]
        for rank in _ranks(p, q, s.seed, index):
            if rank < RANKS:
                counted[rank] += 1
    return counted / (CLOCKS * len(contexts))


def _ranks(p: np.ndarray, q: np.ndarray, seed: int, index: int) -> np.ndarray:
    """[CLOCKS] the place of the target's pick in the order of the draft's arrivals."""
    key = NoiseKey.of([seed + i for i in range(CLOCKS)], [2] * CLOCKS, [index] * CLOCKS)
    clocks = noise.clocks(key, len(p)).reshape(CLOCKS, len(p))
    with np.errstate(divide="ignore"):
        arrivals = clocks / q
        picks = (clocks / p).argmin(1)
    return (arrivals < np.take_along_axis(arrivals, picks[:, None], 1)).sum(1)


def shapes(counted: np.ndarray) -> dict[str, tuple[int, ...]]:
    """Name -> parents, of about `NODES` nodes below the root."""
    return {
        "paths": trees.paths(4, NODES // 4),
        "branching": trees.product(2, 2, *[1] * 6),
        "race tree": race_tree(counted.tolist(), NODES + 1).parents,
    }


def branching(pair: Pair, paths: Paths, progress: Callable[[], object]) -> list[dict[str, Any]]:
    """Tokens per step of each rule on each tree, over the same rule on paths too; nothing for a head, whose one node is not measured."""
    s = pair.settings
    if pair.draft is None or not s.tree_contexts or not s.node_contexts:
        return []
    by_name = shapes(places(pair))
    values = dict[tuple[str, str, str], list[float]]()
    for index, context in enumerate(pair.contexts(s.tree_contexts)):
        request = Request(f"tree {index}", context, paths.params, s.seed, index)
        for key, value in _at_context(paths, request, by_name):
            values.setdefault(key, []).append(value)
        progress()
    return [_row(key, values, by_name[key[2]]) for key in values]


def _at_context(
    paths: Paths, request: Request, by_name: dict[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[str, str, str], float]]:
    """((rule, kind of drafts, tree), expected tokens)."""
    for kind, rules in RULES.items():
        for name, tree in by_name.items():
            draft = paths.draw(paths.drafters[kind], request, tree)
            p = paths.rows_at(paths.pair.target, request, draft.tree)
            for rule in rules:
                verdict = paths.rules[rule](draft, p)
                yield (rule, kind, name), float(efficiency.expected_tokens(draft, verdict)[0])


def _row(
    key: tuple[str, str, str], values: dict[tuple[str, str, str], list[float]], tree: tuple[int, ...]
) -> dict[str, Any]:
    rule, kind, name = key
    here = np.array(values[key])
    over = efficiency.paired(here, np.array(values[rule, kind, "paths"]))
    budget = Budget.fixed(tree)
    row = {"rule": rule, "drafts": kind, "tree": name, "nodes": budget.max_nodes, "depth": budget.max_depth}
    row |= efficiency.estimate(here).to_dict("tokens_per_step")
    return row | {"over_paths": [over.mean, over.standard_error]}
