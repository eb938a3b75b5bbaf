"""A trunk, then K paths, and ragged pairs: the drafter draws what the checker enumerates, and every rule for them keeps the distribution, over rounds too."""

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, DraftSampling, Request, TreeShape
from polydraft.core.geometry import paths
from polydraft.core.geometry import ragged as ragged_paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods import registry
from polydraft.testing import Grown, Tables, enumerate_drafts, measure
from tests.engine.tables import distribution
from tests.exactness.harness import by_depth, ragged
from tests.exactness.runs import every_run
from tests.exactness.table_pairs import TwoTables, emitted_probs, exact_for

IID = DraftSampling.IID
PATHS = TreeShape.PATHS
RAGGED = TreeShape.RAGGED
SHAPES = {
    paths(2, 3, trunk=1): by_depth(1, 2, 1),
    paths(2, 3, trunk=2): by_depth(1, 1, 2),
    paths(3, 2, trunk=1): by_depth(1, 3),
    ragged_paths(3, 1): ragged(3, 1),
    ragged_paths(3, 2): ragged(3, 2),
    ragged_paths(2, 1, 1): ragged(2, 1, 1),
}
"""By the tree's parents: children by depth or by path."""


@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_the_drafters_draws_are_those_of_the_checker_and_every_rule_keeps_the_distribution(
    pair, parents, monkeypatch
):
    tables = TwoTables(*pair, [1, 2])
    budget = Budget.fixed(parents)
    shape = budget.shape
    setting = (SHAPES[parents], budget.max_depth)
    drafter = ModelDrafter(pair[1])
    (state,) = drafter.start([Request("r", (1, 2), SamplingParams(), 0)])
    expected = {(*d.tokens[1:], *d.parents): d.probability for d in enumerate_drafts(tables, IID, *setting)}
    found = {}
    for probability, draft in every_run(lambda: drafter.propose([state], [budget]), monkeypatch):
        assert draft.shape is shape
        found[(*draft.tree.tokens[0, 1:].tolist(), *draft.tree.parents[0].tolist())] = probability
        for n in range(1, draft.tree.num_nodes):
            path = []
            m = int(draft.tree.parents[0, n])
            while m > 0:
                path = [int(draft.tree.tokens[0, m]), *path]
                m = int(draft.tree.parents[0, m])
            assert np.abs(draft.probs[0, draft.rows[0, n]] - tables.row("q", path)).max() < 1e-12
    assert found == pytest.approx(expected, abs=1e-12)
    for name in exact_for(shape):
        assert measure(registry.verifier(name), tables, IID, shape, *setting).error < 1e-12, name


@pytest.mark.parametrize(
    ("name", "parents"), [("traversal", paths(2, 2, trunk=1)), ("greedy_traversal", ragged_paths(2, 1))]
)
def test_rounds_keep_the_distribution(pair, name, parents, monkeypatch):
    engine = Engine.of(pair[0], draft_model=pair[1], verifier=name, policy=FixedPolicy(Budget.fixed(parents)))
    found = emitted_probs(engine, [1, 2], 3, monkeypatch)
    assert np.abs(found - distribution(pair[0], [1, 2], 3)).max() < 1e-12


def test_rules_for_ragged_batches_are_exact_for_whatever_their_rows_are():
    """Where one row is ragged, others may be chains, equal paths or have a trunk; greedy traversal orders these as it always does."""
    assert all(
        registry.verifier(n).info.shapes >= {TreeShape.CHAIN, PATHS, RAGGED} for n in exact_for(RAGGED)
    )
    rule = registry.verifier("greedy_traversal")
    tables = Tables(3, seed=5)
    for counts, depth in ((by_depth(1, 1), 2), (by_depth(2, 1), 2), (by_depth(1, 2), 2)):
        found, as_ever = (measure(rule, tables, IID, shape, counts, depth) for shape in (RAGGED, PATHS))
        assert found.error < 1e-12
        assert found.block_efficiency == pytest.approx(as_ever.block_efficiency, abs=1e-12)


@pytest.mark.parametrize("lengths", [(3, 1), (3, 2)])
def test_greedy_traversal_is_traversal_where_paths_are_ragged_and_keeps_at_least_the_chain(lengths):
    for seed in range(6):
        tables = Tables(3, seed)
        setting = tables, IID, RAGGED, ragged(*lengths), max(lengths)
        ours, theirs = (measure(registry.verifier(n), *setting) for n in ("greedy_traversal", "traversal"))
        chain = measure(
            registry.verifier("block"),
            tables,
            IID,
            TreeShape.CHAIN,
            by_depth(*[1] * max(lengths)),
            max(lengths),
        )
        assert ours.block_efficiency == pytest.approx(theirs.block_efficiency, abs=1e-12)
        assert ours.block_efficiency >= chain.block_efficiency - 1e-12


def test_ragged_paths_told_to_be_equal_are_caught():
    """Multi-path block verification, which picks a path by all its tokens, on paths that have not equally many."""
    tables = Tables(3, seed=4)
    assert measure(registry.verifier("multipath"), tables, IID, PATHS, by_depth(2, 1), 2).error < 1e-12
    assert measure(registry.verifier("multipath"), tables, IID, PATHS, ragged(3, 1), 3).tv > 0.05


def dropped(drafts, agree):
    """Wrong: the short path is dropped where it begins as the deep one does, or where it does not."""
    cut = [
        Grown(d.probability, [*d.tokens[:2], *d.tokens[3:]], [-1, 0, 1, 2], [*d.paths[:2], *d.paths[3:]], [])
        for d in drafts
    ]
    return [c if (d.tokens[1] == d.tokens[2]) == agree else d for d, c in zip(drafts, cut, strict=True)]


@pytest.mark.parametrize("agree", [True, False])
@pytest.mark.parametrize("name", ["greedy_traversal", "traversal"])
def test_short_paths_dropped_by_a_look_at_their_tokens_are_caught(name, agree):
    tables = Tables(4, seed=7)
    counts = ragged(3, 1)
    drafts = enumerate_drafts(tables, IID, counts, 3)
    assert drafts[0].parents == [-1, 0, 0, 1, 3]
    setting = registry.verifier(name), tables, IID, RAGGED, counts, 3
    assert measure(*setting, drafts).error < 1e-12
    assert measure(*setting, dropped(drafts, agree)).tv > 0.02
