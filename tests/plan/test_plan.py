"""The planner: costs are measured, acceptance is learnt, the choice is the best of all sizes, and the law is kept."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.errors import DrafterWarning, IncompatibleError, InvalidInputError, UnknownNameError
from polydraft.plan import acceptance, profile
from polydraft.plan.acceptance import DEPTHS, Record
from polydraft.plan.costs import RoundCosts
from polydraft.plan.fixed import FixedPlan
from polydraft.plan.plan import HELD, AdaptivePlan
from polydraft.plan.profile import Profile
from polydraft.plan.sizes import Decided, Paths, expected_tokens, paths
from polydraft.registry import verifier
from polydraft.tune.fit import Observation, fit
from polydraft.tune.measure import Bed, _levelled, _Setting, measured_profile
from tests.engine.tables import TableModel, p_value, table_engine
from tests.laws.harness import Grown, Tables, by_depth, enumerate_drafts, measure
from tests.plan.planning import LOGITS, OnlyWalks, costs, made, outcome, sequences, shown, work

SIZES = [(1, 0), (1, 1), (1, 4), (2, 4), (1, 8), (3, 3), (1, 12), (2, 8)]


def synthetic(noise=0.0, outlier=None, seed=0):
    """Rounds whose seconds follow known coefficients."""
    rng, found = np.random.default_rng(seed), []
    for batch, context in ((1, 100), (4, 100), (1, 1000)):
        for w, d in SIZES:
            rows = batch * (1 + w * d)
            scoring = 1e-3 + 2e-4 * rows + 1e-7 * rows * context
            drafting = 0.0 if d == 0 else 1e-4 + 3e-4 * d
            found.append(Observation(batch, w, d, context, drafting, scoring * (1 + noise * rng.random()), 5e-4))
    if outlier is not None:
        found[outlier] = found[outlier]._replace(scoring=10 * found[outlier].scoring)
    return found


def test_fitted_costs_are_those_that_made_the_times():
    fitted = fit(synthetic())
    assert fitted.error < 1e-6
    assert fitted.seconds(work([(2, 6), (1, 0)], [50, 900])) == pytest.approx(
        1e-3 + 2e-4 * 14 + 1e-7 * (13 * 50 + 900) + 1e-4 + 18e-4 + 5e-4
    )


def test_one_disturbed_measurement_does_not_spoil_the_fit():
    fitted = fit(synthetic(noise=0.02, outlier=4))
    truth = synthetic()[4]
    assert fitted.seconds(truth.work) == pytest.approx(truth.seconds, rel=0.05)


def test_more_work_never_looks_cheaper_however_noisy_the_clock():
    for seed in range(5):
        prices = fit(synthetic(noise=2.0, seed=seed)).prices
        assert min(prices) >= 0 and prices.once + prices.sequences + prices.rows > 0


def test_where_nothing_was_drafted_drafts_cost_what_plain_rounds_do():
    fitted = fit([o for o in synthetic() if o.depth == 0])
    for contexts in ([100], [100] * 4, [1000]):
        plain, drafted = (fitted.seconds(work([(1, d)] * len(contexts), contexts)) for d in (0, 3))
        assert drafted == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize(
    "rounds",
    [[], [Observation(1, 1, 4, 0, 1.0, 1.0, 1.0)], [Observation(1, 1, 0, 0, 0.0, -1.0, 0.0), Observation(1, 1, 0, 0, 0, 1, 0)]],
)
def test_a_fit_without_plain_rounds_or_with_negative_times_is_refused(rounds):
    with pytest.raises(InvalidInputError, match="without drafts"):
        fit(rounds)


def brute_force(known, rates, batch, context, max_depth, max_width):
    """Best geometric mean of speeds over every joint choice of sizes."""
    options = [(1, 0), *product(range(1, max_width + 1), range(1, max_depth + 1))]
    speeds = []
    for chosen in product(options, repeat=batch):
        tokens = math.prod(expected_tokens(np.array(rates[b]), *size) for b, size in enumerate(chosen))
        speeds.append((tokens ** (1 / batch) / known.seconds(work(chosen, context)), chosen))
    return max(speeds)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    "seconds",
    [{"rows": 0.1, "depth": 0.1}, {"rows": 0.01, "drafting_at_all": 0.5}, {"rows": 0.1, "rows_beyond": 0.5}, {"depth": 3.0}],
)
def test_the_choice_for_one_sequence_is_the_best_of_all_sizes(rate, seconds):
    known = costs(**seconds)
    speed, (size,) = brute_force(known, [[rate] * DEPTHS], 1, [20], 8, 4)
    found = made(known, max_depth=8, margin=0.0).best(rate, context=20)
    chosen = size_of(found)
    tokens = expected_tokens(np.full(DEPTHS, rate), *chosen)
    assert tokens / known.seconds(work([chosen], [20])) == pytest.approx(speed, rel=1e-9), size


def size_of(budget):
    """(paths, depth) of a budget."""
    return next(size for size in product(range(1, 5), range(13)) if paths(*size).parents == budget.parents)


@pytest.mark.parametrize("rates", [(0.9, 0.2), (0.5, 0.5), (0.95, 0.9), (0.1, 0.05)])
def test_the_choice_for_a_batch_is_within_a_percent_of_the_best_joint_choice(rates):
    known = costs(rows=0.08, depth=0.05, asked=0.02)
    pair, plan = sequences(2, length=1), made(known, max_depth=6, max_width=2, margin=0.0)
    for s, rate in zip(pair, rates, strict=True):
        shown(plan, s, rate)
    found = [size_of(g) for g in plan.budgets(pair)]
    tokens = math.prod(expected_tokens(np.full(DEPTHS, r), *size) for r, size in zip(rates, found, strict=True))
    best, _ = brute_force(known, [[r] * DEPTHS for r in rates], 2, [1, 1], 6, 2)
    assert tokens**0.5 / known.seconds(work(found, [1, 1])) >= 0.99 * best


def test_a_batch_drafts_where_its_rounds_become_far_longer_and_give_more_than_that():
    known, batch = costs(rows=0.5, depth=0.15), sequences(4, length=1)
    plan = made(known, max_width=1, margin=0.0)
    for s in batch:
        shown(plan, s, 0.9)
    (size,) = {(g.width, g.max_depth) for g in plan.budgets(batch)}
    longer = known.seconds(work([size] * 4, [1] * 4)) / known.seconds(work([(1, 0)] * 4, [1] * 4))
    assert longer > 2 and expected_tokens(np.full(DEPTHS, 0.9), *size) > 1.1 * longer


def test_dear_drafts_are_not_made_and_cheap_ones_are_deep():
    assert made(costs(depth=5.0)).best(0.8).max_depth == 0
    assert made(costs(depth=0.2)).best(0.8).max_depth < made(costs(depth=0.02)).best(0.8).max_depth
    assert made(costs(rows=0.02)).best(0.6).width > made(costs(rows=0.2)).best(0.6).width


def test_greedy_requests_get_one_path():
    plan = made(costs(rows=0.01), rates=0.5)
    assert plan.budgets(sequences())[0].width > 1
    assert plan.budgets(sequences(temperature=0))[0].width == 1


def chain(depth):
    """A chain for one sequence."""
    tree = TokenTree.chain(torch.zeros(1, depth + 1, dtype=torch.int64))
    return Draft(tree, SiblingLaw.IID, TreeShape.CHAIN, torch.full((1, depth, 2), 0.5), torch.arange(-1, depth)[None])


def counted(grid, record, budget, kept, prior=0.5):
    """Fold in a round of this budget that kept these nodes."""
    decided = Decided(budget, list(budget.parents), kept)
    grid.count(record, decided, np.full(DEPTHS, prior))


@pytest.mark.parametrize("size", [(2, 4), (3, 3), (4, 6)])
@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_rounds_of_several_paths_tell_the_acceptance_of_one_draft(size, rate):
    """Rounds that keep what the sizes predict of an acceptance: the record comes to that acceptance, whatever the prior says."""
    grid, rng, record, budget = Paths(6, 4), np.random.default_rng(0), Record(lasting=1.0), paths(*size)
    for _ in range(3000):
        kept, node = [], 0
        for d in range(budget.max_depth):
            if rng.random() > 1 - (1 - rate) ** grid.tries[d, size[0] - 1]:
                break
            node = budget.parents.index(node)
            kept.append(node)
        counted(grid, record, budget, kept)
    assert record.kept[:2] / record.seen[:2] == pytest.approx([rate] * 2, abs=0.03)


@pytest.mark.parametrize(("kept", "seen"), [([], [1]), ([1], [1, 1]), ([1, 1, 1], [1, 1, 1])])
def test_a_chain_is_counted_down_to_where_it_ends(kept, seen):
    record = Record()
    for _ in range(2):
        counted(Paths(4, 1), record, paths(1, 3), list(range(1, len(kept) + 1)))
    share = 1 + acceptance.DECAY
    assert record.seen.tolist() == pytest.approx([share * x for x in seen] + [0.0] * (DEPTHS - len(seen)))
    assert record.kept.tolist() == pytest.approx([share * x for x in kept] + [0.0] * (DEPTHS - len(kept)))


def test_a_tree_without_a_law_is_counted_along_the_path_that_was_kept():
    tree = Budget(4, 3, 2, parents=(-1, 0, 0, 1, 3))
    for path, seen in (([2], [1.0, 0.0]), ([1], [1.0, 1.0]), ([], [1.0, 0.0])):
        record = Record()
        counted(Paths(4, 1), record, tree, path)
        assert record.seen[:2].tolist() == seen and record.kept[0] == len(path)


def test_expected_tokens_of_a_chain_are_the_geometric_sum():
    assert expected_tokens(np.full(DEPTHS, 0.8), 1, 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens(np.full(DEPTHS, 0.0), 3, 5) == 1.0
    assert [expected_tokens(np.full(DEPTHS, 0.6), w, 4) for w in (1, 2, 3)] == sorted(
        expected_tokens(np.full(DEPTHS, 0.6), w, 4) for w in (1, 2, 3)
    )


def drive(plan, s, rate, rounds):
    """Rounds whose drafts overlap by `rate`; the budgets that were given."""
    given = []
    for _ in range(rounds):
        (g,) = plan.budgets([s])
        given.append(g)
        if g.max_depth:
            plan.learn([s], chain(g.max_depth), LOGITS, outcome(min(g.max_depth, round(rate / (1 - rate)))))
    return given


def test_drafting_stops_where_it_does_not_pay_with_longer_and_longer_pauses():
    plan = made(costs(rows=0.1, depth=0.1), max_width=1)
    (s,) = sequences()
    given = drive(plan, s, 0.02, 600)
    drafted = [i for i, g in enumerate(given) if g.max_depth]
    assert drafted[:2] == [0, 1] and len(drafted) < 20
    pauses = np.diff(drafted[-4:])
    assert (np.diff(pauses) > 0).all() and pauses[-1] > 200
    assert all(given[i] == paths(1, 1) for i in drafted[-4:])


def test_drafting_comes_back_when_drafts_fit_again():
    plan = made(costs(rows=0.1, depth=0.05), max_width=1)
    (s,) = sequences()
    assert drive(plan, s, 0.02, 60)[-1].max_depth == 0
    deep = [g.max_depth for g in drive(plan, s, 0.9, 150)]
    assert deep[-1] >= 3 and sum(d > 1 for d in deep) > 40


def test_a_rule_that_keeps_less_than_the_overlap_is_believed():
    plan = made(costs(rows=0.1, depth=0.1), rates=0.8, max_width=1)
    (s,) = sequences()
    first = plan.budgets([s])[0]
    for _ in range(8):
        plan.learn([s], chain(4), LOGITS, outcome(0))
    assert [plan.budgets([s]) for _ in range(HELD)][-1][0].max_depth < first.max_depth


def adaptive(known, kind="paths", rates=0.7, **options):
    made_engine = table_engine(kind, **options)
    made_engine.plan = made(known, rates=rates, max_depth=5)
    return made_engine


@pytest.mark.parametrize("seconds", [{"rows": 0.02, "depth": 0.05}, {"rows": 0.25, "depth": 0.2}])
def test_the_law_of_several_rounds_is_kept_by_the_fused_walks(seconds):
    walked = adaptive(costs(**seconds), rates=0.4, seqs=8, V=3, dtype=torch.float32)
    walked.verifier = OnlyWalks(walked.verifier)
    assert p_value(walked, [1, 2], 2, 400) > 1e-3


def peeked(drafts):
    """Wrong: a plan that looks at the draft it decides about, and does not use one that begins with token 0."""
    bare = [Grown(d.probability, [0], [-1], [()], [0]) for d in drafts]
    return [b if d.tokens[1] == 0 else d for b, d in zip(bare, drafts, strict=True)]


def test_a_plan_that_looks_at_the_draft_it_decides_about_is_caught():
    tables = Tables(3, seed=6)
    drafts = enumerate_drafts(tables, SiblingLaw.IID, by_depth(1, 1), 2)
    setting = (verifier("block"), tables, SiblingLaw.IID, TreeShape.CHAIN, by_depth(1, 1), 2)
    assert measure(*setting, drafts).error < 1e-12
    assert measure(*setting, peeked(drafts)).tv > 0.01


def test_one_profile_and_one_seed_give_one_text():
    texts = [adaptive(costs(rows=0.1, depth=0.1)).generate([[1, 2]], SamplingParams(seed=3, max_tokens=30))[0] for _ in range(2)]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_never_fit_cost_three_percent_at_most(seed):
    target, small = (TableModel(V=40, sharp=6.0, seed=s, max_model_len=400) for s in (seed, seed + 5))
    fast = Engine.of(target, draft_model=small, plan=made(costs(rows=0.1, depth=0.1)))
    stats = fast.generate([[1, 2]], SamplingParams(seed=0, max_tokens=300))[0].stats
    assert stats.target_calls > 250
    assert 300 * 1.1 / (stats.target_calls * 1.1 + stats.drafted * 0.2) > 0.97


def test_measuring_leaves_the_models_free_and_finds_costs_and_acceptance():
    fast = table_engine()
    known = measured_profile(fast.target, fast.drafter, fast.verifier, [[1, 2, 3]], budget_seconds=0.1)
    assert known.costs.seconds(work([(1, 0)], [10])) > 0
    assert 0.3 < known.acceptance[0] < 1
    assert fast.target.texts == [[]] * 4
    assert fast.drafter.slots.num_free == 4


def test_a_machine_that_is_slower_for_a_while_is_slower_for_all_sizes():
    """A size that had something to draft only in slow moments: plain means would call it far dearer."""
    place, speeds = _Setting(Bed, 1, {(1, 0): [], (1, 4): []}), [1.0, 1.0, 1.0, 2.0, 2.0]
    for repetition, factor in enumerate(speeds):
        place.taken[1, 0] += [(repetition, (0.0, factor, 0.0), 10)] * 3
        if repetition >= 2:
            place.taken[1, 4] += [(repetition, (factor, factor, factor), 10)] * 3
    plain, drafted = _levelled([place])
    assert drafted.seconds / plain.seconds == pytest.approx(3.0, rel=0.01)
    raw = [np.median([sum(seconds) for _, seconds, _ in found]) for found in place.taken.values()]
    assert raw[1] / raw[0] == 6.0


def test_budgets_hold_for_some_rounds_or_until_a_sequence_leaves_or_stops_drafting():
    planned, (first, second) = made(costs(rows=0.05, depth=0.05)), sequences(2)
    before = planned.budgets([first, second])
    assert [g.max_depth for g in before] == [before[0].max_depth] * 2
    shown(planned, first, 0.0, 50)
    assert [planned.budgets([first, second]) == before for _ in range(HELD)] == [True] * (HELD - 1) + [False]
    assert planned.budgets([first, second])[0].max_depth < before[0].max_depth
    assert planned.budgets([second])[0].max_depth >= before[1].max_depth
    second.drafting = False
    assert planned.budgets([second])[0].max_depth == 0


def test_measuring_fits_into_a_small_context():
    target = TableModel(max_model_len=12)
    drafts = NgramDrafter()
    measured_profile(target, drafts, verifier("match"), [[1, 2, 1, 2, 1]], budget_seconds=0.02)
    assert target.texts == [[]] * 4


def test_a_drafter_that_fails_is_not_measured(monkeypatch):
    made = table_engine()
    monkeypatch.setattr(made.drafter, "propose", lambda *_: 1 / 0)
    with pytest.warns(DrafterWarning), pytest.raises(IncompatibleError, match="ZeroDivisionError"):
        measured_profile(made.target, made.drafter, made.verifier, [[1, 2, 3]], budget_seconds=0.1)


@pytest.mark.parametrize("greedy", [(), (0.95,) * DEPTHS])
def test_a_profile_comes_back_from_its_file(tmp_path, greedy):
    known = Profile(fit(synthetic()), tuple(np.linspace(0.9, 0.5, DEPTHS).tolist()), {"x": 1}, greedy)
    known.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == known
    with pytest.raises(InvalidInputError, match="there is no folder"):
        known.save(tmp_path / "deep" / "p.json")


def test_a_greedy_text_starts_from_its_own_acceptance():
    profile = Profile(RoundCosts.assumed(), (0.3,) * DEPTHS, greedy=(0.95,) * DEPTHS)
    texts = [sequences(temperature=t)[0] for t in (1.0, 0.0)]
    sampled, greedy = (AdaptivePlan(profile).budgets([s])[0].max_depth for s in texts)
    assert sampled < greedy
    both = [b.max_depth for b in AdaptivePlan(profile).budgets(texts)]
    assert both[0] < both[1]
    with pytest.raises(InvalidInputError, match="greedy"):
        Profile(RoundCosts.assumed(), (0.3,) * DEPTHS, greedy=(0.9,))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"polydraft_profile": 1, "costs": {}}', '{"polydraft_profile": 2}'])
def test_what_is_no_profile_is_refused_with_advice(tmp_path, text):
    (tmp_path / "p.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match="polydraft tune"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_a_measured_profile_is_remembered_and_a_broken_cache_is_done_without(tmp_path, monkeypatch):
    pair, measured = {"pair": 1}, Profile.assumed()
    for folder, survives in ((tmp_path, True), (tmp_path / "file", False)):
        (tmp_path / "file").touch()
        monkeypatch.setenv("POLYDRAFT_CACHE", str(folder))
        monkeypatch.setattr(profile, "_known", {})
        assert profile.remembered(pair) is None
        profile.remember(pair, measured)
        assert profile.remembered(pair) == measured
        monkeypatch.setattr(profile, "_known", {})  # another process
        assert (profile.remembered(pair) == measured) == survives
        for file in tmp_path.glob("*.json"):
            file.unlink()
    assert profile.remembered(None) is None


def test_plans_are_named_or_given_and_do_not_mix_with_a_fixed_size(tmp_path):
    target, small = TableModel(), TableModel()
    assert isinstance(Engine.of(target, draft_model=small).plan, AdaptivePlan)
    assert Engine.of(target, draft_model=small, plan="fixed").plan == FixedPlan(paths(1, 5))
    assert Engine.of(target, draft_model=small, depth=4, num_paths=2).plan.budget == paths(2, 4)
    Profile.assumed().save(tmp_path / "p.json")
    assert Engine.of(target, draft_model=small, profile=str(tmp_path / "p.json")).plan.profile == Profile.assumed()
    with pytest.raises(InvalidInputError, match="leaves nothing to plan"):
        Engine.of(target, draft_model=small, depth=3, plan="adaptive")
    with pytest.raises(UnknownNameError, match="did you mean 'adaptive'"):
        Engine.of(target, draft_model=small, plan="adaptiv")
