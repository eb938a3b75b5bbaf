"""Without a measured profile nothing runs before the first token, and costs and acceptance are learnt from the rounds that run anyway."""

from time import perf_counter, thread_time

import numpy as np
import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.stats import clock
from polydraft.models import load, pair
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import Charges, RoundCosts, Work
from polydraft.plan.learner import BURST, CREDIT, RATE, SETTLED, Learner, assumed
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.profile import Profile, identity, remember
from polydraft.plan.sizes import expected_tokens
from polydraft.registry import verifier
from tests.engine.tables import TableModel
from tests.plan.planning import work
from tests.plan.test_plan import size_of


class Clock:
    """Seconds that pass only where they are spent."""

    now = 0.0

    def __call__(self):
        return self.now


class Timed(TableModel):
    """Tables whose passes take `once` and so much a row, on a clock; an own factor of noise for each pass."""

    def __init__(self, clock, once, row, *, seed=0, **options):
        super().__init__(seed=seed, max_num_seqs=4, max_model_len=4000, **options)
        self.clock, self.once, self.row, self.noise = clock, once, row, np.random.default_rng(seed)

    def score(self, slots, tree, **options):
        rows = int((tree.parents[:, options.get("since", 0) :] >= 0).sum()) + len(slots)
        self.clock.now += (self.once + self.row * rows) * self.noise.uniform(0.9, 1.1)
        return super().score(slots, tree, **options)


def timed(once=1e-2, row=5e-4, draft=1e-3, *, fit=0.8, plan=None):
    """An engine on a clock of its own: seconds of a pass of the target, of a row in it, of a pass of the draft."""
    clock = Clock()
    target, small = Timed(clock, once, row), Timed(clock, draft, 0.0, seed=1)
    small.logits = fit * target.logits + (1 - fit) * small.logits
    return Engine(target, ModelDrafter(small), verifier("greedy_traversal"), plan or AdaptivePlan(), clock=clock)


def run(engine, tokens=400, **options):
    return engine.generate([[1, 2, 3]], SamplingParams(max_tokens=tokens, seed=0, **options))[0].stats


@pytest.mark.parametrize("drafter", ["model", "model:top_k", "ngram", ["model", "ngram"]])
def test_no_pass_runs_before_the_first_token_but_the_prefill(drafter, monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", "off")
    target, small = TableModel(), TableModel(seed=1)
    engine = Engine.of(target, draft_model=small, drafter=drafter)
    first = next(engine.stream([1, 2, 3], SamplingParams(max_tokens=20, seed=0)))
    assert first.token_ids and target.passes == 1 and small.passes <= 12


@pytest.mark.parametrize("draft", [1e-3, 3e-2])
@pytest.mark.parametrize("believed", [True, False])
def test_drafts_that_never_fit_lose_what_may_be_lost_whatever_is_believed_of_costs(draft, believed, monkeypatch):
    if believed:  # wrong: drafts are cheap
        cheap = Charges(0.5, rows=0.01, plain_once=1.0)
        monkeypatch.setattr(Learner, "_costs", lambda self: RoundCosts.whole(Charges(*(self._pace(1) * x for x in cheap))))
    engine, rounds = timed(draft=draft, fit=0.0), 1000
    target = engine.target
    stats = run(engine, rounds)
    plain = target.once + target.row
    lost = target.clock.now / plain - stats.emitted - 3 * draft / plain  # the draft reads its prompt
    assert stats.drafted > 0
    assert lost < CREDIT + RATE * rounds + (SETTLED + BURST) * (1 + 12 * draft / plain) + 0.01 * rounds


def test_drafts_that_fit_are_never_stopped_where_rounds_without_them_were_timed_in_a_good_moment():
    engine = timed()
    run(engine, 400)
    engine.target.once *= 2
    engine.drafter.model.once *= 2
    assert run(engine, 1200).tokens_per_call > 2


@pytest.mark.parametrize(
    ("once", "row", "draft"),
    [(1e-2, 2e-3, 3e-3), *(pytest.param(1e-2, 5e-4, draft, marks=pytest.mark.slow) for draft in (1e-3, 6e-3))],
)
def test_sizes_come_close_to_those_of_the_true_costs(once, row, draft):
    engine = timed(once, row, draft)
    for seed in range(4):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=500, seed=seed))
    true = RoundCosts.whole(Charges(once=once, rows=row, depth=draft, plain_once=once + row))

    def speed(plan, rate):
        """Of what the plan chooses at this acceptance, in truth."""
        size = size_of(plan.best(rate))
        return expected_tokens(np.full(DEPTHS, rate), *size) / true.seconds(work([size], [100]))

    known, learnt = AdaptivePlan(Profile(true, (0.7,) * DEPTHS)), AdaptivePlan(engine.plan.profile)
    assert all(speed(learnt, rate) > 0.95 * speed(known, rate) for rate in (0.3, 0.5, 0.7, 0.9))


@pytest.mark.slow
def test_a_plan_that_gave_up_because_first_drafts_were_dear_tries_them_again():
    engine = timed()
    engine.drafter.model.once = 3e-2
    run(engine, 200)
    gave_up = run(engine, 200)
    engine.drafter.model.once = 1e-3
    for _ in range(12):
        last = run(engine)
    assert gave_up.drafted < 0.2 * gave_up.target_calls and last.tokens_per_call > 2


def test_the_first_rounds_of_a_kind_are_not_timed():
    engine = timed(plan=AdaptivePlan(max_depth=1, max_width=1))
    learnt = []
    for _ in engine.stream([1, 2, 3], SamplingParams(max_tokens=12, seed=0)):
        learnt.append(sum(kind.count for kind in engine.plan.learner._plain.values()))
    assert learnt[SETTLED - 1] == 0 and learnt[-1] > 0


@pytest.mark.slow
def test_acceptance_of_requests_that_are_over_is_where_the_next_begins():
    engine = timed(draft=4e-3, fit=0.0)
    *_, last = [run(engine) for _ in range(8)]
    assert engine.plan.profile.acceptance[0] < 0.4 < assumed(engine.target, engine.drafter).acceptance[0]
    assert last.drafted < 0.3 * last.emitted


def test_a_given_profile_does_not_change_and_one_that_was_measured_before_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    given = Profile(RoundCosts.assumed(), (0.5,) * DEPTHS)
    fixed = timed(plan=AdaptivePlan(given))
    run(fixed)
    assert fixed.plan.profile is given and fixed.plan.learner is None
    target, small = TableModel(), TableModel(seed=1)
    target.name, small.name = "a", "b"
    made = Engine.of(target, draft_model=small)
    remember(identity(target, made.drafter, made.verifier), given)
    made = Engine.of(target, draft_model=small)
    assert made.plan.profile == given and made.plan.learner is None


def test_rounds_that_stall_or_compile_hardly_count():
    learner, x = Learner(Profile.assumed()), [work([size], [50]) for size in ((1, 0), (1, 4))]
    for number in range(12):
        learner.time(x[0], 9.0 if number == 0 else 1e-3)
        learner.time(x[1], 50.0 if number == 0 else 2e-3)
    plain, drafted = map(learner.profile.costs.seconds, x)
    assert plain == pytest.approx(1e-3, rel=0.15) and drafted == pytest.approx(2e-3, rel=0.15)


def test_a_compiled_pass_is_timed_on_its_own_thread_however_many_torch_has(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert clock(load.load_model(str(pair.draft_folder()), max_num_seqs=1)) is thread_time
    assert clock(TableModel()) is perf_counter


def test_what_is_assumed_of_a_real_pair_follows_from_the_bytes_of_its_weights(monkeypatch):
    monkeypatch.setattr("polydraft.plan.learner._bandwidth", lambda num_bytes, device: 1e10)
    target, small = (load.load_model(str(f), max_num_seqs=1) for f in (pair.target_folder(), pair.draft_folder()))
    start = assumed(target, ModelDrafter(small)).costs
    plain, one, four = (start.seconds(work([size], [20])) for size in ((1, 0), (1, 1), (1, 4)))
    assert plain == pytest.approx(target.weight_bytes / 1e10, abs=3e-4, rel=0.1)
    rows = 0.05 * target.weight_bytes / 1e10
    assert one - plain > small.weight_bytes / 1e10
    assert four - one == pytest.approx(3 * (rows + 1.05 * small.weight_bytes / 1e10), rel=0.2)


def test_a_machine_that_slows_down_slows_all_rounds():
    learner, plain, drafted = Learner(Profile.assumed()), Work(1, 100.0), work([(1, 4)], [100])
    for factor, times in ((1.0, 40), (3.0, 12)):
        for number in range(times):
            learner.time(plain, 1e-3 * factor)
            if number % 10 == 0 and factor == 1.0:
                learner.time(drafted, 2e-3)
    learner._learn()
    costs = learner.profile.costs
    assert costs.seconds(plain) == pytest.approx(3e-3, rel=0.02)
    assert costs.seconds(drafted) / costs.seconds(plain) == pytest.approx(2.0, rel=0.02)


def test_what_may_be_lost_grows_with_the_rounds_gains_are_forgotten_and_all_is_valued_by_the_pace_of_now():
    learner, plain, drafted = Learner(Profile.assumed()), Work(1, 10.0), work([(1, 1)], [10])
    for _ in range(BURST):
        learner.time(plain, 1.0)
    for _ in range(100):
        learner.gain(drafted, 1.0, 3.0)
    learner.compare(1, 0)
    learner.gain(drafted, CREDIT + 1.0, 0.0)
    assert learner.barred(1, 0) == pytest.approx(1 / RATE - CREDIT / RATE * (learner.lost < 0), abs=2 * CREDIT / RATE)
    later = Learner(Profile.assumed())
    later.gain(drafted, CREDIT - 1.0, 0.0)
    assert later.barred(1, 1000) < 1000
    later.gain(drafted, 2.0, 0.0)
    assert later.barred(1, 1000) == 1000 + round(1 / RATE)
    for _ in range(BURST):
        later.time(plain, 2.0)
    assert later.barred(1, 1000) < 1000
