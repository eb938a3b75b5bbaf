"""Shapes that drafters make on request: equal paths where the rule is not exact for them, and in a batch each row as it would be alone."""

import pytest

from polydraft import SamplingParams
from polydraft.core import Budget, TreeShape
from tests.engine.scripted import Script, engine, shapes_of

PATHS, RAGGED, BY_POSITION = TreeShape.PATHS, TreeShape.RAGGED, TreeShape.BY_POSITION
BUDGETS = {
    RAGGED: [Budget.of_paths(2, 4, 0, 1), Budget.of_paths(2, 3), Budget.of_paths(1, 4), Budget.of_paths(2, 4, 1), Budget(0, 0)],
    BY_POSITION: [
        Budget.of_tree((-1, 0, 1, 0, 3, 1, 3)),
        Budget.of_paths(2, 4, 0, 1),
        Budget.of_paths(2, 3),
        Budget.of_tree((-1, 0, 0, 1)),
        Budget(0, 0),
    ],
}


@pytest.mark.parametrize("asked", BUDGETS)
@pytest.mark.parametrize("name", ["multipath", "traversal"])
def test_a_plan_of_ones_own_gets_equal_paths_where_the_rule_is_exact_only_for_these(asked, name, monkeypatch):
    fast = engine(Script(BUDGETS[asked]), verifier=name)
    drafts = shapes_of(fast, monkeypatch)
    fast.generate([[1, 2]], SamplingParams(seed=0, max_tokens=20))
    assert drafts and {d.shape for d in drafts if d.tree.num_nodes > 3} == {PATHS if name == "multipath" else asked}


@pytest.mark.parametrize(
    ("asked", "row", "nodes", "parents"),
    [(RAGGED, 1, (1, 7), [0, 0, 1, 2, 3, 4]), (BY_POSITION, 0, (0, 7), [-1, 0, 0, 1, 1, 2, 2])],
)
def test_in_a_batch_of_all_shapes_each_text_is_the_one_that_it_is_alone(asked, row, nodes, parents, monkeypatch):
    params = [SamplingParams(seed=seed, max_tokens=40) for seed in range(len(BUDGETS[asked]))]
    together = engine(Script(BUDGETS[asked]))
    drafts = shapes_of(together, monkeypatch)
    texts = [r.token_ids for r in together.generate([[1, 2]] * len(params), params)]
    alone = engine(Script(BUDGETS[asked]))
    assert texts == [alone.generate([[1, 2]], p, first_index=i)[0].token_ids for i, p in enumerate(params)]
    assert drafts[0].shape is asked and drafts[0].tree.parents[row, slice(*nodes)].tolist() == parents
