"""A grammar that crashes its compiler, or takes too much, ends a process of its own, and is refused by name; the next one is tried as ever."""

import logging
import os
import sys
import threading

import numpy as np
import pytest

from polydraft import SamplingParams, StructuredOutputs
from polydraft.engine import grammar as grammar_module
from polydraft.engine import grammar_trial, structured
from polydraft.engine.grammar_compile import LIMITS
from polydraft.engine.grammar_tokenizer import Vocabulary
from polydraft.engine.grammar_trial import Trial
from polydraft.errors import GrammarError, InvalidInputError
from tests.engine.test_grammar_bounds import references
from tests.engine.test_structured import END, FORM, PROMPT, WIDE, engine, next_tokens, tokenizer

BYTES = Vocabulary.of([bytes([byte]) for byte in range(256)] + [b"<end>"], [256], [256])
MANY = {
    "properties": {f"p{n}": {"type": "integer"} for n in range(800)},
    "additionalProperties": False,
    "minProperties": 1,
}
"""Whose grammar has 320,000 productions."""
UNBOUNDED = "from polydraft.engine import grammar_bounds as b, grammar_process as p; b.MOST_LEVELS = b.MOST_ITEMS = 10**9; p.MEGABYTES = {}; p.SECONDS = {}; p.main()"
needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


@pytest.fixture
def trial(request, monkeypatch):
    """Of a process without our bounds, or of another command."""
    command = getattr(request, "param", [sys.executable, "-c", UNBOUNDED.format(48, 2)])
    monkeypatch.setattr(grammar_trial, "COMMAND", command)
    made = Trial()
    yield made
    made.end()


def outcome(trial, kind, value):
    return trial.outcome(BYTES, kind, value, LIMITS)


@needs_forks
def test_a_crash_is_a_failure_by_name_and_others_are_tried(trial):
    crashed = outcome(trial, "json", references(1300, lambda ref: {"properties": {"a": ref}}))
    assert crashed["failure"] == "it crashes the compiler of grammars (SIGSEGV)"
    process = trial._process.process
    assert (
        "text" in outcome(trial, "regex", "a|b")
        and trial._process.process is process
        and process.poll() is None
    )


@needs_forks
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system does not keep to limits of memory"
)
@pytest.mark.parametrize("schema", [MANY, {"minItems": 100_000_000}], ids=["properties", "items"])
def test_memory_is_limited(trial, schema):
    assert outcome(trial, "json", schema)["failure"] == "it takes more than 256 MB"


@needs_forks
@pytest.mark.parametrize("trial", [[sys.executable, "-c", UNBOUNDED.format(4096, 0.3)]], indirect=True)
def test_time_is_limited(trial):
    assert outcome(trial, "json", MANY)["failure"] == "it takes more than 2 seconds to compile"


def test_a_process_that_was_killed_starts_anew(trial):
    assert "text" in outcome(trial, "regex", "a|b")
    trial._process.process.kill()
    assert "text" in outcome(trial, "regex", "a|b|c")


@pytest.mark.parametrize(
    "trial",
    [["/nonexistent/python"], [sys.executable, "-c", "raise SystemExit(3)"]],
    indirect=True,
    ids=["no program", "it ends"],
)
def test_without_the_process_grammars_are_compiled_untried_and_the_log_says_so(trial, caplog, monkeypatch):
    monkeypatch.setattr(structured, "shared_trial", lambda: trial)
    with caplog.at_level(logging.WARNING, "polydraft.engine"):
        grammar = structured.Grammars(tokenizer(), 7, [END]).compiled(FORM).constraint(2)
        with pytest.raises(InvalidInputError, match="5000 levels deep"):
            deep = StructuredOutputs(json=references(2500, lambda ref: {"items": ref}))
            structured.Grammars(tokenizer(), 7, [END]).compiled(deep)
    assert set(np.flatnonzero(grammar.allowed(PROMPT, [5], [-1])[0])) == next_tokens(())
    (record,) = caplog.records
    assert (
        "cannot be started, so they are compiled untried: " in record.message and "None" not in record.message
    )


def test_many_threads_ask_at_once_and_each_gets_its_own_answer(trial):
    answers = {}

    def ask(number):
        answers[number] = outcome(trial, "regex", f"a{{{number}}}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"a{{{number}}}" in answer["text"] for number, answer in answers.items()) and len(answers) == 8


@needs_forks
def test_a_fork_of_this_process_has_a_trial_of_its_own():
    ours = grammar_trial.shared_trial()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"1" if grammar_trial.shared_trial() is not ours else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)


class Counted:
    """A trial that counts what it is asked."""

    def __init__(self, outcome=None):
        self.asked = []
        self.fixed = outcome

    def begin(self, vocabulary):
        pass

    def outcome(self, vocabulary, kind, value, limits):
        self.asked.append(value)
        return self.fixed or grammar_trial.shared_trial().outcome(vocabulary, kind, value, limits)


def test_a_grammar_is_tried_once(monkeypatch):
    counted = Counted()
    monkeypatch.setattr(structured, "shared_trial", lambda: counted)
    grammars = structured.Grammars(tokenizer(), 7, [END])
    for _ in range(2):
        grammars.compiled(FORM, store=False)
        with pytest.raises(InvalidInputError, match="regex"):
            grammars.compiled(StructuredOutputs(regex="("))
    assert counted.asked == [FORM.regex, "("]


def test_a_failure_is_a_refusal_of_the_request_by_its_form(monkeypatch):
    monkeypatch.setattr(structured, "shared_trial", lambda: Counted({"failure": "it takes more than 256 MB"}))
    with pytest.raises(
        InvalidInputError,
        match=r"^structured_outputs\.regex was given, which cannot be followed: it takes more than",
    ):
        engine().generate([PROMPT], SamplingParams(structured_outputs=FORM))


@pytest.mark.filterwarnings(
    "ignore::polydraft.errors.RequestWarning", "ignore::polydraft.errors.DrafterWarning"
)
def test_an_output_whose_steps_take_too_long_ends_alone(monkeypatch):
    plain = SamplingParams(seed=1, max_tokens=8)
    alone = engine().generate([PROMPT], plain, first_index=1)[0]
    monkeypatch.setattr(grammar_module, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 0.0)
    slow, other = engine().generate([PROMPT, PROMPT], [plain.with_(structured_outputs=WIDE), plain])
    assert slow.finish_reason == "error" and slow.samples[0].refused and other.token_ids == alone.token_ids
    assert "a step of theirs takes" in (slow.samples[0].error or "")


def test_a_large_grammar_whose_states_are_used_up_is_compiled_before_the_next_request_and_not_in_a_step(
    monkeypatch,
):
    monkeypatch.setitem(structured.LIMITS, "max_lexer_states", 40)
    grammars = structured.Grammars(tokenizer(), 7, [END])
    source = grammars.grammar(WIDE)
    source.seconds = 1.0
    with pytest.raises(GrammarError, match="too many states"):
        for step in range(60):
            source.constraint(2).allowed([*PROMPT, *[0] * (step % 29), *[3] * (step // 29)], [0], [-1])
            source.constraint(2).allowed([*PROMPT, *[1, 0] * (step % 15)], [0], [-1])
    assert source.is_worn and grammars.grammar(WIDE) is not source
