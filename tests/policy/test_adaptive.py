"""The marginal rule: no fixed length is better, what does not pay pauses, and outputs keep their distribution."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportArgumentType=false

from dataclasses import replace

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, Draft, DraftSampling, TokenTree, TreeShape
from polydraft.core.budget import Stop
from polydraft.core.confidence import BINS, IDENTITY
from polydraft.core.geometry import chain, paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.loop import rehearsed
from polydraft.engine.speculation import PLAIN, Speculation
from polydraft.errors import IncompatibleError, InvalidInputError, UnknownNameError
from polydraft.methods.registry import verifier
from polydraft.policy import adaptive as adaptive_policy
from polydraft.policy.acceptance import FIRST, NEXT, SPARE, UNKNOWN, UNKNOWN_SAMPLED, Acceptance
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import Costs
from polydraft.policy.course import FIRST_PAUSE, LONGEST_PAUSE, LOOK, Event, Stage, min_pause
from polydraft.policy.marginal import Expected, depth_of, fastest_share, foreseen, gain, min_reaches, speed_of
from polydraft.policy.profile import Profile
from polydraft.policy.shape import Shaper, takes_spares
from polydraft.testing import Grown, Tables, enumerate_drafts, measure
from tests.engine.tables import TableModel, p_value, table_engine
from tests.exactness.harness import by_depth
from tests.policy.planning import LOGITS, OnlyWalks, costs, known, made, outcome, sequences


def fixed(prices, first, following, depth):
    tokens = 1.0 + first * sum(following**d for d in range(depth))
    return speed_of([Expected(tokens, depth, depth)], 1, prices)


@pytest.mark.parametrize(
    "prices", [costs(0.02, 0.05), costs(0.1, 0.1), costs(0.03, 0.3), costs(0.01, 0.01, 0.5)]
)
@pytest.mark.parametrize(("first", "following"), [(0.3, 0.5), (0.6, 0.6), (0.75, 0.9), (0.95, 0.95)])
def test_the_rule_converges_to_the_best_of_all_lengths_in_hindsight(prices, first, following):
    """The next speed follows from the length that the present one asks for; nothing at all is one of the lengths."""
    plain = speed_of([], 1, prices)
    speed = plain
    for _ in range(6):
        depth = depth_of(min_reaches(speed, following, 1, 1, prices), first, following)
        speed = max(plain, fixed(prices, first, following, depth))
    best = max(plain, *(fixed(prices, first, following, d) for d in range(1, 13)))
    assert speed >= 0.99 * best


def test_a_draft_pays_as_a_whole_exactly_where_it_is_faster_than_none():
    prices = costs(0.05, 0.1, start=0.4)
    for tokens in np.linspace(1.0, 4.0, 61):
        draft = Expected(float(tokens), 4, 4)
        plain = speed_of([], 1, prices)
        drafted = speed_of([draft], 1, prices)
        assert (gain(draft, max(plain, drafted), 1, 1, prices) > 0) == (
            drafted > plain
        ) or drafted == pytest.approx(plain)


def test_a_stop_by_confidence_beats_every_fixed_length():
    """Tokens are sure or not: the simulated rule against all chains, on the same draws."""
    prices = costs(0.03, 0.3)
    rng = np.random.default_rng(1)
    sure = rng.random((4000, 12)) < 0.6
    rate = np.where(sure, 0.97, 0.4)
    accepted = rng.random(rate.shape) < rate
    kept = accepted.cumprod(1)
    lengths = {d: (1 + kept[:, :d].sum(1)).mean() / prices.step(1 + d, d) for d in range(1, 13)}
    speed = max(lengths.values())
    for _ in range(4):
        least = min_reaches(speed, 0.75, 1, 1, prices)
        depth = np.ones(len(rate), int)
        reach = rate[:, 0].copy()
        for d in range(1, len(least) + 1):
            going = (depth == d) & (reach >= least[d - 1])
            depth += going
            reach = np.where(going, reach * rate[:, min(d, 11)], reach)
        tokens = sum(1 + kept[i, : depth[i]].sum() for i in range(len(rate)))
        speed = tokens / sum(prices.step(1 + d, d) for d in depth)
    assert speed > 1.08 * max(lengths.values())


def test_confidences_are_calibrated_by_what_was_accepted():
    seen = Acceptance(UNKNOWN, Expected(2, 2, 2), 8.0, 0.999)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        confidence = float(rng.choice([0.6, 0.95]))
        accepted = rng.random() < (0.3 if confidence == 0.6 else 0.9)
        seen.observe([-1, 0], [1] if accepted else [], [1.0, confidence])
    rates = seen.rates
    assert rates[5] == pytest.approx(0.3, abs=0.05) and rates[7] == pytest.approx(0.9, abs=0.05)
    assert (
        rates[2] == pytest.approx(IDENTITY[2])
        and rates[FIRST] == pytest.approx(0.6, abs=0.05)
        and rates[NEXT] == UNKNOWN[NEXT]
    )
    assert seen.expected.tokens == pytest.approx(1.6, abs=0.06) and seen.expected.nodes == pytest.approx(
        1.0, abs=0.02
    )


def test_of_a_tree_the_children_of_accepted_nodes_are_counted_and_no_others():
    seen = Acceptance(UNKNOWN, Expected(2, 2, 2), 8.0, 1.0)
    nodes, depth = seen.observe([-1, 0, 0, 1, 2, -1], [2], [1.0, 0.9, 0.6, 0.9, 0.3, 1.0])
    assert (nodes, depth) == (4, 2)
    assert seen._tries.tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0]
    assert seen._hits.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_a_spare_sibling_counts_where_its_elder_was_rejected_and_never_as_a_token_of_its_own_confidence():
    parents = [-1, 0, 1, 2, 1, 0]
    sure = [1.0, 0.9, 0.6, 0.9, 0.3, 0.3]  # a chain of three; 4 is a spare beside 2, 5 one beside 1
    lanes = {}
    for path in ([], [1], [1, 4], [5], [1, 2, 3]):
        seen = Acceptance(UNKNOWN, Expected(2, 2, 2), 8.0, 1.0)
        assert seen.observe(parents, path, sure, in_turn=True) == (5, 3)
        lanes[tuple(path)] = (
            seen._tries[SPARE],
            seen._hits[SPARE],
            seen._tries[:BINS].sum(),
            seen._hits[:BINS].sum(),
        )
    assert lanes == {
        (): (1, 0, 1, 0),
        (1,): (1, 0, 2, 1),
        (1, 4): (1, 1, 2, 1),
        (5,): (1, 1, 1, 0),
        (1, 2, 3): (0, 0, 3, 3),
    }


def test_spare_siblings_are_for_verifiers_of_distinct_siblings_in_trees_that_grow():
    info = verifier("traversal").info
    assert takes_spares(info)
    assert not takes_spares(replace(info, shapes=info.shapes - {TreeShape.GROWN}))
    assert not takes_spares(
        replace(info, draft_sampling=info.draft_sampling - {DraftSampling.WITHOUT_REPLACEMENT})
    )


def test_spare_siblings_are_asked_for_by_the_price_of_their_rows():
    """Rows are cheap up to the sixth and dear behind it; none are asked for at temperature 0, with a seed, and of verifiers that are not exact for them."""
    prices = Costs.of({1: 1.0, 4: 1.03, 6: 1.3, 8: 1.7}, draft_start=0.0, draft_step=0.2)
    target, small = (TableModel(5, seed=seed) for seed in (0, 1))
    budgets = dict[str, Budget]()
    cases = (
        ("auto", "auto", 1.0, None),
        ("block", "block", 1.0, None),
        ("greedy", "auto", 0.0, None),
        ("seeded", "auto", 1.0, 3),
    )
    for name, rule, temperature, seed in cases:
        policy = made(prices, 0.6)
        engine = Engine.of(target, draft_model=small, verifier=rule, policy=policy)
        assert engine.verifier.info.name == ("block" if rule == "block" else "traversal")
        (s,) = sequences(temperature=temperature, seed=seed)
        (budgets[name],) = policy.budgets([s])
    speed = policy_speed(prices, 0.6)
    stop = budgets["auto"].stop
    assert (
        stop.min_spare_chance == pytest.approx([speed * prices.row(1 + k) for k in range(1, 5)])
        and stop.spare_acceptance == 0.6
    )
    assert speed * prices.row(6) > 0.4 * 0.6 > stop.min_spare_chance[-1]
    assert not any(budgets[name].has_spares for name in ("block", "greedy", "seeded"))


def policy_speed(prices, rate):
    """Tokens per second that a new sequence is weighed by."""
    return speed_of([foreseen(rate, rate, prices)], 1, prices)


def drafted(depth):
    """A chain for one sequence."""
    tree = TokenTree.chain(np.zeros((1, depth + 1), np.int64))
    return Draft(
        tree,
        DraftSampling.IID,
        TreeShape.CHAIN,
        np.full((1, depth, 2), 0.5),
        np.arange(-1, depth)[None],
    )


def drive(policy, s, accepts, rounds):
    """Steps whose drafts are accepted so far; the budgets."""
    given = []
    for _ in range(rounds):
        (g,) = policy.budgets([s])
        given.append(g)
        if g.max_depth:
            policy.learn([s], drafted(g.max_depth), lambda: LOGITS, outcome(min(g.max_depth, accepts)))
    return given


def test_drafting_stops_where_it_does_not_pay_with_longer_and_longer_pauses():
    (s,) = sequences()
    prices = costs(0.1, 0.3)
    given = drive(made(prices), s, 0, 1200)
    first = max(FIRST_PAUSE, min_pause(1, prices))
    steps = [i for i, g in enumerate(given) if g.max_depth]
    gaps = [int(x) for x in np.diff(steps) if x > 1]
    assert gaps[:3] == [first + 1, 2 * first + 1, 4 * first + 1] and max(gaps) == LONGEST_PAUSE + 1
    assert len(steps) < 60


def test_pauses_double_until_drafts_pay_and_looks_follow_each():
    policy = made()
    (s,) = sequences()
    course = policy.course(s)
    lengths = []
    for _ in range(3):
        course.meet(Event.FAILS)
        lengths.append(1 + sum(course.rest() for _ in range(course.pause)))
        assert course.stage is Stage.LOOKING and course.looks == LOOK
    course.meet(Event.HOPES)
    assert lengths == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE] and course.looks == LOOK - 1
    course.meet(Event.PAYS)
    course.meet(Event.FAILS)
    assert course.pause == FIRST_PAUSE and s.course is course


def test_a_batch_whose_rows_cost_a_pass_each_is_hardly_drafted_for():
    """All look at once: a look of 16 sequences costs a pass of 16 rows, so that they look at most twice in 256 steps."""
    batch = sequences(16)
    prices = Costs.of({1: 1.0, 4: 1.1, 8: 2.0}, draft_start=0.0, draft_step=0.1)
    policy = made(prices)
    drafted_steps = 0
    for _ in range(256):
        budgets = policy.budgets(batch)
        drafted_steps += any(budget.max_depth for budget in budgets)
        for s, budget in zip(batch, budgets, strict=True):
            if budget.max_depth:
                policy.learn([s], drafted(budget.max_depth), lambda: LOGITS, outcome(0))
    assert drafted_steps <= 4


def test_a_match_that_doubles_wakes_no_draft_where_not_even_a_certain_token_pays():
    (s,) = sequences()
    full = sequences(64)
    for batch, wakes in ((full, False), ([s], True)):
        policy = made(Costs.of({1: 1.0, 4: 1.4, 8: 2.0}, draft_start=0.0, draft_step=0.0), rate=0.01)
        policy._copies = True
        for sequence in batch:
            sequence.token_ids = list(range(100, 164))
        budgets = [
            max(budget.max_depth for budget in policy.budgets(batch)) for _ in range(2)
        ]  # the second step is paused
        assert budgets == [0, 0]
        for sequence in batch:
            sequence.token_ids += range(100, 116)
        assert any(budget.max_depth for budget in policy.budgets(batch)) == wakes


def test_a_new_request_opens_with_drafts_alone_or_where_they_pay():
    (s,) = sequences()
    (seeded,) = sequences(seed=1)
    (greedy,) = sequences(seed=1, temperature=0.0)
    dear = made(Costs.of({1: 1.0, 4: 3.0, 8: 7.0}, draft_start=0.0, draft_step=0.1))
    cheap = made(costs(0.02, 0.02))
    assert dear.opens(s, 1) and not dear.opens(s, 8) and cheap.opens(s, 8)
    assert dear.opens(seeded, 8)  # its text does not depend on what runs beside it
    assert not dear.opens(greedy, 8)  # nor does this one on its drafts, which follow the live costs


def test_a_text_that_takes_longer_to_read_than_drafts_save_on_its_answer_is_not_drafted_for():
    policy = made(costs(0.02, 0.1))
    (short,), (whole,), (long,) = (
        sequences(length=n, max_tokens=m) for n, m in ((10, 20), (400, 300), (400, 8))
    )
    assert policy.opens(short, 1) and policy.opens(whole, 1) and not policy.opens(long, 1)
    short.token_ids = [1] * 28  # two tokens are left of its answer
    assert policy.opens(short, 1) and not policy.opens(short, 1, again=True)
    policy._reads = True
    policy._num_unread = lambda ids: len(ids)
    assert not policy.budgets([long])[0].max_depth and policy.budgets([whole])[0].max_depth
    policy._num_unread = lambda ids: 0
    assert policy.opens(long, 1)  # as its draft model has read the text before


def test_drafting_comes_back_when_drafts_fit_again():
    (s,) = sequences()
    policy = made(costs(0.05, 0.1))
    drive(policy, s, 0, 100)
    depths = [g.max_depth for g in drive(policy, s, 5, 200)]
    assert sum(d > 1 for d in depths[-40:]) > 35


@pytest.mark.parametrize(("sixteen", "grows"), [(1.5, True), (3.3, False)])
def test_a_greedy_request_is_drafted_a_tree_where_sixteen_rows_are_cheap(sixteen, grows):
    """Not where the first rows alone are: a tree has more of them. A chain is drafted above temperature 0 whatever rows cost."""
    engine = Engine.embedded(max_num_seqs=1)
    policy = made(Costs.of({1: 1.0, 4: 1.0, 8: 1.05, 16: sixteen}, draft_start=0.0, draft_step=0.1), rate=0.8)
    policy.prepare(engine.target, engine.drafter, engine.verifier)
    (greedy,), (sampled,) = (policy.budgets(sequences(temperature=t)) for t in (0.0, 1.0))
    assert (not greedy.parents) is grows and sampled.parents and greedy.max_depth > 1


@pytest.mark.parametrize("shape", ["chain", "tree", "chain with spares"])
def test_a_draft_is_cut_to_the_time_of_a_step(shape):
    prices = Costs.of({1: 1.0, 4: 1.1, 8: 1.2}, draft_start=0.1, draft_step=0.05)
    for max_step, fits in ((1.0, False), (1.5, True), (9.0, True)):
        policy = AdaptivePolicy(known(prices, 0.9), max_step=max_step)
        policy.shaper = Shaper(ranked=shape == "tree", spares=shape == "chain with spares")
        (budget,) = policy.budgets(sequences())
        rows = len(budget.stop.min_spare_chance) + 2 if budget.has_spares else 1 + budget.max_nodes
        assert (budget.max_depth > 0) is fits and prices.step(rows, budget.max_depth) <= max_step
        if shape == "chain" and fits:
            assert (prices.step(rows + 1, budget.max_depth + 1) > max_step) is (max_step < 9.0)


def test_a_step_shorter_than_a_forward_pass_is_refused_with_both_times():
    with pytest.raises(
        InvalidInputError,
        match=r"max_step_ms=0\.01 was given; expected at least [\d.]+, which one forward pass",
    ):
        Engine.embedded(max_num_seqs=1, max_step_ms=0.01)
    with pytest.raises(InvalidInputError, match="only the adaptive policy"):
        Engine.embedded(max_num_seqs=1, max_step_ms=50, depth=3)
    engine = Engine.embedded(max_num_seqs=1, max_step_ms=1e4)
    assert (
        engine.policy._max_step == 10.0
        and engine.num_free == 1
        and engine.generate("import", SamplingParams(max_tokens=3))
    )


def test_of_a_batch_the_drafts_that_survive_are_drawn_and_the_others_leave_them_the_rows():
    prices = Costs.of({1: 1.0, 4: 1.2, 5: 1.25, 6: 1.3, 7: 1.35, 8: 2.5}, draft_start=0.05, draft_step=0.05)
    policy = made(prices, rate=0.6)
    batch = sequences(4)
    for s, sure in zip(batch, (True, False, True, False), strict=True):
        for step in range(30):
            policy.course(s).acceptance.observe([-1, 0], [1] if sure or step % 2 else [], [1.0, 0.9])
    depths = [budget.max_depth for budget in policy.budgets(batch)]
    assert depths[0] and depths[2] and not depths[1] and not depths[3]


def test_rows_of_sequences_that_decode_plainly_make_those_of_drafts_dearer():
    """A request that began alone goes on in a batch whose others are not drafted for: its drafts are of a pass of many rows."""
    prices = Costs.of({1: 1.0, 4: 1.1, 8: 1.2, 9: 3.0}, draft_start=0.05, draft_step=0.05)
    batch = sequences(8)
    assert made(prices, 0.8).budgets(batch[:1])[0].max_depth > 1
    for s in batch:
        s.course = None
        s.drafting = s is batch[0]
    assert not any(budget.max_depth for budget in made(prices, 0.8).budgets(batch))


def test_the_drafts_of_a_batch_are_ranked_once_a_step(monkeypatch):
    """Ranked anew for every sequence, 64 of them took longer than a forward pass of a small model."""
    counts = []
    monkeypatch.setattr(
        adaptive_policy, "fastest_share", lambda *a: counts.append(len(a[0])) or fastest_share(*a)
    )
    policy = made(costs(0.001, 0.01))
    budgets = policy.budgets(sequences(4))
    assert counts == [4] and all(budget.max_depth for budget in budgets)


def test_dear_drafts_are_short_and_cheap_ones_deep():
    depths = [made(costs(0.02, step)).budgets(sequences())[0].max_depth for step in (0.6, 0.2, 0.02)]
    assert depths == sorted(depths) and depths[0] < depths[2]
    assert made(costs(0.02, 5.0)).budgets(sequences())[0].max_depth == 0


def test_a_batch_shares_the_price_of_rows_and_of_draft_steps():
    flat = made(costs(0.0, 0.3))
    alone = flat.budgets(sequences())[0]
    together = made(costs(0.0, 0.3)).budgets(sequences(4))[0]
    assert (
        together.stop.min_reach[0] < 1.0 and together.max_depth <= alone.max_depth
    )  # four bring more tokens a second, of which each is worth less
    rows = [made(costs(0.3, 0.01)).budgets(sequences(n))[0].max_depth for n in (1, 8)]
    assert rows[1] <= rows[0]


def test_sequences_whose_drafter_is_off_get_nothing():
    pair = sequences(2)
    pair[1].drafting = False
    first, second = made().budgets(pair)
    assert first.max_depth > 0 == second.max_depth


def adaptive(prices, **options):
    fast = table_engine("paths", **options)
    fast.policy = made(prices)
    fast.policy.prepare(fast.target, fast.drafter, fast.verifier)
    return fast


@pytest.mark.parametrize(
    ("prices", "rule"),
    [(costs(0.02, 0.05), "auto"), (costs(0.25, 0.2), "auto"), (costs(0.02, 0.3), "traversal")],
)
def test_the_distribution_of_several_steps_is_kept_by_the_fused_walks(prices, rule):
    walked = adaptive(prices, seqs=8, V=3, dtype=np.float32, verifier=rule)
    walked.menu.default = replace(walked.menu.default, verifier=OnlyWalks(walked.verifier))
    asked = walked.policy.budgets
    stop = Stop((0.1,), min_spare_chance=(0.02,) * 6, spare_acceptance=0.5)
    if rule == "traversal":  # with spare siblings, which the policy leaves out where there is a seed
        walked.policy.budgets = lambda batch: [
            Budget.fixed(chain(3)).ending(stop) if g.max_depth else g for g in asked(batch)
        ]
    assert p_value(walked, [1, 2], 2, 400) > 1e-3


def peeked(drafts):
    """Wrong: a policy that looks at the draft it decides about, and does not use one that begins with token 0."""
    bare = [Grown(d.probability, [0], [-1], [()], [0]) for d in drafts]
    return [b if d.tokens[1] == 0 else d for b, d in zip(bare, drafts, strict=True)]


def test_a_policy_that_looks_at_the_draft_it_decides_about_is_caught():
    tables = Tables(3, seed=6)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(1, 1), 2)
    setting = (verifier("block"), tables, DraftSampling.IID, TreeShape.CHAIN, by_depth(1, 1), 2)
    assert measure(*setting, drafts).error < 1e-12
    assert measure(*setting, peeked(drafts)).tv > 0.01


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_never_fit_cost_four_percent_at_most(seed):
    target, small = (TableModel(V=40, sharp=6.0, seed=s, max_model_len=400) for s in (seed, seed + 5))
    fast = Engine.of(target, draft_model=small, policy=made(costs(0.1, 0.1)))
    stats = fast.generate([[1, 2]], SamplingParams(seed=0, max_tokens=300))[0].stats
    assert stats.steps > 250
    assert 300 / (stats.steps + stats.drafted_tokens * 0.2) > 0.96


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_repeats_its_text_alone_in_a_batch_and_after_a_busy_minute(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=7, ignore_eos=True)
    prompt = "def area(r):\n"
    others = ["import os\n", "class A:\n", "x = [1, 2", "for i in", "if a:", "return", "# a"]
    alone = Engine.embedded(max_num_seqs=8).generate(prompt, params)[0]
    busy = Engine.embedded(max_num_seqs=8)
    together = busy.generate([prompt, *others], [params] + [params.with_(seed=None)] * 7)[0]
    for _ in range(3):
        busy.generate(others, params.with_(seed=None))
    for _ in range(200):
        busy.policy.live.observe(1, 0, scoring=1.0, drafting=0.0, rest=1.0)  # a machine that has become slow
    later = busy.generate([prompt, *others], [params] + [params.with_(seed=None)] * 7)[0]
    assert alone.token_ids == together.token_ids == later.token_ids
    assert temperature == 0 or alone.stats.drafted_by_depth == later.stats.drafted_by_depth


@pytest.mark.parametrize(("seed_of_drafts", "drafts"), [(0, True), (5, False)])
def test_a_request_with_a_seed_begins_from_what_a_rehearsal_shows_of_its_pair(seed_of_drafts, drafts):
    """It learns from no other request: from assumed rates each paid anew for finding out that drafts of its pair do not pay."""
    target, small = (TableModel(V=40, sharp=6.0, seed=seed) for seed in (0, seed_of_drafts))
    shown = rehearsed(
        target, Speculation(ModelDrafter(small), verifier("block"), PLAIN.policy), [[1, 2], [3, 4]]
    )
    policies = [
        AdaptivePolicy(Profile.of(costs(0.1, 0.2), {}, rates)) for rates in (UNKNOWN_SAMPLED, shown.rates)
    ]
    assert [policy.budgets(sequences(seed=1))[0].max_depth > 0 for policy in policies] == [True, drafts]
    assert shown.drafting > 0 and shown.overhead > 0


def test_requests_without_a_seed_follow_the_live_costs():
    policy = made(costs(0.02, 0.05))
    assert policy.budgets(sequences())[0].max_depth > 0
    for _ in range(600):
        policy.live.observe(4, 3, scoring=1.0, drafting=30.0, rest=0.0)
    assert (
        policy.budgets(sequences())[0].max_depth
        == policy.budgets(sequences(seed=1, temperature=0.0))[0].max_depth
        == 0
    )
    assert policy.budgets(sequences(seed=1))[0].max_depth > 0


def test_plans_are_named_or_given_and_do_not_mix_with_a_fixed_size(tmp_path):
    target = TableModel()
    small = TableModel()
    assert isinstance(Engine.of(target, draft_model=small).policy, AdaptivePolicy)
    assert Engine.of(target, draft_model=small, policy="fixed").policy == FixedPolicy(Budget.fixed(chain(5)))
    assert Engine.of(target, draft_model=small, depth=4, num_paths=2).policy.budget == Budget.fixed(
        paths(2, 4)
    )
    known().save(tmp_path / "p.json")
    assert Engine.of(target, draft_model=small, profile=str(tmp_path / "p.json")).policy.profile == known()
    with pytest.raises(InvalidInputError, match="leaves nothing to decide"):
        Engine.of(target, draft_model=small, depth=3, policy="adaptive")
    with pytest.raises(UnknownNameError, match="did you mean 'adaptive'"):
        Engine.of(target, draft_model=small, policy="adaptiv")


def test_a_profile_of_other_models_is_refused(tmp_path):
    engine = Engine.embedded(max_num_seqs=1)
    engine.policy.profile.save(tmp_path / "p.json")
    assert (
        Engine.embedded(max_num_seqs=1, profile=str(tmp_path / "p.json")).policy.profile
        == engine.policy.profile
    )
    with pytest.raises(IncompatibleError, match=r"'ngram'.*polydraft tune"):
        Engine.embedded(max_num_seqs=1, drafter="ngram", profile=str(tmp_path / "p.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"polydraft_profile": 1, "costs": {}}',
        '{"polydraft_profile": 5}',
        '{"polydraft_profile": 6}',
        '{"polydraft_profile": 7}',
    ],
)
def test_what_is_no_profile_is_refused_with_advice(tmp_path, text):
    (tmp_path / "p.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match="polydraft tune"):
        Profile.load(tmp_path / "p.json")
