"""Ragged pairs in a plan, weighed like all else; and in an engine, only where drafter and rule have them, and in a batch each row as it would be alone."""

import numpy as np
import pytest
import torch

from polydraft import FixedPlan
from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape
from polydraft.engine import acceptance
from polydraft.engine.acceptance import DEPTHS, Acceptance, expected_tokens
from polydraft.engine.plan import AdaptivePlan
from polydraft.errors import IncompatibleError
from polydraft.tree import paths, ragged
from tests.engine.planning import costs, made, outcome, sequences
from tests.engine.scripted import engine


@pytest.mark.parametrize("options", [{"verifier": "multipath"}, {"drafter": "model:listed"}, {"drafter": "ngram"}])
def test_ragged_drafts_are_refused_where_there_are_none_or_the_rule_is_not_exact_for_them(options):
    if options != {"drafter": "ngram"}:  # which grows trees of its own within any bounds
        with pytest.raises(IncompatibleError, match=r"paths of unequal lengths were asked .* (greedy_traversal|list_race|match)"):
            engine(FixedPlan(Budget.fixed(ragged(4, 1))), **options)
    plan = made(costs())
    engine(plan, **options)
    assert plan.max_short == (AdaptivePlan.max_short if "ngram" in options.values() else 0)


def test_adaptive_plans_weigh_them_where_they_may_be():
    plans = AdaptivePlan(), AdaptivePlan()
    engine(plans[0])
    engine(plans[1], verifier="traversal")
    assert [p.max_short for p in plans] == [AdaptivePlan.max_short] * 2


def test_a_short_path_beside_a_deep_one_takes_the_rows_that_are_left():
    rates = (0.7, *[0.85] * (DEPTHS - 1))
    known = costs(rows=0.01, rows_beyond_8=0.3, depths=0.1)
    (found,) = made(known, rates=rates, max_tree_nodes=0).budgets(sequences())
    assert found == Budget.fixed(ragged(5, 2))
    (equal,) = made(known, rates=rates, max_short=0, max_tree_nodes=0).budgets(sequences())
    assert equal == Budget.fixed(paths(2, 3))
    tokens = [expected_tokens(np.array(rates), 2, g.max_depth, 0, short) for g, short in ((found, 2), (equal, 0))]
    assert tokens[0] / known.seconds([(2, 5, 0, 2)], [10]) > 1.01 * tokens[1] / known.seconds([(2, 3)], [10])


def test_what_a_ragged_pair_should_keep_is_predicted_as_such():
    tree = TokenTree(torch.tensor([[0, 1, 0, 1, 1, 0]]), torch.tensor([[-1, 0, 0, 1, 2, 3]]))
    draft = Draft(tree, SiblingLaw.IID, TreeShape.RAGGED, torch.full((1, 4, 2), 0.5), torch.tensor([[-1, 0, 0, 1, 2, 3]]))
    record = Acceptance()
    assert acceptance.count([record], draft, outcome(0)) == [0]
    acceptance.look([record], draft, torch.zeros(1, 6, 2), [False], np.full((2, DEPTHS), 0.5), outcome(0), rows=[0])
    assert record.predicted == pytest.approx(expected_tokens(np.full(DEPTHS, 0.5), 2, 3, 0, 2) - 1)
    lengths = [expected_tokens(np.full(DEPTHS, 0.5), 2, 3, 0, short) for short in (1, 2)]
    assert expected_tokens(np.full(DEPTHS, 0.5), 1, 3) < lengths[0] < lengths[1] < expected_tokens(np.full(DEPTHS, 0.5), 2, 3)
