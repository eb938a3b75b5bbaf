"""Planning of most probable trees: what nodes are worth by rank is learnt from whole rounds, the choice is the best of all budgets, the law is kept."""

import numpy as np
import pytest
import torch

from polydraft import Engine, FixedPlan, SamplingParams
from polydraft.core import Budget, Outcome
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.errors import InvalidInputError
from polydraft.plan import ranked
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import Work
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.profile import Profile
from polydraft.plan.ranked import SHAPE, SIZE, Ranked, assumed
from polydraft.plan.sizes import Decided
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
    table = assumed([rate])[: np.prod(SHAPE)].reshape(SHAPE).cumsum(-1)
    speeds = {(0, 0): 0.95 / known.seconds(Work(1))}
    for D in range(1, 13):
        for n in range(1, 25):
            seconds = known.seconds(Work(1, 0, n, table[2, D - 1, n - 1], 1, n > D))
            speeds[n, D] = (1 + table[0, D - 1, n - 1]) / seconds
    found = plan.best(rate)
    assert speeds[found.max_nodes, found.max_depth] == pytest.approx(max(speeds.values()), rel=1e-9)


def test_a_batch_of_equal_sequences_is_planned_alike_and_no_worse_than_each_sequence_alone():
    plan = planned()
    alone = plan.best(0.7)
    four = plan.best(0.7, batch=4)
    assert 0 < four.max_nodes <= alone.max_nodes + 2
    three = sequences(3)
    three[1].drafting = False
    first, out, last = plan.budgets(three)
    assert first == last and first.max_nodes > 0 == out.max_nodes


def counted(budget, kept, *, small=None):
    """What a grid holds of a round that drafted within this budget and kept these nodes, and the draft."""
    grid, (s,) = Ranked(), sequences(length=2)
    drafter, record = ModelDrafter(small or TableModel(5, seed=1), "top_k"), grid.record(lasting=1.0)
    draft = drafter.propose(drafter.start([s.request]), [budget])
    scores = draft.scores[0].tolist()
    grid.count(record, Decided(budget, draft.tree.lists[1][0], kept(draft), scores), assumed([0.5]))
    return record, draft


def test_a_round_tells_of_every_smaller_budget():
    record, draft = counted(Budget.grown(9, 3, 9), lambda draft: [1, draft.tree.lists[1][0].index(1)])
    parents, depths = draft.tree.lists[1][0], [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    table, kept = record.kept[: np.prod(SHAPE)].reshape(SHAPE), {1, parents.index(1)}
    for D in (1, 2, 3):
        within = [n for n, d in enumerate(depths) if 0 < d <= D]
        assert table[0, D - 1, : len(within)].tolist() == [float(n in kept) for n in within]
        assert table[1, D - 1].sum() == len(within) and table[2, D - 1].sum() == min(D, max(depths))


def test_what_is_left_out_is_without_value_and_what_was_not_asked_for_is_not_judged():
    record, draft = counted(Budget.grown(9, 2, 9, least=0.4), lambda draft: [])
    assert draft.tree.num_nodes - 1 < 9
    seen = record.seen[: np.prod(SHAPE[1:])].reshape(SHAPE[1:])
    assert (seen[:2, :9] == 1).all() and seen[:, 9:].sum() == 0 == seen[2:].sum()


def test_least_is_where_nodes_were_worth_their_price():
    grid, prior = Ranked(), assumed([0.5])
    prior[-ranked.BINS :] = [0.9, 0.8, 0.5, 0.2, *[0.1] * 8]
    for price, least in ((0.5, 2**-1.5), (0.05, 2**-6), (0.95, 2**-0.5)):
        assert grid.budget((3, 5), grid.record(), prior, price).least == pytest.approx(least)


def test_drafts_that_do_not_fit_are_given_up_and_looked_for_again():
    one = engine(planned(rows=0.1, depth=0.2), fit=0.0, sharp=4.0, max_model_len=400)
    stats = one.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats
    assert 0 < stats.drafted < 0.6 * stats.emitted
    fits = engine(fit=1.0, sharp=4.0, max_model_len=400)
    assert fits.generate([[1, 2]], SamplingParams(seed=1, max_tokens=300))[0].stats.tokens_per_call > 1.8


def test_sizes_beyond_the_plan_are_looked_at_now_and_then():
    grid, record, given = Ranked(), Ranked().record(), []
    for record.counted in range(64):
        given.append(grid.budget((3, 5), record, assumed([0.5]), 0.3))
    wider = [g for g in given if g.least == 0]
    assert len(wider) == len(given) / ranked.EXPLORE
    assert all((g.max_nodes, g.max_depth) == (8, 5) for g in wider)


def test_a_batch_at_temperature_0_is_plain_greedy_decoding():
    prompts = [[1, 2, 3], [4], [5, 5, 0, 1], [2, 2]]
    results = engine().generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_greedy(TableModel(), prompt, 40)
        assert result.stats.drafter_error is None and result.stats.tokens_per_call > 1.2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_run_of_several_rounds_has_exactly_the_tables_law(temperature, monkeypatch):
    monkeypatch.setattr(ranked, "EXPLORE", 2)
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
    assert one.plan.grid.ranked and not Engine.of(target, drafter=NgramDrafter()).plan.grid.ranked
    parts = target, one.drafter, one.verifier
    profile = measured_profile(*parts, [[1, 2, 3]], budget_seconds=0.1)
    assert len(profile.ranked) == len(profile.greedy_ranked) == SIZE
    assert {(o.width, o.depth) for o in measured(*parts, [1, 2, 3], budget_seconds=0.1)[0]} >= {(1, 0), (2, 4), (1, 1)}
    assert Profile.from_dict(profile.to_dict()) == profile
    fixed = Engine.of(target, draft_model=small, drafter="model:top_k", plan=FixedPlan(Budget.grown(5, 3, width=2)))
    stats = fixed.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))[0].stats
    assert stats.drafted >= 5
    with pytest.raises(InvalidInputError, match="ranks"):
        Profile(profile.costs, profile.acceptance, ranked=(0.5,))


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
