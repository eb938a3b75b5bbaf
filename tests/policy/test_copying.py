"""Long repeats of the text are verified in place of a draft model's drafts: chosen by committed tokens alone, exact, and the draft model catches up."""

from dataclasses import replace

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Request
from polydraft.core.geometry import chain
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine import drafting
from polydraft.engine.speculation import Menu, Speculation
from polydraft.methods.registry import verifier
from polydraft.policy import repeats
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import Costs
from polydraft.policy.course import Event
from polydraft.policy.repeats import LANES, PRIOR, Repeats
from tests.drafters.sessions import trained
from tests.engine.tables import TableModel, distribution, p_value, plain_greedy
from tests.exactness.runs import every_run
from tests.policy.planning import OnlyWalks, costs, sequences
from tests.policy.planning import known as profile

REPEATING = [0, 1, 1, 0, 0, 1, 1, 0]
PROMPTS = [[0, 1, 2, 0], [2, 2]]


def copying(rule="block", rate=0.3, **model):
    """An engine on tables, whose draft model is asked where the text does not repeat itself."""
    target = TableModel(**model)
    small = ModelDrafter(TableModel(seed=1, **model))
    policy = AdaptivePolicy(profile(costs(0.02, 0.1), rate), copying=True)
    engine = Engine(target, Menu(target, Speculation(small, verifier(rule), policy)))
    engine.policy.time = lambda seconds: None  # by the costs that are given, whatever the clock says
    return engine


def sources(samples):
    return {o.source for sample in samples for o in sample.origins}


def enumerated(monkeypatch, length=4):
    """The largest and the summed error of the distribution of so many tokens, and who drafted."""
    probs = np.zeros((2,) * length)
    used = set[str]()

    def run():
        return copying(V=2).generate([REPEATING], SamplingParams(max_tokens=length, seed=0))[0].samples[0]

    for probability, sample in every_run(run, monkeypatch):
        probs[tuple(sample.token_ids)] += probability
        used |= sources([sample])
    return np.abs(probs - distribution(TableModel(2), REPEATING, length)), used


def test_the_distribution_of_every_run_with_copies_is_exactly_the_tables(monkeypatch):
    error, used = enumerated(monkeypatch)
    assert error.max() < 1e-12
    assert used == {"ngram", "model", "target"}


def test_a_copy_in_place_of_a_draft_that_was_looked_at_is_not_exact(monkeypatch):
    right = drafting.propose

    def peeking(drafter, rule, sequences, budgets, *rest):
        """Wrong: copies where the draft model's first token is 0."""
        draft = right(drafter, rule, sequences, [Budget.fixed(chain(2))], *rest)
        if draft.tree.num_nodes > 1 and draft.tree.tokens[0, 1] == 0:
            return right(drafter, rule, sequences, [Budget.copying((1, 1))], *rest)
        return draft

    monkeypatch.setattr(drafting, "propose", peeking)
    error, used = enumerated(monkeypatch, length=3)
    assert error.sum() / 2 > 1e-2 and "ngram" in used


def test_rows_that_copy_and_rows_that_draft_share_a_batch_and_keep_the_distribution():
    engine = copying("greedy_traversal", V=3, max_num_seqs=8, dtype=np.float32)
    engine.menu.default = replace(engine.menu.default, verifier=OnlyWalks(engine.verifier))
    shown = engine.generate([[0, 1, 2, 0, 0, 1, 2, 0], [1, 2]], SamplingParams(max_tokens=12, n=4, seed=1))
    assert [{"ngram", "model"} <= sources(r.samples) for r in shown] == [True, True]
    assert p_value(engine, [0, 1, 2, 0, 0, 1, 2, 0], 3, 600) > 1e-3


def test_a_copy_is_cut_to_the_tokens_that_are_left():
    cut = Budget.copying((7, 8, 9)).within(2)
    assert (cut.copied, cut.parents, cut.max_depth, cut.max_nodes) == ((7, 8), (-1, 0, 1), 2, 2)
    assert (
        Budget.copying((7, 8, 9)).within(3).copied == (7, 8, 9)
        and Budget.copying((7, 8)).within(0).copied == ()
    )


def test_a_greedy_text_is_the_tables_and_the_draft_model_has_read_it():
    engine = copying("greedy_traversal", V=3)
    small = engine.drafter.model
    for _ in engine.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=50)):
        for s in engine._roster.running:
            if s.state is not None and not s.copying and s.num_told == len(s.token_ids):
                cached = len(s.state.context) - len(s.state.pending)
                assert (
                    list(s.state.context) == s.token_ids
                    and small.texts[s.state.slot][:cached] == s.token_ids[:cached]
                )
    for prompt, result in zip(
        PROMPTS, engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=50)), strict=True
    ):
        assert result.token_ids == plain_greedy(engine.target, prompt, 50)
        assert "ngram" in sources(result.samples) and result.stats.drafter_error is None


def test_a_head_catches_up_with_the_states_of_copied_tokens(tmp_path):
    target = TableModel(3, dtype=np.float32)
    engine = Engine.of(target, drafter_options=trained("eagle")(tmp_path, 3))
    engine.policy.open(profile(costs(0.02, 0.1), 0.3))
    engine.policy.time = lambda seconds: None
    observe = engine.drafter.observe
    read = []

    def checked(states, outcome, scores):
        for b, emitted in enumerate(outcome.emitted(scores.tree)):
            nodes = [0, *outcome.lists.paths[b]]
            shown = scores.hidden[0][b, nodes].argmax(-1).tolist()  # state 0 of a token says which it is
            assert shown == [states[b].context[-1], *emitted[:-1]]
            read.append(len(emitted))
        return observe(states, outcome, scores)

    engine.drafter.observe = checked
    for result in engine.generate(PROMPTS, SamplingParams(seed=1, max_tokens=50)):
        assert {"ngram", "eagle"} <= sources(result.samples) and result.stats.drafter_error is None
    assert max(read) > 8


def embedded(**fields):
    """The embedded pair, by the costs that are given, whatever the machine."""
    engine = Engine.embedded(**fields)
    engine.policy.open(profile(costs(0.02, 0.1), 0.3))
    engine.policy.time = lambda seconds: None
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_repeats_a_text_with_copies_alone_and_in_a_batch(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=4, ignore_eos=True)
    prompts = ["x = 1\n" * 9, "import os\n", "y = 2\n" * 9]
    alone = embedded(max_num_seqs=4).generate(prompts[0], params)[0]
    busy = embedded(max_num_seqs=4)
    busy.generate(prompts, params.with_(seed=None))
    together = busy.generate(prompts, [params, *[params.with_(seed=None)] * 2])[0]
    assert "ngram" in sources(alone.samples)
    assert alone.token_ids == together.token_ids
    assert temperature == 0 or alone.stats.drafted_by_depth == together.stats.drafted_by_depth


def test_a_prediction_is_verified_in_place_of_drafts():
    engine = embedded(max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = engine.generate("def area(r):\n", params)[0]
    again = engine.submit("def area(r):\n", params, prediction=text.token_ids)
    while engine.has_unfinished_requests:
        engine.step()
    assert again.token_ids == text.token_ids
    copied = [sum(o.source == "ngram" for o in result.samples[0].origins) for result in (again, text)]
    assert copied[0] > 25 > copied[1]


@pytest.mark.parametrize(("rule", "drafter"), [("race", "auto"), ("typical", "auto"), ("block", "model")])
def test_nothing_is_copied_for_other_verifiers_or_where_the_draft_model_was_named(rule, drafter):
    target = TableModel(max_num_seqs=1)
    small = TableModel(max_num_seqs=1)
    kind = {"kind": "coupled"} if rule == "race" else {}
    engine = Engine.of(target, draft_model=small, drafter=drafter, verifier=rule, drafter_options=kind)
    engine.policy.open(profile(costs(0.02, 0.1), 0.3))
    shown = engine.generate([[0, 1, 2, 0, 0, 1, 2, 0] * 2], SamplingParams(max_tokens=30, seed=0))
    assert "ngram" not in sources(shown[0].samples)


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 0), (0.0006, 3)])
def test_a_pause_is_read_for_repeats_as_often_as_that_costs_little(seconds, steps):
    prices = Costs.of({1: seconds, 4: 1.1 * seconds}, draft_start=0.0, draft_step=0.1 * seconds)
    policy = AdaptivePolicy(profile(prices, 0.3), copying=True)
    (s,) = sequences(length=20)  # of one token, again and again
    policy.course(s).meet(Event.SPENT)
    assert [policy.rests([s]) for _ in range(steps + 1)] == [True] * steps + [False]


def request(tokens, **more):
    return Request("r", tuple(tokens), SamplingParams(), 0, **more)


def test_acceptance_is_counted_by_the_length_of_the_match_and_none_of_the_prompt():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    seen = Repeats(request([*text, *text[:5]]))
    seen.read([*text, *text[:5]])
    assert (
        seen.length == 5
        and seen._counts["tries"].sum() == 0
        and seen.tokens(9) == (6, 7, 8, 9, 1, 2, 3, 4, 5)
    )
    seen.read([*text, *text[:8], 30])
    tries = seen._counts["tries"]
    hits = seen._counts["hits"]
    assert tries[:3].tolist() == [3, 1, 0] and hits[:3].tolist() == [3, 0, 0] and seen.length == 0
    assert seen.tokens(4) == ()


def test_the_longest_match_is_followed_and_the_prediction_before_all():
    texts = [1, 2, 3, 4, 5, 6, 90], [2, 3, 4, 5, 6, 91], [1, 2, 3, 4, 5, 6]
    seen = Repeats(request([t for text in texts for t in text]))
    seen.read([t for text in texts for t in text])
    assert seen.tokens(1) == (90,) and seen.length == 6
    predicted = Repeats(replace(request([9, 9, 3, 4, 5, 6]), prediction_token_ids=(77, 78)))
    predicted.read([9, 9, 3, 4, 5, 6])
    assert predicted.tokens(2) == (77, 78) and predicted.acceptance() == [PRIOR[LANES]]


def test_a_match_that_grows_changes_its_lane():
    text = list(range(repeats.MOST + 9))
    seen = Repeats(request([*text, *text[:5]]))
    seen.read([*text, *text[:5]])
    assert seen.acceptance(8) == [PRIOR[0]] * 3 + [PRIOR[1]] * 5
