"""Trees by position: the drafter draws what the checker enumerates, every rule for them keeps the distribution, over rounds too; what only looks like one is caught."""

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, DraftSampling, Request, TreeShape
from polydraft.core.geometry import paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods import registry
from polydraft.testing import Grown, Tables, by_position, enumerate_drafts, measure, sibling_draws
from tests.engine.tables import TableModel, distribution
from tests.exactness.harness import stopped_inside
from tests.exactness.runs import every_run
from tests.exactness.table_pairs import TwoTables, emitted_probs, exact_for

IID = DraftSampling.IID
BY_POSITION = TreeShape.BY_POSITION
TREES = [(-1, 0, 0, 0, 1, 1), (-1, 0, 1, 0, 1, 2), (-1, 0, 0, 2, 2), (-1, 0, 1, 2, 0, 4), (-1, 0, 1)]
"""With three leaves, with a chain and a leaf at each branching, with the leaf given first, with two paths of unequal lengths, a chain."""


def placed(tokens, parents):
    """Tokens by place, children with children of their own numbered first: what does not depend on how nodes are numbered."""
    places = [()]
    last = {}
    order = sorted(range(1, len(parents)), key=lambda n: n not in parents)
    number = {}
    for n in order:
        last[parents[n]] = number[n] = last.get(parents[n], -1) + 1
    for n in range(1, len(parents)):
        places.append((*places[parents[n]], number[n]))
    return tuple(sorted(zip(places[1:], tokens[1:], strict=True)))


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_the_drafters_draws_are_those_of_the_checker_and_every_rule_keeps_the_distribution(
    pair, parents, monkeypatch
):
    tables = TwoTables(*pair, [1, 2])
    counts = by_position(*parents)
    depth = Budget.fixed(parents).max_depth
    drafter = ModelDrafter(pair[1])
    (state,) = drafter.start([Request("r", (1, 2), SamplingParams(), 0)])
    expected = {}
    found = {}
    for d in enumerate_drafts(tables, IID, counts, depth):
        key = placed(d.tokens, d.parents)
        expected[key] = expected.get(key, 0) + d.probability
    for probability, draft in every_run(
        lambda: drafter.propose([state], [Budget.fixed(parents)]), monkeypatch
    ):
        assert draft.shape is Budget.fixed(parents).shape
        tokens = draft.tree.tokens[0].tolist()
        above = draft.tree.parents[0].tolist()
        key = placed(tokens, above)
        assert key not in found
        found[key] = probability
        for n in range(1, len(tokens)):
            path = []
            m = above[n]
            while m > 0:
                path = [tokens[m], *path]
                m = above[m]
            assert np.abs(draft.probs[0, draft.rows[0, n]] - tables.row("q", path)).max() < 1e-12
    assert found == pytest.approx(expected, abs=1e-12)
    for name in exact_for(BY_POSITION):
        assert measure(registry.verifier(name), tables, IID, BY_POSITION, counts, depth).error < 1e-12, name


class Wandering(FixedPolicy):
    """Another tree in each round, by the text so far."""

    def budgets(self, sequences):
        given = (
            Budget.fixed((-1, 0, 1, 0)),
            Budget.fixed((-1, 0, 0, 1, 1)),
            Budget.fixed((-1, 0, 0)),
            Budget.fixed(paths(2, 2)),
        )
        return [given[(sum(s.token_ids) + len(s.token_ids)) % 4] for s in sequences]


@pytest.mark.parametrize("name", ["greedy_traversal", "traversal"])
def test_rounds_whose_trees_follow_the_past_keep_the_distribution(name, monkeypatch):
    target = TableModel(2, seed=0)
    small = TableModel(2, seed=1)
    engine = Engine.of(target, draft_model=small, verifier=name, policy=Wandering(Budget.fixed(paths(2, 2))))
    found = emitted_probs(engine, [1, 0], 3, monkeypatch)
    assert np.abs(found - distribution(target, [1, 0], 3)).max() < 1e-12


def without_copies(drafts):
    """Wrong: of equal leaves one is dropped."""
    found = []
    for d in drafts:
        kept = [n for n in range(len(d.tokens)) if n < 2 or d.parents[n] or d.tokens[n] not in d.tokens[2:n]]
        number = {n: i for i, n in enumerate(kept)}
        parents = [-1, *(number[d.parents[n]] for n in kept[1:])]
        found.append(
            Grown(d.probability, [d.tokens[n] for n in kept], parents, [d.paths[n] for n in kept], [])
        )
    return found


def deeper_by_value(tables):
    """Wrong for trees by position, though legal growth: whether anything is drawn below the first of two children depends on both."""
    found = []
    for w, (x, y) in sibling_draws(IID, [tables.row("q", ())] * 2, 2):
        below = sibling_draws(IID, [tables.row("q", (x,))], 1) if x <= y else [(1.0, ())]
        for v, z in below:
            found.append(
                Grown(
                    w * v,
                    [0, x, y, *z],
                    [-1, 0, 0, 1][: 3 + len(z)],
                    [(), (x,), (y,), (x, *z)][: 3 + len(z)],
                    [],
                )
            )
    return found


def test_trees_that_are_none_are_caught():
    rule = registry.verifier("greedy_traversal")
    tables = Tables(3, seed=0)
    nothing = by_position(-1)
    assert measure(rule, tables, IID, BY_POSITION, nothing, 1, stopped_inside(tables, IID)).tv > 0.05
    grown = deeper_by_value(tables)
    assert measure(rule, tables, IID, TreeShape.GROWN, nothing, 2, grown).error < 1e-12
    assert measure(rule, tables, IID, BY_POSITION, nothing, 2, grown).tv > 0.01
    tables = Tables(3, seed=2)
    drafts = enumerate_drafts(tables, IID, by_position(-1, 0, 0, 0, 1), 2)
    for name in ("greedy_traversal", "traversal"):
        assert measure(registry.verifier(name), tables, IID, BY_POSITION, nothing, 2, drafts).error < 1e-12
        assert (
            measure(registry.verifier(name), tables, IID, BY_POSITION, nothing, 2, without_copies(drafts)).tv
            > 0.02
        ), name


def test_children_that_go_on_equally_deep_share_the_order_of_greedy_traversal():
    rule = registry.verifier("greedy_traversal")
    plain = registry.verifier("traversal")
    shapes = TreeShape
    for seed in range(6):
        tables = Tables(3, seed)
        star = (by_position(-1, 0, 0, 0), 1)
        chain = (by_position(-1, 0, 0, 0, 1), 2)
        as_paths = measure(rule, tables, IID, shapes.PATHS, *star).block_efficiency
        assert measure(rule, tables, IID, BY_POSITION, *star).block_efficiency == pytest.approx(
            as_paths, abs=1e-12
        )
        leaves, in_turn = (
            measure(r, tables, IID, BY_POSITION, *chain).block_efficiency for r in (rule, plain)
        )
        alone = measure(rule, tables, IID, BY_POSITION, by_position(-1, 0, 1), 2).block_efficiency
        assert min(leaves, in_turn) >= alone - 1e-12
