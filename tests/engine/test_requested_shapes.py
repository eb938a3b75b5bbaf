"""Budgets of all shapes: a policy of one's own that asks for what the rule is not exact for loses its drafts, and in a batch each row is as it would be alone."""

import pytest

from polydraft import FixedPolicy, SamplingParams
from polydraft.core import Budget, TreeShape
from polydraft.core.geometry import chain, paths, ragged
from polydraft.errors import DrafterWarning, IncompatibleError
from tests.engine.scripted import Script, engine, shapes_of

PATHS = TreeShape.PATHS
RAGGED = TreeShape.RAGGED
BY_POSITION = TreeShape.BY_POSITION
BUDGETS = {
    RAGGED: [
        Budget.fixed(ragged(4, 1)),
        Budget.fixed(paths(2, 3)),
        Budget.fixed(chain(4)),
        Budget.fixed(chain(0)),
    ],
    BY_POSITION: [
        Budget.fixed((-1, 0, 1, 0, 3, 1)),
        Budget.fixed(ragged(4, 1)),
        Budget.fixed(paths(2, 3)),
        Budget.fixed((-1, 0, 0, 1)),
        Budget.fixed(paths(2, 4, 1)),
        Budget.fixed(chain(0)),
    ],
}


@pytest.mark.parametrize("options", [{"verifier": "multipath"}, {"drafter": "model:listed"}])
@pytest.mark.parametrize(
    ("parents", "said"),
    [
        (ragged(4, 1), r"paths of unequal lengths were asked .* (greedy_traversal|list_race|match)"),
        ((-1, 0, 1, 0, 3, 1), "trees by position"),
    ],
)
def test_a_fixed_policy_is_refused_where_the_drafter_or_the_rule_has_not_its_shape(parents, said, options):
    with pytest.raises(IncompatibleError, match=said):
        engine(FixedPolicy(Budget.fixed(parents)), **options)


@pytest.mark.parametrize("asked", BUDGETS)
def test_drafts_that_the_rule_is_not_exact_for_are_never_verified(asked, monkeypatch):
    fast = engine(Script(BUDGETS[asked]), verifier="multipath")
    plain = engine(FixedPolicy(Budget.fixed(chain(0))))
    assert asked not in fast.verifier.info.shapes
    prompt = [[1, 2]]
    params = SamplingParams(seed=0, max_tokens=20)
    with pytest.warns(
        DrafterWarning,
        match=f"of shape {asked.name} was proposed; expected one that verifier 'multipath' is exact for",
    ):
        (found,) = fast.generate(prompt, params)
    assert found.stats.drafted_tokens == 0 and found.token_ids == plain.generate(prompt, params)[0].token_ids


@pytest.mark.parametrize("asked", BUDGETS)
def test_drafts_that_the_rule_is_exact_for_are_what_a_policy_of_ones_own_asks_for(asked, monkeypatch):
    fast = engine(Script(BUDGETS[asked]), verifier="traversal")
    drafts = shapes_of(fast, monkeypatch)
    fast.generate([[1, 2]], SamplingParams(seed=0, max_tokens=20))
    assert drafts and {d.shape for d in drafts if d.tree.num_nodes > 3} == {asked}


@pytest.mark.parametrize(
    ("asked", "row", "nodes", "parents"),
    [(RAGGED, 1, (1, 7), [0, 0, 1, 2, 3, 4]), (BY_POSITION, 0, (0, 6), [-1, 0, 0, 1, 1, 2])],
)
def test_in_a_batch_of_all_shapes_each_text_is_the_one_that_it_is_alone(
    asked, row, nodes, parents, monkeypatch
):
    params = [SamplingParams(seed=seed, max_tokens=40) for seed in range(len(BUDGETS[asked]))]
    together = engine(Script(BUDGETS[asked]))
    drafts = shapes_of(together, monkeypatch)
    texts = [r.token_ids for r in together.generate([[1, 2]] * len(params), params)]
    alone = engine(Script(BUDGETS[asked]))
    assert texts == [alone.generate([[1, 2]], p, first_index=i)[0].token_ids for i, p in enumerate(params)]
    assert drafts[0].shape is asked and drafts[0].tree.parents[row, slice(*nodes)].tolist() == parents
