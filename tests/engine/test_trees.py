"""Trees by position in a plan and in an engine: only where drafter and rule have them, weighed like all else, in a batch each row as it would be alone."""

import numpy as np
import pytest
import torch

from polydraft import Engine, FixedPlan, SamplingParams
from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape
from polydraft.engine import acceptance
from polydraft.engine.acceptance import DEPTHS, Acceptance
from polydraft.engine.costs import budget_of
from polydraft.engine.plan import AdaptivePlan
from polydraft.engine.tree_search import chances, expected, grow
from polydraft.errors import IncompatibleError
from polydraft.theory.tree_plan import best_of_one_depth
from tests.engine.planning import costs, made, outcome, sequences
from tests.engine.scripted import engine, shapes_of
from tests.engine.tables import TableModel

TREE = (-1, 0, 1, 0, 3, 1)
EARLY_AND_LATE = (0.9, 0.9, *[0.4] * (DEPTHS - 2))
"""Acceptances of which neither a second draw at the root nor one further down alone makes the most."""
CHEAP = {"rows": 0.01, "depths": 0.1}


def grown(rates, num_nodes, depth, width=4):
    """Parents and expected tokens as the engine grows them."""
    chance, parents, tokens = np.empty((depth, width)), np.empty(1 + num_nodes, np.int64), np.empty(1 + num_nodes)
    chances(np.asarray(rates), chance)
    grow(chance, depth, parents, tokens)
    assert expected(chance, parents) == pytest.approx(tokens[-1])
    return tuple(p for p in parents.tolist() if p >= 0), float(tokens[-1]), chance


@pytest.mark.parametrize("options", [{"verifier": "multipath"}, {"drafter": "model:listed"}, {"drafter": "ngram"}])
def test_trees_by_position_are_refused_where_there_are_none_or_the_rule_is_not_exact_for_them(options):
    if options != {"drafter": "ngram"}:  # which grows trees of its own within any bounds
        with pytest.raises(IncompatibleError, match=r"trees by position were asked .* or another budget"):
            engine(FixedPlan(Budget.fixed(TREE)), **options)
    plan = made(costs())
    engine(plan, **options)
    assert plan.max_tree_nodes == (AdaptivePlan.max_tree_nodes if "ngram" in options.values() else 0)


def test_adaptive_plans_weigh_them_where_they_may_be():
    plans = AdaptivePlan(), AdaptivePlan(max_tree_nodes=8)
    engine(plans[0])
    engine(plans[1], verifier="traversal")
    assert [p.max_tree_nodes for p in plans] == [AdaptivePlan.max_tree_nodes, 8]


def test_trees_are_grown_nearly_as_the_programme_finds_them():
    rng, shares = np.random.default_rng(0), []
    for _ in range(100):
        depth = int(rng.integers(1, 5))
        num_nodes = int(rng.integers(depth, 13))
        _, tokens, chance = grown(rng.uniform(0.2, 0.95, DEPTHS), num_nodes, depth)
        shares.append(tokens / best_of_one_depth(chance.tolist(), num_nodes + 1, depth).expected_tokens)
    assert max(shares) < 1 + 1e-9 and min(shares) > 0.97 and np.mean(shares) > 0.999


@pytest.mark.parametrize(("rates", "is_tree"), [((0.5,) * DEPTHS, False), ((0.9,) * DEPTHS, False), (EARLY_AND_LATE, True)])
@pytest.mark.parametrize("seconds", [CHEAP, {"rows": 0.005, "depths": 0.1}])
def test_a_tree_is_chosen_where_it_promises_more_than_all_else(rates, is_tree, seconds):
    known, record = costs(**seconds), Acceptance(kept=1e9 * np.array(rates), seen=np.full(DEPTHS, 1e9))
    asked = [record], [4], [0], [np.full(DEPTHS, 0.5)]
    ((size,), speed), (_, other) = (made(known, margin=0.0, max_tree_nodes=n)._sizes(*asked) for n in (14, 0))
    found = {(n, d): grown(rates, n, d) for d in range(1, 8) for n in range(d + 1, 15)}
    best = max(tokens / known.seconds([(2, d, 0, 0, (-1, *parents))], [0]) for (_, d), (parents, tokens, _) in found.items())
    assert (len(size) == 5) is is_tree
    if is_tree:
        assert speed > 1.01 * other and Budget.fixed(size[4]) == budget_of(size)
        tokens = expected(found[14, 7][2], np.array(size[4]))
        assert tokens / known.seconds([size], [0]) == pytest.approx(speed)
        assert speed > 0.99 * best  # each size grown anew; in the plan all are one growth
    else:
        assert speed == other >= best / 1.01


def test_trees_are_planned_for_one_sequence_and_for_several_and_not_at_temperature_zero():
    plan = made(costs(**CHEAP), rates=EARLY_AND_LATE)
    (one,) = plan.budgets(sequences())
    assert one.shape is TreeShape.BY_POSITION and one.max_depth == 3
    assert made(costs(**CHEAP), rates=EARLY_AND_LATE, max_tree_nodes=0).budgets(sequences())[0].shape in (
        TreeShape.CHAIN,
        TreeShape.PATHS,
        TreeShape.PRODUCT,
        TreeShape.RAGGED,
    )
    dear = made(costs(rows=0.003, depths=0.2), rates=EARLY_AND_LATE)
    assert {g.shape for g in dear.budgets(sequences(2))} == {TreeShape.BY_POSITION}
    assert plan.budgets(sequences(temperature=0))[0].width == 1


def test_what_a_tree_by_position_should_keep_is_predicted_as_such():
    parents = [-1, 0, 0, 1, 1, 2]
    tree = TokenTree(torch.tensor([[0, 1, 0, 1, 1, 0]]), torch.tensor([parents]))
    rows = torch.tensor([[-1, 0, 0, 1, 1, 2]])
    draft = Draft(tree, SiblingLaw.IID, TreeShape.BY_POSITION, torch.full((1, 3, 2), 0.5), rows)
    record = Acceptance()
    assert acceptance.count([record], draft, outcome(0)) == [0]
    acceptance.look([record], draft, torch.zeros(1, 6, 2), [False], np.full((2, DEPTHS), 0.5), outcome(0), rows=[0])
    a, b = 0.5, 1 - 0.5**1.4
    assert record.predicted == pytest.approx(b + a * b + (b - a) * a)
    assert record.kept[:2] == pytest.approx([1.0, 1.0])


def test_an_adaptive_engine_draws_the_trees_that_it_plans(monkeypatch):
    target, small = (TableModel(5, seed=seed, max_num_seqs=8) for seed in (0, 1))
    fast = Engine.of(target, draft_model=small, plan=made(costs(rows=0.003, depths=0.2), rates=EARLY_AND_LATE))
    drafts = shapes_of(fast, monkeypatch)
    texts = fast.generate([[1, 2], [2, 1]], SamplingParams(seed=0, max_tokens=30))
    assert [len(r.token_ids) for r in texts] == [30, 30]
    assert TreeShape.BY_POSITION in {d.shape for d in drafts}
