"""Drafts that others wait for make a step a fifth longer at most: beside prompts that are read in its forward pass, and where many look again."""

import pytest

from polydraft.core import Budget
from polydraft.core.geometry import chain
from polydraft.policy.costs import Costs
from polydraft.policy.course import LONGER, Stage, fit, most_rows
from tests.policy.planning import costs, made, sequences

DEAR = Costs.of({1: 1.0, 4: 1.1, 8: 1.4, 16: 2.5}, draft_start=0.05, draft_step=0.08)
"""Rows behind the fourth cost their arithmetic, as on two cores."""


def asked(policy, batch, riding, prices=DEAR):
    """The drafts of a step, and its price."""
    policy.expect(len(batch), riding)
    budgets = [budget for budget in policy.budgets(batch) if budget.max_depth]
    rows = len(batch) + riding + sum(map(most_rows, budgets))
    steps = max((budget.max_depth for budget in budgets), default=0)
    return budgets, prices.step(rows, steps, max(len(budgets), 1))


@pytest.mark.parametrize("riding", [1, 8, 40])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_step_that_reads_a_prompt_takes_a_fifth_more_for_drafts_at_most(count, riding):
    policy = made(DEAR, rate=0.8)
    batch = sequences(count)
    policy.acceptance[False]._means = policy.acceptance[False]._means * 0 + [1.1, 1.0, 1.0]
    plain = DEAR.step(count + riding, 0)
    alone, _ = asked(policy, batch, 0)
    beside, seconds = asked(policy, batch, riding)
    assert seconds <= LONGER * plain and sum(map(most_rows, beside)) <= sum(map(most_rows, alone)), (
        seconds,
        plain,
    )
    assert asked(policy, batch, 0)[0] == alone, "what paid before the prompt came pays behind it"


def test_drafts_stay_beside_a_prompt_where_each_sequence_has_its_tokens_as_soon():
    policy = made(DEAR, rate=0.95)
    batch = sequences(1)
    alone, _ = asked(policy, batch, 0)
    beside, seconds = asked(policy, batch, 4)
    tokens = policy.course(batch[0]).acceptance.expected.tokens
    assert beside == alone and LONGER * DEAR.step(5, 0) < seconds < LONGER * tokens * DEAR.step(5, 0)


@pytest.mark.parametrize(("params", "stays"), [({}, False), ({"seed": 3}, True)])
def test_drafts_of_a_seed_stay_beside_a_prompt_as_if_its_text_ran_alone(params, stays):
    policy = made(DEAR, rate=0.8)
    drafts = Budget.fixed(chain(8))
    courses = [policy.course(s) for s in sequences(2, **params)]
    for course in courses:
        course.step_budget = drafts
    fit(courses, num_sequences=3, riding=4, costs=DEAR)  # a third sequence waits for them
    assert all(course.step_budget is drafts for course in courses) is stays


def test_sequences_that_look_again_take_turns():
    prices = costs(row=0.06, step=0.02)
    policy = made(prices, rate=0.5)
    batch = sequences(8)
    counts = []
    for s in batch:
        policy.course(s).stage = Stage.LOOKING
        policy.course(s).looks = 9
        policy.course(s).acceptance.forget(0.0)
        policy.course(s).acceptance._means[:] = 1.01, 1.0, 1.0
    for _ in range(9):
        budgets, seconds = asked(policy, batch, 0, prices)
        counts.append(len(budgets))
        assert 1 <= len(budgets) < 8 and seconds <= LONGER * prices.step(8, 0)
    assert all(policy.course(s).looks > 0 for s in batch[1:])
