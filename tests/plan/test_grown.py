"""Planning of most probable trees: they are weighed as paths of as many nodes, the choice is the best of all, the law is kept."""

import numpy as np
import pytest
import torch

from polydraft import Engine, FixedPlan, SamplingParams
from polydraft.core import Budget, Outcome
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import Work
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.profile import Profile
from polydraft.plan.sizes import expected_tokens
from polydraft.registry import verifier
from polydraft.tune.measure import measured, measured_profile
from tests.engine.tables import TableModel, law, plain_greedy
from tests.laws.runs import every_run
from tests.plan.planning import LOGITS, costs, sequences

CHEAP = {"rows": 0.02, "depth": 0.03}


def planned(rate=0.7, **seconds):
    plan = AdaptivePlan(Profile(costs(**(seconds or CHEAP)), (rate,) * DEPTHS))
    plan.prepare(TableModel(), ModelDrafter(TableModel(), "top_k"), verifier("match"))
    return plan


def engine(plan=None, *, fit=0.8, V=7, seqs=4, sharp=2.0, **model):
    target, small = (TableModel(V, seed=s, max_num_seqs=seqs, sharp=sharp, **model) for s in (0, 1))
    small.logits = fit * target.logits + (1 - fit) * small.logits
    return Engine(target, ModelDrafter(small, "top_k"), verifier("match"), plan or planned())


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("seconds", [CHEAP, {"rows": 0.2, "depth": 0.01}, {"rows": 0.01, "depth": 0.3}, {"rows_beyond": 0.2}])
def test_the_choice_for_one_sequence_is_the_best_of_all_budgets(rate, seconds):
    plan, known = planned(rate, **seconds), costs(**seconds)
    speeds = {(0, 0): 0.95 / known.seconds(Work(1))}
    for depth in range(1, 13):
        for width in range(1, 5):
            taken = known.seconds(Work(1, 0, width * depth, depth, 1, width > 1))
            speeds[width * depth, depth] = expected_tokens(np.full(DEPTHS, rate), width, depth) / taken
    found = plan.best(rate, greedy=True)
    assert speeds[found.max_nodes, found.max_depth] == pytest.approx(max(speeds.values()), rel=1e-9)
    assert found.max_depth == 0 or not found.parents


def test_a_batch_of_equal_sequences_is_planned_alike_and_no_worse_than_each_sequence_alone():
    plan = planned()
    alone = plan.best(0.7)
    four = plan.best(0.7, batch=4)
    assert 0 < four.max_nodes <= alone.max_nodes + 2
    three = sequences(3)
    three[1].drafting = False
    first, out, last = plan.budgets(three)
    assert first == last and first.max_nodes > 0 == out.max_nodes


def test_drafts_that_do_not_fit_are_given_up_and_looked_for_again():
    one = engine(planned(rows=0.1, depth=0.2), fit=0.0, sharp=4.0, max_model_len=400)
    stats = one.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats
    assert 0 < stats.drafted < 0.6 * stats.emitted
    fits = engine(fit=1.0, sharp=4.0, max_model_len=400)
    assert fits.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats.tokens_per_call > 1.8


def test_a_batch_at_temperature_0_is_plain_greedy_decoding():
    prompts = [[1, 2, 3], [4], [5, 5, 0, 1], [2, 2]]
    results = engine().generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_greedy(TableModel(), prompt, 40)
        assert result.stats.drafter_error is None and result.stats.tokens_per_call > 1.2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_run_of_several_rounds_has_exactly_the_tables_law(temperature, monkeypatch):
    torch.set_default_dtype(torch.float64)
    try:
        found, reached = torch.zeros(3, 3, 3, 3), set()

        def run():
            plan = planned()
            plan.max_width, plan.max_depth = 2, 2
            plan.prepare(TableModel(), ModelDrafter(TableModel(), "top_k"), verifier("match"))
            one = engine(plan, V=3, fit=0.3)
            return one.generate([[0, 1]], SamplingParams(temperature=temperature, max_tokens=4, seed=0))[0]

        for probability, result in every_run(run, monkeypatch):
            found[tuple(result.token_ids)] += probability
            reached.add(result.stats.target_calls)
        if temperature:
            assert (found - law(TableModel(3), [0, 1], 4)).abs().max() < 1e-12
            assert len(reached) > 1
        else:
            assert found[tuple(plain_greedy(TableModel(3), [0, 1], 4))] == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_engines_plan_by_what_their_drafter_makes():
    target, small = (TableModel(9, seed=s, max_num_seqs=4, max_model_len=256) for s in (0, 1))
    one = Engine.of(target, draft_model=small, drafter="model:top_k")
    assert not one.plan.best(0.9).parents and Engine.of(target, drafter=NgramDrafter()).plan.best(0.9).parents
    parts = target, one.drafter, one.verifier
    profile = measured_profile(*parts, [[1, 2, 3]], budget_seconds=0.1)
    assert len(profile.acceptance) == len(profile.greedy) == DEPTHS
    assert {(o.width, o.depth) for o in measured(*parts, [1, 2, 3], budget_seconds=0.1)[0]} >= {(1, 0), (2, 4), (1, 1)}
    assert Profile.from_dict(profile.to_dict()) == profile
    fixed = Engine.of(target, draft_model=small, drafter="model:top_k", plan=FixedPlan(Budget.grown(5, 3, width=2)))
    stats = fixed.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0].stats
    assert stats.drafted >= 5


@pytest.mark.parametrize("kind", ["top_k", "paths"])
def test_a_request_that_fails_in_a_round_is_not_learnt_from_and_its_neighbour_is(kind):
    both, drafter = sequences(2, length=2), ModelDrafter(TableModel(5, max_num_seqs=2), kind)
    plan = AdaptivePlan(Profile(costs(**CHEAP), (0.7,) * DEPTHS))
    plan.prepare(TableModel(), drafter, verifier("match"))
    budgets = plan.budgets(both)
    states = drafter.start([s.request for s in both])
    draft = drafter.propose(states[1:], budgets[1:])
    plan.learn(both[1:], draft, LOGITS, Outcome(torch.full((1, 0), -1), torch.tensor([0]), torch.tensor([0])))
    records = [plan.course(s).record for s in both]
    assert [r.asked for r in records] == [0.0, 1.0] and records[1].seen.any()
