"""Systematic draws as the drafter makes them, every run of it: with flow verification they keep the distribution, round after round."""

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, DraftSampling, Request
from polydraft.core.geometry import paths, product, ragged
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods import registry
from polydraft.testing import Grown, measure
from tests.engine.tables import TableModel, distribution
from tests.exactness.harness import by_depth
from tests.exactness.runs import every_run
from tests.exactness.table_pairs import TwoTables, emitted_probs

TREES = [
    paths(3, 2),
    paths(3, 3, trunk=1),
    product(2, 2),
    ragged(3, 2, 1),
    (-1, 0, 0, 0, 1, 1, 2, 4),
    (-1, 0, 1, 1),
]


def every_draft(drafter, parents, monkeypatch):
    (state,) = drafter.start([Request("r", (1, 2), SamplingParams(), 0)])
    for probability, draft in every_run(
        lambda: drafter.propose([state], [Budget.fixed(parents)]), monkeypatch
    ):
        tokens = draft.tree.lists.tokens[0]
        above = draft.tree.lists.parents[0]
        found = [()]
        for n in range(1, len(tokens)):
            found.append((*found[above[n]], tokens[n]))
        yield Grown(probability, tokens, above, found, [])


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_what_the_drafter_draws_keeps_the_distribution(pair, parents, monkeypatch):
    budget = Budget.fixed(parents)
    tables = TwoTables(*pair, [1, 2])
    drafts = list(every_draft(ModelDrafter(pair[1], "systematic"), parents, monkeypatch))
    assert sum(d.probability for d in drafts) == pytest.approx(1, abs=1e-12)
    setting = tables, DraftSampling.SYSTEMATIC, budget.shape, by_depth(1), budget.max_depth, drafts
    assert measure(registry.verifier("flow"), *setting).error < 1e-12


class Wandering(FixedPolicy):
    """Another tree in each round, by the text so far."""

    def budgets(self, sequences):
        given = [
            Budget.fixed(parents) for parents in ((-1, 0, 1, 0), (-1, 0, 0, 1, 1), paths(3, 1), paths(2, 2))
        ]
        return [given[(sum(s.token_ids) + len(s.token_ids)) % 4] for s in sequences]


def test_rounds_keep_the_distribution(monkeypatch):
    target = TableModel(2, seed=0)
    small = TableModel(2, seed=1)
    engine = Engine.of(
        target, draft_model=small, drafter="model:systematic", policy=Wandering(Budget.fixed(paths(2, 2)))
    )
    assert engine.verifier.info.name == "flow"
    assert (
        np.abs(emitted_probs(engine, [1, 0], 4, monkeypatch) - distribution(target, [1, 0], 4)).max() < 1e-12
    )
