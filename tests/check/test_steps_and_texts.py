"""The check finds known mistakes on real contexts and lets right rules pass."""

from pathlib import Path

import numpy as np
import pytest

from polydraft.check.check import CheckReport, Watched, check
from polydraft.check.finding import Finding
from polydraft.check.mutants import MATCH, WALKS, Edit, mistakes, mutant
from polydraft.check.steps import RESOLUTION, Recorder, _normal, _Statistics
from polydraft.check.wrong_drafters import FEW, Reversed
from polydraft.core import SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.methods.registry import verifier
from polydraft.models import pair
from polydraft.models.torch.module import load_module
from polydraft.policy.costs import Costs
from polydraft.policy.profile import Profile
from polydraft.verifiers import greedy
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot
from polydraft.verifiers.match import Match
from tests.support.wrong_rules import keep_all

PROMPTS = [prompt.text for prompt in pair.prompts()[:8]]
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def judge():
    return load_module(str(pair.target_folder()), device="cpu")


@pytest.fixture(scope="module")
def engine():
    return Engine.embedded(drafter="model:chain", depth=3)


@pytest.mark.parametrize(
    "ways", [{"drafter": "model", "depth": 2, "num_paths": 2}, {"drafter": "ngram", "depth": 3}], ids=str
)
def test_right_rules_pass_with_rules_draws_and_texts(ways, judge):
    report = check(Engine.embedded(**ways), PROMPTS, PARAMS, judge=judge, steps=500)
    assert report.passed, report.verdict
    assert {f.look for f in report.findings} >= {"walk", "verifier", "draws", "text"}
    assert report.steps >= 500


def test_what_is_checked_is_what_requests_without_a_seed_get_spare_siblings_among_it():
    prices = Costs.of({1: 1.0, 8: 1.01, 16: 1.02}, draft_start=0.0, draft_step=0.1)
    engine = Engine.embedded(profile=Profile.of(prices))
    report = check(engine, PROMPTS, PARAMS, steps=300)
    assert report.spares > 30 and report.p_value > 1e-3
    assert report.to_dict()["steps_with_spare_siblings"] == report.spares


def test_the_check_ends_where_nothing_is_drafted(judge):
    engine = Engine.embedded(drafter=None)
    policy = engine.policy
    report = check(engine, PROMPTS[:1], PARAMS, judge=judge, steps=40)
    assert report.status == "inconclusive"
    assert (report.steps, report.tokens) == (48, 48)
    assert engine.policy is policy


def test_steps_without_drafts_are_tested_too():
    report = check(Engine.embedded(drafter=None), PROMPTS[:1], PARAMS, steps=500)
    assert report.passed, report.verdict
    assert {f.look for f in report.findings} == {"walk", "steps without drafts"}


def test_greedy_tokens_are_compared_one_by_one(engine, judge):
    report = check(engine, PROMPTS, PARAMS.with_(temperature=0), judge=judge, steps=50)
    (text,) = [f for f in report.findings if f.what.startswith("text")]
    assert report.passed
    assert text.count == report.tokens > 100


def test_texts_of_another_distribution_are_found_by_the_judge(engine, judge):
    sharper = check(engine, PROMPTS, PARAMS, judge=_Tempered(judge), steps=120)
    assert not sharper.passed


class _Tempered:
    """A judge whose logits are twice as large: what an engine at half the temperature would look like."""

    def __init__(self, judge):
        self.judge = judge
        self.device = judge.device

    def __call__(self, ids):
        out = self.judge(ids)
        out.logits = out.logits * 2
        return out


MISTAKES = {m.name: m for m in mistakes()}
QUICK = [
    pytest.param(
        "block: residual without the accumulated weight", marks=pytest.mark.slow
    ),  # compiles for as long as all others run
    "recursive_wor: siblings sorted after drawing",
    "match: a new draw after a mismatch",
    "top tokens verified as if drawn",
    "noise keyed by a token's own position",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_known_mistake_is_found(name, engine):
    mistake = MISTAKES[name]
    bad = Reversed(engine.drafter.model)
    wrong = Engine.of(
        engine.target,
        draft_model=bad,
        drafter=mistake.drafts(bad),
        verifier=mistake.verifier(),
        depth=mistake.depth,
        num_paths=mistake.width,
        tokenizer=engine.tokenizer,
    )
    report = check(wrong, PROMPTS, PARAMS.with_(top_k=FEW), steps=1500, stop_early=True)
    assert report.status == "failed"


@pytest.mark.parametrize("name", WALKS)
def test_a_mistake_in_a_shipped_walk_differs_from_the_verdict_on_the_same_noise(name, engine):
    """On the pair as it is, whose few rejections hide most of these from statistics."""
    _, kind, width, edits = WALKS[name]
    wrong = Engine.of(
        engine.target,
        draft_model=engine.drafter.model,
        drafter=f"model:{kind}",
        verifier=mutant(name, *edits),
        depth=2,
        num_paths=width,
        tokenizer=engine.tokenizer,
    )
    report = check(wrong, PROMPTS[:2], PARAMS, steps=400, stop_early=True)
    assert report.status == "failed"
    assert report.findings[0].look == "walk" and report.findings[0].effect > 0
    assert "the verdict samples" in report.differing[0]


def test_a_mutant_whose_line_is_gone_is_refused():
    with pytest.raises(ValueError, match="stands 0 times"):
        mutant("match", Edit(MATCH, "no such line", ""))


def test_the_statistic_of_a_right_rule_has_mean_zero_by_enumeration():
    """All drafts of one token, weighted by q: the sum of M_1 is 0 for the right q and not for a sharpened one."""
    from polydraft import Draft, DraftSampling, TokenTree, TreeShape

    p = np.array([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]], dtype=np.float64)[None]
    q = np.array([0.5, 0.3, 0.2], dtype=np.float64)

    def total(reported):
        found = np.zeros((4, 2))
        for x in range(3):
            tree = TokenTree.chain(np.array([[0, x]]))
            draft = Draft(tree, DraftSampling.IID, TreeShape.CHAIN, reported[None, None], np.array([[-1, 0]]))
            verdict = verifier("speculative")(draft, p)
            found += float(q[x]) * _Statistics.of(draft, p).expected(verdict)[0]
        return np.abs(found).max()

    assert total(q) < 1e-12
    assert total(q**2 / (q**2).sum()) > 1e-2


def test_every_fused_rule_has_a_broken_walk_among_the_mistakes():
    rules = map(registry.verifier, registry.names("verifier"))
    assert {rule.info.name for rule in rules if hasattr(rule, "walk")} == {*WALKS}


def test_a_block_rule_whose_walk_is_replaced_is_found(engine, monkeypatch):
    monkeypatch.setattr(LeafToRoot, "walk", lambda self, *given: keep_all(*given))
    assert not check(engine, PROMPTS, PARAMS, steps=60).passed


def test_a_broken_greedy_walk_is_found(engine, monkeypatch):
    monkeypatch.setattr(greedy, "walk", keep_all)
    assert not check(engine, PROMPTS, PARAMS.with_(temperature=0), steps=60).passed


def test_a_broken_walk_of_steps_without_drafts_is_found(monkeypatch):
    monkeypatch.setattr(Match, "walk", lambda self, *given: keep_all(*given))
    assert not check(Engine.embedded(drafter=None), PROMPTS, PARAMS, steps=60).passed


def test_a_look_at_the_steps_changes_no_token(engine):
    """And the rule's own walk is what is looked at."""
    plain = engine.generate(PROMPTS[0], PARAMS.with_(seed=3))[0].token_ids
    recorder = Recorder(engine.verifier)
    policy = engine.policy
    engine.policy = Watched(policy, recorder)
    try:
        assert engine.generate(PROMPTS[0], PARAMS.with_(seed=3))[0].token_ids == plain
    finally:
        engine.policy = policy
    assert len(recorder.values) == len(recorder.drawn) > 0


def test_texts_are_judged_as_they_come_without_a_look(engine, judge, monkeypatch):
    seen = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda *given, **more: seen.append(type(engine.policy)) or submit(*given, **more)
    )
    report = check(engine, PROMPTS, PARAMS, judge=judge, steps=40)
    watched = seen.count(Watched)
    assert seen == [type(engine.policy), *[Watched] * watched, *[type(engine.policy)] * watched]
    assert report.p_value > 1e-3


def test_differences_below_the_resolution_of_float32_mean_nothing():
    assert _normal("x", np.full(1000, RESOLUTION / 10)).p_value > 0.5
    assert _normal("x", np.full(1000, RESOLUTION * 10)).p_value < 1e-6


class Failing(ModelDrafter):
    """A drafter whose every proposal fails."""

    def propose(self, states, budgets):
        raise RuntimeError("no idea")


@pytest.mark.filterwarnings("ignore::polydraft.errors.DrafterWarning")
def test_a_drafter_that_always_fails_does_not_pass_and_is_shown_with_its_line(engine):
    model = engine.drafter.model
    failing = Engine.of(
        engine.target, draft_model=model, drafter=Failing(model, "chain"), depth=2, tokenizer=engine.tokenizer
    )
    report = check(failing, PROMPTS, PARAMS, steps=40)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "no idea" in text)
    assert (report.status, report.steps) == ("failed", 0)
    assert "no step had a draft" in report.verdict[1]
    (failure,) = report.failures
    assert f"RuntimeError: no idea, at {__file__}:{line}" in failure


def test_few_steps_and_doubtful_p_values_are_inconclusive():
    def report(p_value, error):
        return CheckReport([Finding("verifier, position 1, best", 100, 0.0, p_value, error)], 100, 100)

    assert report(0.5, 0.001).status == "passed"
    assert report(5e-4, 0.001).status == "inconclusive"
    assert report(5e-5, 0.001).status == "failed"
    few = report(0.5, 0.05)
    assert few.status == "inconclusive"
    assert "about 700 steps" in few.verdict[1]


def test_so_many_steps_as_are_advised_find_the_bias():
    few = Finding("verifier, position 1, best", 100, 0.0, 1.0, error=0.05)
    many = Finding("verifier, position 1, best", 700, 0.0, 1.0, error=0.05 / 7**0.5)
    assert few.detectable(1e-4) > 0.1 > many.detectable(1e-4)


def test_too_few_steps_are_refused(engine):
    with pytest.raises(InvalidInputError, match="steps=3"):
        check(engine, PROMPTS, PARAMS, steps=3)
