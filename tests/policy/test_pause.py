"""Drafters that pause: not called while nothing is drafted, and up to date when they are asked again."""

import warnings

import numpy as np
import pytest

from polydraft import SamplingParams
from polydraft.core import Budget, Draft, Needs, Request
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine.loop import Loop
from polydraft.engine.speculation import Menu, Speculation
from polydraft.methods.registry import verifier
from polydraft.papers.lookahead.drafter import LookaheadDrafter
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.papers.phrases.drafter import PhraseDrafter
from polydraft.policy.fixed import Policy
from tests.drafters.sessions import proposed
from tests.engine.tables import TableModel, plain_greedy
from tests.policy.planning import LOGITS, costs, made, outcome, sequences


class Script(Policy):
    """Depths by round; the last one is kept."""

    def __init__(self, *depths):
        self.depths = list(depths)

    def budgets(self, sequences):
        depth = self.depths.pop(0) if len(self.depths) > 1 else self.depths[0]
        return [Budget.grown(depth, depth)] * len(sequences)


class Spy:
    """A drafter that notes what it is told."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.info = drafter.info
        self.needs = drafter.needs
        self.calls = []
        self.told = []
        self.asked = []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def start(self, requests):
        self.calls.append(("start", *(len(r.prompt_token_ids) for r in requests)))
        return self.drafter.start(requests)

    def propose(self, states, budgets):
        self.calls.append("propose")
        self.asked.append(self.drafter.propose(states, budgets))
        return self.asked[-1]

    def observe(self, states, outcome, scores):
        self.calls.append("observe")
        self.told.append(outcome.emitted(scores.tree))
        return self.drafter.observe(states, outcome, scores)

    def release(self, states):
        self.drafter.release(states)


MAKERS = {
    "model": lambda: ModelDrafter(TableModel(seed=1, max_num_seqs=8)),
    "ngram": NgramDrafter,
    "lookahead": LookaheadDrafter,
    "phrases": lambda: PhraseDrafter(TableModel(seed=1, max_num_seqs=8)),
    "mixture": lambda: MixtureDrafter(
        {
            "model": ModelDrafter(TableModel(seed=1, max_num_seqs=8), "top_k"),
            "ngram": NgramDrafter(),
            "phrases": PhraseDrafter(TableModel(seed=2, max_num_seqs=8)),
        }
    ),
}


def run(spy, *depths, prompts=((1, 2, 3, 1, 2),), max_tokens=24, temperature=1.0):
    target = TableModel()
    rule = verifier("traversal" if spy.info.name == "model" else "match")
    loop = Loop(target, Menu(target, Speculation(spy, rule, Script(*depths))))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    for i, prompt in enumerate(prompts):
        loop.add_request(Request(str(i), tuple(prompt), params, 5 + i))
    done = {}
    while loop.has_unfinished_requests:
        for output in loop.step():
            done[output.request_id] = output.sample
    return [done[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_drafter_that_pauses_is_not_called(kind):
    spy = Spy(MAKERS[kind]())
    run(spy, 2, *[0] * 8, 2)
    after = spy.calls.index("observe") + 1
    assert spy.calls[:after] == [("start", 5), "propose", "observe"]
    assert spy.calls[after : after + 2] == ["observe", "propose"] and len(spy.told[1][0]) == 8


def test_a_drafter_that_comes_back_is_told_of_all_it_missed_however_much():
    spy = Spy(MAKERS["ngram"]())
    run(spy, 2, *[0] * 24, 2, max_tokens=40)
    assert len(spy.told[1][0]) == 24


@pytest.mark.parametrize("kind", MAKERS)
def test_a_drafter_begins_with_its_first_draft_and_has_then_read_all(kind):
    spy = Spy(MAKERS[kind]())
    run(spy, 0, 0, 0, 2)
    assert spy.calls[:2] == [("start", 8), "propose"]
    never = Spy(MAKERS[kind]())
    run(never, 0)
    assert never.calls == []


@pytest.mark.parametrize("kind", MAKERS)
def test_a_drafter_that_comes_back_has_read_every_token_once(kind):
    spy = Spy(MAKERS[kind]())
    prompts = ((1, 2, 3, 1, 2), (4, 5))
    samples = run(spy, 1, 0, 0, 0, 3, 0, 0, 2, 2, 0, 0, 0, 0, 0, 3, prompts=prompts, max_tokens=40)
    for b, sample in enumerate(samples):
        told = [t for emitted in spy.told if len(emitted) == 2 for t in emitted[b]]
        assert len(told) > 20 and told[:20] == sample.token_ids[:20]


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_what_it_then_drafts_is_what_a_fresh_reader_of_the_text_drafts(kind):
    spy = Spy(MAKERS[kind]())
    (sample,) = run(spy, 2, 0, 0, 0, 0, 3)
    draft = spy.asked[1]
    so_far = (1, 2, 3, 1, 2, *(t for e in spy.told[:2] for t in e[0]))
    fresh = MAKERS[kind]()
    again = proposed(fresh, fresh.start([Request("0", so_far, SamplingParams(), 5)]), [Budget.grown(3, 3)])
    assert so_far[5:] == tuple(sample.token_ids[: len(so_far) - 5])
    assert np.array_equal(again.tree.tokens, draft.tree.tokens) and np.array_equal(
        again.tree.parents, draft.tree.parents
    )


def test_one_that_needs_every_step_is_told_of_each():
    spy = Spy(NgramDrafter())
    spy.needs = Needs(every_step=True)
    run(spy, 2, *[0] * 8, 2)
    assert [len(e[0]) for e in spy.told[1:9]] == [1] * 8


def nodes_of(drafter, *depths):
    """Nodes below the root in each pass of the target."""
    rows = []
    score = TableModel.score

    class Counting(TableModel):
        def score(self, slots, tree, **options):
            rows.append(tree.num_nodes - 1)
            return score(self, slots, tree, **options)

    target = Counting()
    loop = Loop(target, Menu(target, Speculation(drafter, verifier("match"), Script(*depths))))
    loop.add_request(Request("0", (1, 2, 3, 1, 2), SamplingParams(max_tokens=20), 5))
    while loop.has_unfinished_requests:
        loop.step()
    return rows


def test_a_round_without_drafts_carries_no_further_nodes():
    nodes = nodes_of(LookaheadDrafter(columns=2, ngram=3), 2, 2, 0, 0, 0, 0, 2, 0)
    assert min(nodes[0], nodes[1], nodes[6]) >= 4
    assert {*nodes[2:6], *nodes[7:]} == {0}


def asked_in_vain(rounds, start):
    """Steps of a policy that asks for a draft where there never is one."""
    policy = made(costs(start=start))
    texts = sequences()
    empty = Draft.bare(np.array([1]))
    asked = []
    for _ in range(rounds):
        asked.append(policy.budgets(texts)[0].max_depth > 0)
        policy.learn(texts, empty, lambda: LOGITS, outcome(0))
    return asked


def test_a_drafter_that_has_nothing_to_draft_is_left_alone():
    asked = asked_in_vain(600, 0.3)
    assert asked[0] and sum(asked) < 80 and sum(asked[-200:]) <= 4


def test_a_paused_text_drafter_is_asked_at_once_where_twice_as_much_repeats_as_ever_before():
    asked = {}
    for drafter in (NgramDrafter(), ModelDrafter(TableModel())):
        policy = made(costs(start=0.3))
        (s,) = sequences(length=1)
        policy.prepare(TableModel(), drafter, verifier("match"))
        s.token_ids = list(range(100, 160))
        empty = Draft.bare(np.array([1]))
        steps = []
        for step in range(300):
            steps += [step] if policy.budgets([s])[0].max_depth else []
            policy.learn([s], empty, lambda: LOGITS, outcome(0))
            s.token_ids.append(
                100 + step - 200 if step >= 200 else 1000 + step
            )  # from step 200 on a copy of the beginning
        asked[drafter.info.name] = [step for step in steps if 200 <= step < 240]
    assert 208 in asked["ngram"] and {216, 232} <= {*asked["ngram"]} and 208 not in asked["model"]


def test_pauses_change_no_greedy_token_and_credit_no_stale_source():
    spy = MAKERS["mixture"]()
    (sample,) = run(spy, 3, 3, 0, 0, 3, 0, 0, 0, 3, temperature=0.0)
    assert sample.token_ids == plain_greedy(TableModel(), (1, 2, 3, 1, 2), 24)
    assert (
        len(sample.origins) == 24 and sum(o.source == "target" for o in sample.origins) == sample.stats.steps
    )


@pytest.mark.parametrize("failures", [1, 2])
def test_a_drafter_that_fails_while_catching_up_begins_anew_and_is_switched_off_where_it_fails_again(
    failures,
):
    class Broken(NgramDrafter):
        left = failures

        def observe(self, states, outcome, scores):
            if self.left and (scores.tree.num_nodes > 3 or self.left < failures):
                self.left -= 1
                raise RuntimeError("no room")
            return super().observe(states, outcome, scores)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (sample,) = run(Broken(), 1, *[0] * 6, *[2] * 6, temperature=0.0)
    assert sample.token_ids == plain_greedy(TableModel(), (1, 2, 3, 1, 2), 24)
    is_off = failures == 2
    assert (
        bool(sample.stats.drafter_error)
        == any("no room" in str(warning.message) for warning in told)
        == is_off
    )
