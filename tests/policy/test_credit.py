"""What drafts of a request may lose: paid by the clock, or with a seed by counts; and what is left for the next request."""

import pytest

from polydraft import Engine, SamplingParams
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.course import Stage
from polydraft.policy.credit import CREDIT, CREDIT_RATE, MOST_CREDIT
from tests.engine.tables import TableModel
from tests.heads import oracle
from tests.policy.planning import LOGITS, costs, made, outcome, sequences
from tests.policy.test_adaptive import drafted

PRICES = costs(0.1, 0.4)


def seconds(scoring, drafting=0.0, catching_up=0.0):
    return {"prefill": catching_up, "drafting": drafting, "scoring": scoring, "verifying": 0.0, "other": 0.0}


def run(policy, s, accepts, steps, *, dearer=1.0, catching_up=0.0):
    """Steps of a request, whose drafts cost so many times what was measured; the depth of each, and the plain steps that drafts lost."""
    depths = []
    lost = 0.0
    for _ in range(steps):
        depth = 0 if policy.rests([s]) else policy.budgets([s])[0].max_depth
        depths.append(depth)
        accepted = min(accepts, depth)
        took = seconds(1.0)
        if depth:
            prices = policy.profile.costs
            took = seconds(prices.rows(1 + depth), dearer * prices.drafting(depth), catching_up)
            policy.learn([s], drafted(depth), lambda: LOGITS, outcome(accepted))
            lost += sum(took.values()) - 1.0 - accepted
        policy.time(took)
        s.token_ids += [1] * (accepted + 1)
    return depths, lost


def stop(engine, s):
    """The credit of a sequence is spent."""
    policy = engine.policy
    assert isinstance(policy, AdaptivePolicy)
    policy._stop(s, s.course)


@pytest.mark.parametrize("seed", [None, 7])
def test_drafts_that_lose_stop_for_good_and_lose_no_more_than_their_credit(seed):
    policy = made(PRICES, 0.8)
    (s,) = sequences(seed=seed)
    depths, lost = run(policy, s, 0, 400)
    assert depths[0] > 0 and not any(depths[32:]) and s.course.stage is Stage.STOPPED and s.stopped
    assert CREDIT / 2 < lost <= CREDIT + 2 * CREDIT_RATE * 400


def test_what_one_request_lost_the_next_ones_do_not_lose_again():
    policy = made(PRICES, 0.8)
    losses = [run(policy, sequences()[0], 0, 96)[1] for _ in range(8)]
    assert (
        losses[0] > CREDIT / 2
        and max(losses) <= CREDIT + 1e-9 + CREDIT_RATE * 96
        and sum(losses[3:]) < 0.005 * 5 * 96
    )


def test_requests_with_a_seed_pay_by_counts_and_know_nothing_of_others():
    policy = made(PRICES, 0.8)
    (s,) = sequences(seed=3)
    slow, _ = run(policy, s, 0, 96, dearer=9.0)
    run(policy, sequences()[0], 0, 96)
    (s,) = sequences(seed=3)
    assert run(policy, s, 0, 96)[0] == slow


def test_the_clock_decides_where_costs_are_wrong_and_catching_up_is_paid_for():
    """One token is accepted of each draft, which would pay; but drafts take more than was measured."""
    for dearer, catching_up in ((1.0, 0.0), (3.0, 0.0), (1.0, 1.5)):
        policy = made(costs(0.05, 0.2), 0.5)
        (s,) = sequences()
        depths, lost = run(policy, s, 1, 300, dearer=dearer, catching_up=catching_up)
        pays = dearer == 1.0 and catching_up == 0.0
        assert lost < 0 and all(depths) if pays else 0 < lost < CREDIT + 3.0 and not any(depths[100:])


def test_drafts_that_pay_earn_what_a_text_that_changes_may_lose():
    policy = made(costs(0.02, 0.1), 0.8)
    (s,) = sequences()
    depths, _ = run(policy, s, 12, 20)
    assert all(depths) and s.course.credit.left == MOST_CREDIT
    depths, lost = run(policy, s, 0, 600)
    assert CREDIT < lost <= MOST_CREDIT + CREDIT_RATE * 600 + 0.1


def test_a_new_request_whose_credit_is_spent_reads_nothing_for_drafts():
    policy = made(PRICES, 0.8)
    policy._reads = True
    policy.credit.left[False] = -1.0
    (s,) = sequences()
    assert policy.opens(s, 1) and s.stopped and not policy.budgets([s])[0].max_depth


def test_of_a_request_that_has_stopped_no_states_are_made_and_its_text_goes_on(monkeypatch):
    kind = "eagle3-deepspec"
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    plain = Engine.of(oracle.target(kind, "compiled"), drafter=None)
    expected = plain.generate([[5, 6, 7]], params)[0].token_ids
    engine = Engine.of(
        oracle.target(kind, "compiled"), head=str(oracle.folder(kind)), policy=made(PRICES, 0.9)
    )
    asked = []
    score = engine.target.score
    monkeypatch.setattr(
        engine.target,
        "score",
        lambda *a, hidden=(), **k: asked.append(hidden) or score(*a, hidden=hidden, **k),
    )
    sample = engine.submit([5, 6, 7], params).samples[0]
    engine.step()
    (s,) = engine._roster.running
    stop(engine, s)
    while sample.finish_reason is None:
        engine.step()
    assert sample.token_ids == expected and sample.stats.drafter_error is None
    assert asked[0] and s.stopped and s.state is None and not any(asked[1:])


def test_beside_a_request_that_has_stopped_others_are_drafted_for():
    target, small = (TableModel(40, sharp=6.0, seed=0, max_model_len=200) for _ in range(2))
    engine = Engine.of(target, draft_model=small, policy=made(costs(0.02, 0.1), 0.9))
    params = SamplingParams(max_tokens=30, temperature=0)
    results = [engine.submit([1, 2], params), engine.submit([3, 4], params)]
    engine.step()
    first, second = engine._roster.running
    stop(engine, first)
    before = second.sample.stats.drafted_tokens
    while any(r.finish_reason is None for r in results):
        engine.step()
    assert first.stopped and not second.stopped and second.sample.stats.drafted_tokens > before
    assert first.sample.stats.drafter_error is second.sample.stats.drafter_error is None
