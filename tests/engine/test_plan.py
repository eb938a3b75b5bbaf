"""The planner: costs are measured, acceptance is learnt, the choice is the best of all sizes, and the law is kept."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Draft, Outcome, SiblingLaw, TokenTree, TreeShape
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine import acceptance, profile
from polydraft.engine.acceptance import DEPTHS, Acceptance, expected_tokens
from polydraft.engine.calibrate import Bed, _levelled, _Place, calibrate
from polydraft.engine.costs import Observation, RoundCosts, budget_of, features
from polydraft.engine.plan import HELD, AdaptivePlan, FixedPlan
from polydraft.engine.profile import Profile
from polydraft.errors import DrafterWarning, IncompatibleError, InvalidInputError, UnknownNameError
from polydraft.registry import verifier
from polydraft.tree import paths
from tests.engine.planning import costs, made, outcome, sequences
from tests.engine.tables import TableModel, p_value, table_engine
from tests.laws.harness import Grown, Tables, by_depth, enumerate_drafts, measure

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
    fitted = RoundCosts.fit(synthetic())
    assert fitted.error < 1e-6
    assert fitted.seconds([(2, 6), (1, 0)], [50, 900]) == pytest.approx(
        1e-3 + 2e-4 * 14 + 1e-7 * (13 * 50 + 900) + 1e-4 + 18e-4 + 5e-4
    )


def test_one_disturbed_measurement_does_not_spoil_the_fit():
    fitted = RoundCosts.fit(synthetic(noise=0.02, outlier=4))
    truth = synthetic()[4]
    assert fitted.seconds([(truth.width, truth.depth)], [truth.context]) == pytest.approx(truth.seconds, rel=0.05)


def test_more_work_never_looks_cheaper_however_noisy_the_clock():
    for seed in range(5):
        flat = RoundCosts.fit(synthetic(noise=2.0, seed=seed)).flat
        assert (flat >= 0).all() and flat[:3].sum() > 0 and flat[10:].sum() > 0


def test_where_nothing_was_drafted_drafts_cost_what_plain_rounds_do():
    fitted = RoundCosts.fit([o for o in synthetic() if o.depth == 0])
    for contexts in ([100], [100] * 4, [1000]):
        plain, drafted = (fitted.seconds([(1, d)] * len(contexts), contexts) for d in (0, 3))
        assert drafted == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize(
    "rounds",
    [[], [Observation(1, 1, 4, 0, 1.0, 1.0, 1.0)], [Observation(1, 1, 0, 0, 0.0, -1.0, 0.0), Observation(1, 1, 0, 0, 0, 1, 0)]],
)
def test_a_fit_without_plain_rounds_or_with_negative_times_is_refused(rounds):
    with pytest.raises(InvalidInputError, match="without drafts"):
        RoundCosts.fit(rounds)


def options(max_depth, max_width):
    """Sizes as `budget_of` takes them."""
    shapes = product(range(1, max_width + 1), range(1, max_depth + 1), range(3))
    found = [(1, 0, 0, 0), *((w, d, t, 0) for w, d, t in shapes if t == 0 or (w > 1 and t < d))]
    return found + [(2, d, 0, s) for d, s in product(range(2, max_depth + 1), range(1, 4)) if s < d and max_width > 1]


def size_of(budget):
    return next(size for size in options(12, 4) if budget_of(size) == budget)


def brute_force(known, rates, batch, context, max_depth, max_width):
    """Best geometric mean of speeds over every joint choice of sizes."""
    speeds = []
    for chosen in product(options(max_depth, max_width), repeat=batch):
        tokens = math.prod(expected_tokens(np.array(rates[b]), *size) for b, size in enumerate(chosen))
        speeds.append((tokens ** (1 / batch) / float(known.flat @ features(chosen, context)), chosen))
    return max(speeds)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    "seconds",
    [{"rows": 0.1, "depths": 0.1}, {"rows": 0.01, "drafting_at_all": 0.5}, {"rows": 0.1, "rows_beyond_8": 0.5}, {"depths": 3.0}],
)
def test_the_choice_for_one_sequence_is_the_best_of_all_sizes(rate, seconds):
    known = costs(**seconds)
    speed, (size,) = brute_force(known, [[rate] * DEPTHS], 1, [20], 8, 4)
    found = made(known, max_depth=8, margin=0.0).best(rate, context=20)
    chosen = size_of(found)
    tokens = expected_tokens(np.full(DEPTHS, rate), *chosen)
    assert tokens / known.seconds([chosen], [20]) == pytest.approx(speed, rel=1e-9), size


@pytest.mark.parametrize("rates", [(0.9, 0.2), (0.5, 0.5), (0.95, 0.9), (0.1, 0.05)])
def test_the_choice_for_a_batch_is_within_a_percent_of_the_best_joint_choice(rates):
    known = costs(rows=0.08, depths=0.05, drafting_sequences=0.02)
    pair = sequences(2, length=1)
    for s, rate in zip(pair, rates, strict=True):
        s.acceptance.kept[:], s.acceptance.seen[:] = 1e9 * rate, 1e9
    found = [size_of(g) for g in made(known, max_depth=6, max_width=2, margin=0.0).budgets(pair)]
    tokens = math.prod(expected_tokens(np.full(DEPTHS, r), *size) for r, size in zip(rates, found, strict=True))
    best, _ = brute_force(known, [[r] * DEPTHS for r in rates], 2, [1, 1], 6, 2)
    assert tokens**0.5 / known.seconds(found, [1, 1]) >= 0.99 * best


def test_a_batch_drafts_where_its_rounds_become_far_longer_and_give_more_than_that():
    known, batch = costs(rows=0.5, depths=0.15), sequences(4, length=1)
    for s in batch:
        s.acceptance.kept[:], s.acceptance.seen[:] = 1e9 * 0.9, 1e9
    (size,) = {(g.width, g.max_depth) for g in made(known, max_width=1, margin=0.0).budgets(batch)}
    longer = known.seconds([size] * 4, [1] * 4) / known.seconds([(1, 0)] * 4, [1] * 4)
    assert longer > 2 and expected_tokens(np.full(DEPTHS, 0.9), *size) > 1.1 * longer


def test_dear_drafts_are_not_made_and_cheap_ones_are_deep():
    assert made(costs(depths=5.0)).best(0.8).max_depth == 0
    assert made(costs(depths=0.2)).best(0.8).max_depth < made(costs(depths=0.02)).best(0.8).max_depth
    assert made(costs(rows=0.02)).best(0.6).width > made(costs(rows=0.2)).best(0.6).width


def test_paths_part_where_drafts_begin_to_fail():
    rates = (0.98, 0.98, *[0.4] * (DEPTHS - 2))
    known = costs(rows=0.03, depths=0.05)
    (found,) = made(known, rates=rates).budgets(sequences())
    assert size_of(found)[2] == 2 and found.width > 1
    assert made(known, rates=rates, max_trunk=0).budgets(sequences())[0].shape is not TreeShape.PRODUCT
    assert made(known, rates=(0.4,) * DEPTHS).budgets(sequences())[0].shape is not TreeShape.PRODUCT


def test_greedy_requests_get_one_path():
    plan = made(costs(rows=0.01), rates=0.5)
    assert plan.budgets(sequences())[0].width > 1
    assert plan.budgets(sequences(temperature=0))[0].width == 1


def round_of(p, q, tokens):
    """A chain for one sequence, with target rows p and draft rows q."""
    tree = TokenTree.chain(torch.tensor([tokens]))
    rows = torch.arange(-1, len(tokens) - 1)[None]
    return Draft(tree, SiblingLaw.IID, TreeShape.CHAIN, torch.tensor(q)[None], rows), torch.tensor(p).log()[None]


def test_overlaps_are_weighted_by_the_chance_to_get_there():
    p = [[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]
    q = [[0.9, 0.1], [0.2, 0.8]]
    draft, logits = round_of(p, q, [0, 0, 1])
    record = Acceptance()
    acceptance.look([record], draft, logits, [False], np.full((2, DEPTHS), 0.5), outcome(0), rows=[0])
    w = 0.5 / 0.9
    assert record.kept[:2] == pytest.approx([0.6, min(0.2, 0.9 * w) + min(0.8, 0.1 * w)], rel=1e-5)
    assert record.seen[:3] == pytest.approx([1.0, w, 0.0], rel=1e-5)
    assert record.predicted == pytest.approx(0.5 + 0.25)


def test_what_a_trunk_then_paths_should_keep_is_predicted_as_such():
    tree = TokenTree(torch.tensor([[0, 1, 0, 1, 1, 0]]), torch.tensor([[-1, 0, 1, 1, 2, 3]]))
    rows = torch.tensor([[-1, 0, 1, 1, 2, 3]])
    draft = Draft(tree, SiblingLaw.IID, TreeShape.PATHS, torch.full((1, 4, 2), 0.5), rows)
    record = Acceptance()
    assert acceptance.count([record], draft, outcome(0)) == [0]
    acceptance.look([record], draft, torch.zeros(1, 6, 2), [False], np.full((2, DEPTHS), 0.5), outcome(0), rows=[0])
    assert record.predicted == pytest.approx(expected_tokens(np.full(DEPTHS, 0.5), 2, 3, 1) - 1)
    assert record.predicted > expected_tokens(np.full(DEPTHS, 0.5), 1, 3) - 1
    assert record.kept[:3] == pytest.approx([1.0, 1.0, 1.0])


def test_a_point_mass_overlaps_with_its_probability_and_greedy_with_all_or_nothing():
    tree = TokenTree(torch.tensor([[0, 1, 2, 1]]), torch.tensor([[-1, 0, 0, 0]]))
    draft = Draft(tree, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full((1, 4), -1))
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log().expand(1, 4, 3)
    for greedy, wanted in ((False, 0.8), (True, 1.0)):
        record = Acceptance()
        acceptance.look([record], draft, logits, [greedy], np.full((2, DEPTHS), 0.5), outcome(0), rows=[0])
        assert record.kept[0] == pytest.approx(wanted)


@pytest.mark.parametrize(("kept", "seen"), [([], [1]), ([1], [1, 1]), ([1, 1, 1], [1, 1, 1])])
def test_a_chain_is_counted_down_to_where_it_ends(kept, seen):
    draft, _ = round_of([[0.5, 0.5]] * 4, [[0.5, 0.5]] * 3, [0] * 4)
    record = Acceptance()
    for _ in range(2):
        assert acceptance.count([record], draft, outcome(len(kept))) == []
    share = 1 + acceptance.DECAY
    assert record.seen.tolist() == pytest.approx([share * x for x in seen] + [0.0] * (DEPTHS - len(seen)))
    assert record.kept.tolist() == pytest.approx([share * x for x in kept] + [0.0] * (DEPTHS - len(kept)))


def test_a_tree_without_a_law_is_counted_along_the_path_that_was_kept():
    tree = TokenTree(torch.tensor([[0, 1, 2, 1, 2]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    draft = Draft(tree, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full((1, 5), -1))
    for path, seen in (([2], [1.0, 0.0]), ([1], [1.0, 1.0]), ([], [1.0, 0.0])):
        record, one = Acceptance(), Outcome(torch.tensor([path], dtype=torch.int64), torch.tensor([len(path)]), torch.tensor([0]))
        assert acceptance.count([record], draft, one) == []
        assert record.seen[:2].tolist() == seen and record.kept[0] == len(path)


def test_expected_tokens_of_a_chain_are_the_geometric_sum():
    assert expected_tokens(np.full(DEPTHS, 0.8), 1, 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens(np.full(DEPTHS, 0.0), 3, 5) == 1.0
    assert expected_tokens(np.full(DEPTHS, 0.8), 3, 5, 5) == expected_tokens(np.full(DEPTHS, 0.8), 1, 5)
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
            p, q = [[rate, 1 - rate]] * (g.max_depth + 1), [[1.0, 0.0]] * g.max_depth
            draft, logits = round_of(p, q, [0] * (g.max_depth + 1))
            plan.learn([s], draft, logits, outcome(min(g.max_depth, round(rate / (1 - rate)))))
    return given


def test_drafting_stops_where_it_does_not_pay_with_longer_and_longer_pauses():
    plan = made(costs(rows=0.1, depths=0.1), max_width=1)
    (s,) = sequences()
    given = drive(plan, s, 0.02, 600)
    drafted = [i for i, g in enumerate(given) if g.max_depth]
    assert drafted[:2] == [0, 1] and len(drafted) < 20
    pauses = np.diff(drafted[-4:])
    assert (np.diff(pauses) > 0).all() and pauses[-1] > 200
    assert all(given[i] == Budget.fixed(paths(1, 1)) for i in drafted[-4:])


def test_drafting_comes_back_when_drafts_fit_again():
    plan = made(costs(rows=0.1, depths=0.05), max_width=1)
    (s,) = sequences()
    assert drive(plan, s, 0.02, 60)[-1].max_depth == 0
    deep = [g.max_depth for g in drive(plan, s, 0.9, 150)]
    assert deep[-1] >= 3 and sum(d > 1 for d in deep) > 40


def test_a_rule_that_keeps_less_than_the_overlap_is_believed():
    plan = made(costs(rows=0.1, depths=0.1), rates=0.8, max_width=1)
    (s,) = sequences()
    first = plan.budgets([s])[0]
    p, q = [[0.8, 0.2]] * 5, [[1.0, 0.0]] * 4
    draft, logits = round_of(p, q, [0] * 5)
    for _ in range(8):
        plan.learn([s], draft, logits, outcome(0))
    assert [plan.budgets([s]) for _ in range(HELD)][-1][0].max_depth < first.max_depth


def adaptive(known, kind="paths", rates=0.7, **options):
    made_engine = table_engine(kind, **options)
    made_engine.plan = made(known, rates=rates, max_depth=5)
    return made_engine


@pytest.mark.parametrize("seconds", [{"rows": 0.02, "depths": 0.05}, {"rows": 0.25, "depths": 0.2}])
def test_the_law_of_several_rounds_is_kept(seconds):
    assert p_value(adaptive(costs(**seconds), rates=0.4, seqs=8, V=3), [1, 2], 2, 400) > 1e-3


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
    texts = [adaptive(costs(rows=0.1, depths=0.1)).generate([[1, 2]], SamplingParams(seed=3, max_tokens=30))[0] for _ in range(2)]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_never_fit_cost_three_percent_at_most(seed):
    target, small = (TableModel(V=40, sharp=6.0, seed=s, max_model_len=400) for s in (seed, seed + 5))
    fast = Engine.of(target, draft_model=small, plan=made(costs(rows=0.1, depths=0.1)))
    stats = fast.generate([[1, 2]], SamplingParams(seed=0, max_tokens=300))[0].stats
    assert stats.target_calls > 250
    assert 300 * 1.1 / (stats.target_calls * 1.1 + stats.drafted * 0.2) > 0.97


def test_measuring_leaves_the_models_free_and_finds_costs_and_acceptance():
    fast = table_engine()
    known = calibrate(fast.target, fast.drafter, fast.verifier, [1, 2, 3], budget_seconds=0.1)
    assert known.costs.seconds([(1, 0)], [10]) > 0 and known.costs.observations
    assert 0.3 < known.acceptance[0] < 1
    assert fast.target.texts == [[]] * 4
    assert fast.drafter.slots.num_free == 4


def test_a_machine_that_is_slower_for_a_while_is_slower_for_all_sizes():
    """A size that had something to draft only in slow moments: plain means would call it far dearer."""
    place, speeds = _Place(Bed, 1, {(1, 0): [], (1, 4): []}), [1.0, 1.0, 1.0, 2.0, 2.0]
    for repetition, factor in enumerate(speeds):
        place.taken[1, 0] += [(repetition, (0.0, factor, 0.0), 10)] * 3
        if repetition >= 2:
            place.taken[1, 4] += [(repetition, (factor, factor, factor), 10)] * 3
    plain, drafted = _levelled([place])
    assert drafted.seconds / plain.seconds == pytest.approx(3.0, rel=0.01)
    raw = [np.median([sum(seconds) for _, seconds, _ in found]) for found in place.taken.values()]
    assert raw[1] / raw[0] == 6.0


def test_budgets_hold_for_some_rounds_or_until_a_sequence_leaves_or_stops_drafting():
    planned, (first, second) = made(costs(rows=0.05, depths=0.05)), sequences(2)
    before = planned.budgets([first, second])
    assert [g.max_depth for g in before] == [before[0].max_depth] * 2
    first.acceptance.seen[:], first.acceptance.folded = 50.0, 1  # all of 50 drafts failed
    assert [planned.budgets([first, second]) == before for _ in range(HELD)] == [True] * (HELD - 1) + [False]
    assert planned.budgets([first, second])[0].max_depth < before[0].max_depth
    assert planned.budgets([second])[0].max_depth >= before[1].max_depth
    second.drafting = False
    assert planned.budgets([second])[0].max_depth == 0


def test_measuring_fits_into_a_small_context():
    target = TableModel(max_model_len=12)
    drafts = NgramDrafter()
    known = calibrate(target, drafts, verifier("match"), [1, 2, 1, 2, 1], budget_seconds=0.02)
    assert known.max_width == 1
    assert target.texts == [[]] * 4


def test_a_drafter_that_fails_is_not_measured(monkeypatch):
    made = table_engine("chain", num_paths=1)
    monkeypatch.setattr(made.drafter, "propose", lambda *_: 1 / 0)
    with pytest.warns(DrafterWarning), pytest.raises(IncompatibleError, match="ZeroDivisionError"):
        calibrate(made.target, made.drafter, made.verifier, [1, 2, 3], budget_seconds=0.1)


@pytest.mark.parametrize("greedy", [(), (0.95,) * DEPTHS])
def test_a_profile_comes_back_from_its_file(tmp_path, greedy):
    known = Profile(RoundCosts.fit(synthetic()), tuple(np.linspace(0.9, 0.5, DEPTHS).tolist()), 2, {"x": 1}, greedy)
    known.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == known
    with pytest.raises(InvalidInputError, match="there is no folder"):
        known.save(tmp_path / "deep" / "p.json")


def test_a_greedy_text_starts_from_its_own_acceptance():
    profile = Profile(RoundCosts.assumed(), (0.3,) * DEPTHS, 1, greedy=(0.95,) * DEPTHS)
    texts = [sequences(temperature=t)[0] for t in (1.0, 0.0)]
    sampled, greedy = (AdaptivePlan(profile).budgets([s])[0].max_depth for s in texts)
    assert sampled < greedy
    both = [b.max_depth for b in AdaptivePlan(profile).budgets(texts)]
    assert both[0] < both[1]
    with pytest.raises(InvalidInputError, match="greedy"):
        Profile(RoundCosts.assumed(), (0.3,) * DEPTHS, 1, greedy=(0.9,))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"polydraft_profile": 1, "costs": {}}', '{"polydraft_profile": 2}'])
def test_what_is_no_profile_is_refused_with_advice(tmp_path, text):
    (tmp_path / "p.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match="polydraft tune"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_a_measured_profile_is_remembered_and_a_broken_cache_is_done_without(tmp_path, monkeypatch):
    pair, measured = {"pair": 1}, Profile.assumed(2)
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
    assert Engine.of(target, draft_model=small, plan="fixed").plan == FixedPlan(Budget.fixed(paths(1, 5)))
    assert Engine.of(target, draft_model=small, depth=4, num_paths=2).plan.budget == Budget.fixed(paths(2, 4))
    Profile.assumed().save(tmp_path / "p.json")
    assert Engine.of(target, draft_model=small, profile=str(tmp_path / "p.json")).plan.profile == Profile.assumed()
    with pytest.raises(InvalidInputError, match="leaves nothing to plan"):
        Engine.of(target, draft_model=small, depth=3, plan="adaptive")
    with pytest.raises(UnknownNameError, match="did you mean 'adaptive'"):
        Engine.of(target, draft_model=small, plan="adaptiv")
