"""While drafts are compiled elsewhere requests begin without them, and the text of a seed does not depend on when that ends."""

import pytest

from polydraft import Engine, SamplingParams
from polydraft.config import EngineConfig
from polydraft.core import Budget

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


class Compiler:
    """Stands for the process that compiles: it takes so many looks, and remembers how often somebody waited."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.waited = 0

    def __call__(self, target, chosen):
        assert chosen.offers.model is not None
        return self.compiling

    def compiling(self, seconds: float) -> bool:
        self.looks = self.looks - 1
        self.waited = self.waited + (seconds > 0)
        return self.looks >= 0


def engine(looks: int, depth: int | None = 3) -> tuple[Engine, Compiler]:
    """depth: None for the policy that weighs costs."""
    compiler = Compiler(looks)
    return Engine.from_config(EngineConfig(drafter="model", depth=depth), compile_drafts=compiler), compiler


@pytest.fixture(scope="module")
def plain() -> str:
    return Engine.embedded(drafter=None).generate("def add(a, b):", PARAMS)[0].text


def test_an_answer_begins_without_drafts_that_join_when_they_are_compiled(plain):
    built, compiler = engine(looks=6)
    result = built.generate("def add(a, b):", PARAMS)[0]
    assert result.text == plain and compiler.waited == 0
    assert [origin.source for origin in result.samples[0].origins[:5]] == ["target"] * 5
    assert result.stats.drafted_tokens > 0


def test_drafts_that_are_never_compiled_leave_the_text_alone(plain):
    result = engine(looks=10_000)[0].generate("def add(a, b):", PARAMS)[0]
    assert (result.text, result.stats.drafted_tokens) == (plain, 0)


def test_the_text_of_a_seed_waits_for_its_drafts():
    sampled = PARAMS.with_(temperature=1.0, seed=3)
    built, compiler = engine(looks=6)
    result = built.generate("def add(a, b):", sampled)[0]
    assert compiler.waited > 0 and result.stats.drafted_tokens > 0
    without_seed, patient = engine(looks=6)
    without_seed.generate("def add(a, b):", sampled.with_(seed=None))
    assert patient.waited == 0


def test_a_request_with_a_shape_of_its_own_waits_for_its_drafts():
    built, compiler = engine(looks=20)
    built.submit("def add(a, b):", PARAMS, budget=Budget.fixed((-1, 0, 1)))
    while built.has_unfinished_requests:
        built.step()
    assert compiler.waited > 0


def test_a_request_for_plain_decoding_does_not_wait_for_drafts(plain):
    built, compiler = engine(looks=10_000)
    request = built.submit("def add(a, b):", PARAMS.with_(seed=3), budget=Budget.fixed((-1,)))
    while built.has_unfinished_requests:
        built.step()
    assert request.text == plain and compiler.waited == 0


def test_a_request_that_waits_for_its_drafts_lets_those_behind_it_pass(plain):
    built, compiler = engine(looks=10_000)
    sampled = PARAMS.with_(temperature=1.0, seed=3)
    waiting = built.submit("def add(a, b):", sampled)
    assert built.generate("def add(a, b):", PARAMS)[0].text == plain
    assert compiler.waited == 0 and not waiting.samples[0].token_ids
    compiler.looks = 0
    while built.has_unfinished_requests:
        built.step()
    assert waiting.text == engine(looks=0)[0].generate("def add(a, b):", sampled)[0].text


def test_costs_are_not_measured_while_drafts_are_compiled(monkeypatch):
    monkeypatch.setattr("polydraft.policy.profile.measured", lambda *_: pytest.fail("drafts were run"))
    monkeypatch.setattr("polydraft.policy.profile.remembered", lambda _: None)
    built, _ = engine(looks=3, depth=None)
    assert built.generate("def add(a, b):", PARAMS)[0].stats.generated_tokens == 24
