"""Planning of most probable trees: places are learnt from whole rounds, the choice is the best of all budgets, the law is kept."""

import numpy as np
import pytest
import torch

from polydraft import Engine, FixedPlan, SamplingParams
from polydraft.core import Budget, Outcome
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine import best_first_plan, places
from polydraft.engine.acceptance import DEPTHS, Acceptance
from polydraft.engine.best_first_plan import BestFirstPlan, plan_for
from polydraft.engine.calibrate import calibrate
from polydraft.engine.costs import FEATURES
from polydraft.engine.places import SHAPE, SIZE
from polydraft.engine.plan import AdaptivePlan
from polydraft.engine.profile import Profile
from polydraft.errors import InvalidInputError
from polydraft.registry import verifier
from tests.engine.planning import costs, sequences
from tests.engine.tables import TableModel, law, plain_greedy
from tests.laws.runs import every_run

CHEAP = {"rows": 0.02, "depths": 0.03}


def planned(rate=0.7, **seconds):
    return BestFirstPlan(Profile(costs(**(seconds or CHEAP)), (rate,) * DEPTHS))


def engine(plan=None, *, fit=0.8, V=7, seqs=4, sharp=2.0, **model):
    target, small = (TableModel(V, seed=s, max_num_seqs=seqs, sharp=sharp, **model) for s in (0, 1))
    small.logits = fit * target.logits + (1 - fit) * small.logits
    return Engine(target, ModelDrafter(small, "top_k"), verifier("match"), plan or planned())


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("seconds", [CHEAP, {"rows": 0.2, "depths": 0.01}, {"rows": 0.01, "depths": 0.3}, {"rows_beyond_8": 0.2}])
def test_the_choice_for_one_sequence_is_the_best_of_all_budgets(rate, seconds):
    plan, known = planned(rate, **seconds), costs(**seconds)
    table = places.assumed([rate])[:SIZE].reshape(SHAPE).cumsum(-1)
    speeds = {(0, 0): 0.95 / known.seconds([(1, 0)], [0])}
    for D in range(1, 13):
        for n in range(1, 25):
            passes = table[2, D - 1, n - 1]
            priced = plan.seconds([(n, D, 0.0, n, passes)], [0])
            assert priced == pytest.approx(known.seconds([(n, 1)], [0]) + known.flat[FEATURES.index("depths")] * (passes - 1))
            speeds[n, D] = (1 + table[0, D - 1, n - 1]) / priced
    found = plan.best(rate)
    assert speeds[found.max_nodes, found.max_depth] == pytest.approx(max(speeds.values()), rel=1e-9)


def test_a_batch_of_equal_sequences_is_planned_alike_and_no_worse_than_each_sequence_alone():
    plan = planned()
    alone = plan.best(0.7)
    four = plan.best(0.7, batch=4)
    assert 0 < four.max_nodes <= alone.max_nodes + 2
    together = plan._sizes([Acceptance() for _ in range(3)], [1, 0, 1], [5, 5, 5], [places.assumed([0.7])] * 3)[0]
    assert together[0] == together[2] and together[1][:2] == [0, 0]


def test_places_hold_the_products_of_target_probabilities_for_every_smaller_budget():
    target, small = TableModel(5), TableModel(5, seed=1)
    drafter, record = ModelDrafter(small, "top_k"), Acceptance()
    (s,) = sequences(length=2)
    states = drafter.start([s.request])
    budget = Budget.grown(9, 3, 9)
    draft = drafter.propose(states, [budget])
    tokens, parents = (x[0] for x in draft.tree.lists)
    p, values, depths = target.logits.softmax(-1), [1.0], [0]
    before = [1] + [tokens[max(parent, 0)] for parent in parents[1:]]
    logits = torch.stack([target.logits[b, t] for b, t in zip(before, tokens, strict=True)])[None]
    for n in range(1, len(tokens)):
        values.append(values[parents[n]] * float(p[before[parents[n]], tokens[parents[n]], tokens[n]]))
        depths.append(depths[parents[n]] + 1)
    places.observe([record], draft, logits, [False], [budget], decay=1.0)
    table = record.kept[:SIZE].reshape(SHAPE)
    for D in (1, 2, 3):
        within = [v for v, d in zip(values[1:], depths[1:], strict=True) if d <= D]
        np.testing.assert_allclose(table[0, D - 1, : len(within)], within, rtol=1e-5)
        assert table[1, D - 1].sum() == len(within) and table[2, D - 1].sum() == min(D, max(depths))


def test_what_is_left_out_is_without_value_and_what_was_not_asked_for_is_not_judged():
    drafter, record = ModelDrafter(TableModel(5, seed=1), "top_k"), Acceptance()
    (s,) = sequences(length=2)
    budget = Budget.grown(9, 2, 9, least=0.4)
    draft = drafter.propose(drafter.start([s.request]), [budget])
    size = draft.tree.num_nodes - 1
    assert size < 9
    places.observe([record], draft, torch.zeros(1, size + 1, 5), [False], [budget])
    seen = record.seen[: SIZE // 3].reshape(SHAPE[1:])
    assert (seen[:2, :9] == 1).all() and seen[:, 9:].sum() == 0 == seen[2:].sum()


def test_least_is_where_nodes_were_worth_their_price():
    worth = np.array([0.9, 0.8, 0.5, 0.2, *[0.1] * 8])
    assert places.least(worth, 0.5) == pytest.approx(2**-1.5)
    assert places.least(worth, 0.05) == pytest.approx(2**-6)
    assert places.least(worth, 0.95) == pytest.approx(2**-0.5)


def test_drafts_that_do_not_fit_are_given_up_and_looked_for_again():
    one = engine(planned(rows=0.1, depths=0.2), fit=0.0, sharp=4.0, max_model_len=400)
    stats = one.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats
    assert 0 < stats.drafted < 0.6 * stats.emitted
    fits = engine(fit=1.0, sharp=4.0, max_model_len=400)
    assert fits.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats.tokens_per_call > 1.8


def test_places_beyond_the_plan_are_looked_at_now_and_then():
    one = engine(fit=1.0, sharp=4.0, max_model_len=400)
    given, plain = [], one.plan._beyond
    one.plan._beyond = lambda record, budget: given.append((budget, plain(record, budget))) or given[-1][1]
    one.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=300))
    wider = [(g, more) for g, more in given if more != g]
    assert 0 < len(wider) <= 1 + len(given) / best_first_plan.EXPLORE
    assert all(more.max_nodes >= g.max_nodes and more.least == 0 for g, more in wider)


def test_a_batch_at_temperature_0_is_plain_greedy_decoding():
    prompts = [[1, 2, 3], [4], [5, 5, 0, 1], [2, 2]]
    results = engine().generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_greedy(TableModel(), prompt, 40)
        assert result.stats.drafter_error is None and result.stats.tokens_per_call > 1.2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_run_of_several_rounds_has_exactly_the_tables_law(temperature, monkeypatch):
    monkeypatch.setattr(best_first_plan, "EXPLORE", 2)
    torch.set_default_dtype(torch.float64)
    try:
        found, reached = torch.zeros(3, 3, 3, 3), set()

        def run():
            plan = planned()
            plan.max_nodes, plan.max_depth = 3, 2
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
    assert isinstance(one.plan, BestFirstPlan)
    assert type(plan_for(NgramDrafter())) is AdaptivePlan
    profile = calibrate(target, one.drafter, one.verifier, [1, 2, 3], budget_seconds=0.1)
    assert len(profile.places) == len(profile.greedy_places) == SIZE + places.BINS
    assert {(o.width, o.depth) for o in profile.costs.observations} >= {(1, 0), (2, 4), (1, 1)}
    assert Profile.from_dict(profile.to_dict()) == profile
    fixed = Engine.of(target, draft_model=small, drafter="model:top_k", plan=FixedPlan(Budget.grown(5, 3, width=2)))
    stats = fixed.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0].stats
    assert stats.drafted >= 5
    with pytest.raises(InvalidInputError, match="places"):
        Profile(profile.costs, profile.acceptance, places=(0.5,))


@pytest.mark.parametrize("plan", [planned(), AdaptivePlan(Profile(costs(**CHEAP), (0.7,) * DEPTHS))])
def test_a_request_that_fails_in_a_round_is_not_learnt_from_and_its_neighbour_is(plan):
    both, drafter = sequences(2, length=2), ModelDrafter(TableModel(5, max_num_seqs=2), "top_k")
    budgets = plan.budgets(both)
    states = drafter.start([s.request for s in both])
    draft = drafter.propose(states[1:], budgets[1:])
    logits = torch.zeros(1, draft.tree.num_nodes, 5)
    plan.learn(both[1:], draft, logits, Outcome(torch.full((1, 0), -1), torch.tensor([0]), torch.tensor([0])))
    assert (both[0].acceptance.asked, both[1].acceptance.asked) == (0.0, 1.0) and both[1].acceptance.seen.any()
