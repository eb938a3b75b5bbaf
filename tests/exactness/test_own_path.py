"""Drafts that end by their nodes' own paths: exact for every verifier of the shape, unless a drawn token is dropped after a look at it."""

from dataclasses import replace

import numpy as np
import pytest

from polydraft.core import DraftSampling, TreeShape
from polydraft.core.budget import Budget, Stop
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.testing import Grown, Tables, enumerate_drafts, measure
from tests.exactness.harness import SHAPES, by_depth, with_spares

IID = DraftSampling.IID
WOR = DraftSampling.WITHOUT_REPLACEMENT
EQUAL = TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT
EXACT = {
    name: rule
    for name in registry.names("verifier")
    if (rule := registry.verifier(name)).info.lossless and not rule.info.shared_noise
}
PAIRS = [
    (distribution, shape, name)
    for shape in EQUAL
    for distribution in DraftSampling
    for name, rule in EXACT.items()
    if distribution in rule.info.draft_sampling
    and shape in rule.info.shapes
    and distribution is not DraftSampling.LISTED  # shared noise: tests of the engine
]
CASES = {**{shape: SHAPES[shape] for shape in EQUAL}, TreeShape.CHAIN: [("chain of 3", by_depth(1, 1, 1), 3)]}


def _reach(tables, path, confidence):
    found = 1.0
    for d, token in enumerate(path):
        row = tables.row("q", path[:d])
        found *= confidence(row, token)
    return found


def drawn(tables, path):
    """Below tokens that the draft model gave little probability, as `budget.Stop` does."""
    return _reach(tables, path, lambda row, token: row[token]) < 0.3


def unsure(tables, path):
    """Behind rows without a likely token."""
    return _reach(tables, path, lambda row, token: row.max()) < 0.5


def flat(tables, path):
    """Before a row without a likely token, which is looked at and not drawn from."""
    return tables.row("q", path).max() < 0.55


def named(tables, path):
    """Behind one token."""
    return path[-1] == 0


STOPS = drawn, unsure, flat, named


def ending(counts, stop, tables):
    """The same numbers of children, but none where the node's own path says so. The root goes on."""
    return lambda d, n: 0 if d.paths[n] and stop(tables, d.paths[n]) else counts(d, n)


@pytest.mark.parametrize(
    ("distribution", "shape", "name"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_verifier_stays_exact_where_nodes_end_by_their_own_path(distribution, shape, name):
    for _, counts, depth in CASES[shape]:
        for seed in range(6):
            tables = Tables(3, seed)
            for stop in STOPS:
                drafts = enumerate_drafts(tables, distribution, ending(counts, stop, tables), depth)
                found = measure(EXACT[name], tables, distribution, shape, counts, depth, drafts)
                assert found.error < 1e-12, (stop.__name__, seed, found)


@pytest.mark.parametrize(
    "name", ["speculative", "block", "traversal", "greedy_traversal", "recursive", "match"]
)
def test_a_token_that_is_dropped_after_a_look_at_it_biases_the_output(name):
    """The wrong variant: a chain without its first token of little probability. `match`, which asks no distribution of the draft, bears even that."""

    def cut(draft):
        path = draft.paths[-1]
        keep = next((d for d in range(len(path)) if drawn(tables, path[: d + 1])), len(path))
        return replace(
            draft,
            tokens=draft.tokens[: keep + 1],
            parents=draft.parents[: keep + 1],
            paths=draft.paths[: keep + 1],
        )

    worst = 0.0
    for seed in range(6):
        tables = Tables(3, seed)
        drafts = merged([cut(d) for d in enumerate_drafts(tables, IID, by_depth(1, 1), 2)])
        worst = max(worst, measure(EXACT[name], tables, IID, TreeShape.CHAIN, by_depth(1, 1), 2, drafts).tv)
    assert worst < 1e-12 if name == "match" else worst > 0.05


def merged(drafts):
    """One of each, with the probability of all that are equal."""
    found = dict[tuple[int, ...], Grown]()
    for d in drafts:
        key = d.paths[-1]
        found[key] = replace(d, probability=d.probability + (found[key].probability if key in found else 0.0))
    return list(found.values())


def test_unequal_paths_that_end_anywhere_are_trees_that_grow():
    """Greedy traversal counts on the lengths of unequal paths: it is biased where they end early, and such budgets are not of its shapes."""
    _, counts, depth = SHAPES[TreeShape.RAGGED][0]
    tables = Tables(3, 0)
    drafts = enumerate_drafts(tables, IID, ending(counts, drawn, tables), depth)
    assert measure(EXACT["greedy_traversal"], tables, IID, TreeShape.RAGGED, counts, depth, drafts).tv > 0.05
    budget = Budget.fixed((-1, 0, 0, 1)).ending(Stop((0.3,)))
    assert budget.shape is TreeShape.GROWN and budget.shape not in EXACT["greedy_traversal"].info.shapes
    assert Budget.fixed((-1, 0, 0, 1, 2)).ending(Stop((0.3,))).shape is TreeShape.PATHS


def every_node(path):
    return range(len(path))


def by_last_token(path):
    """A look ahead of the node: at what was drawn deepest."""
    return [0] if path[-1] == 1 else [len(path) - 1]


def by_whole_chain(path):
    """At a subset that all of the chain decides."""
    return np.flatnonzero(np.random.default_rng([7, *path]).random(len(path)) < 0.5).tolist()


CHOICES = every_node, by_last_token, by_whole_chain
TAKES_SPARES = sorted(
    name
    for name, rule in EXACT.items()
    if WOR in rule.info.draft_sampling and TreeShape.GROWN in rule.info.shapes
)


def worst_of_spares(name, choices=CHOICES, **wrong):
    """Largest total variation over tables, depths and choices."""
    tables = [Tables(V, seed) for V, seeds in ((3, 12), (4, 3)) for seed in range(seeds)]
    cases = [
        (t, depth, choose)
        for t in tables
        for depth in ((1, 2, 3) if t.V == 3 else (2,))
        for choose in choices
    ]
    found = [
        measure(
            EXACT[name], t, WOR, TreeShape.GROWN, by_depth(), depth, with_spares(t, depth, choose, **wrong)
        ).tv
        for t, depth, choose in cases
    ]
    return max(found)


@pytest.mark.parametrize("name", TAKES_SPARES)
def test_spare_siblings_that_the_whole_chain_decides_keep_the_target_distribution(name):
    assert worst_of_spares(name) < 1e-12


def test_which_verifiers_take_spare_siblings():
    """Those that count on the number of siblings do not, and are biased."""
    assert {"traversal", "recursive_wor", "single_with_spares", "match"} <= {*TAKES_SPARES}
    for name in ("greedy_traversal_wor", "greedy_plus_one"):
        assert name not in TAKES_SPARES and worst_of_spares(name, [by_whole_chain]) > 0.05
    assert Budget.fixed((-1, 0, 1)).ending(Stop((0.3,), min_spare_chance=(0.1,))).shape is TreeShape.GROWN


@pytest.mark.parametrize("name", ["traversal", "recursive_wor"])
def test_spare_siblings_that_are_dropped_after_a_look_at_them_or_drawn_with_the_elder_bias_the_output(name):
    assert worst_of_spares(name, keep=lambda path: path[-1] != 0) > 0.05
    assert worst_of_spares(name, again=True) > 0.01


def test_spare_siblings_of_a_fixed_tree_that_is_no_chain_are_refused():
    with pytest.raises(InvalidInputError, match="expected a chain"):
        Budget.fixed((-1, 0, 0)).ending(Stop((0.3,), min_spare_chance=(0.1,)))
