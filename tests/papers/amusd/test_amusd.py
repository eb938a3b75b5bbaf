"""Real workers: threads that draw and verify at the same time, with random delays, failures, joins and forks."""

import gc
import json
import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import Engine, SamplingParams
from polydraft.core.params import StructuredOutputs
from polydraft.drafters.base import Parts
from polydraft.errors import DrafterWarning, DraftWorkerError, IncompatibleError, InvalidInputError
from polydraft.papers.amusd import drafter as amusd
from polydraft.papers.amusd.drafter import AmusdDrafter
from polydraft.papers.amusd.trace import DRAFT, VERIFY, Trace
from tests.engine.tables import TableModel, p_value, plain_greedy

PROMPTS = [[1, 2, 3], [4], [0, 0, 1]]


class Slow(TableModel):
    """A table whose passes take a random while: none, or up to two milliseconds."""

    def __init__(self, *, chance=None, **options):
        super().__init__(**options)
        self.chance = chance

    def score(self, *args, **options):
        if self.chance is not None and self.chance.random() < 0.5:
            time.sleep(0.002 * self.chance.random())
        return super().score(*args, **options)


def tables(seqs=4, chance=None, **options):
    target = Slow(chance=chance, max_num_seqs=seqs, **options)
    small = Slow(seed=1, chance=chance, max_num_seqs=seqs, **options)
    small.logits = 0.7 * target.logits + 0.3 * small.logits
    return target, small


def engine(kind="chain", verifier="auto", eos=(), **options):
    """Asynchronous, over tables."""
    names = {"lead_cap", "min_lead", "burst", "trace", "delay"} & set(options)
    own = {name: options.pop(name) for name in names}
    target, small = tables(**options)
    made = AmusdDrafter(small, kind, stop_ids=eos, **own)
    return Engine.of(target, drafter=made, verifier=verifier, eos_token_ids=eos)


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(0, 3), st.integers(1, 3))
def test_a_race_gives_the_plain_tokens_whatever_the_delays(chance, cap, min_lead, burst):
    params = [SamplingParams(max_tokens=20, seed=s) for s in range(3)]
    asynchronous = engine(
        "coupled",
        "race",
        chance=chance,
        lead_cap=cap,
        min_lead=min(min_lead, cap),
        burst=burst,
        delay=lambda: time.sleep(0.001 * chance.random()),
    )
    plain = Engine.of(tables()[0], drafter=None, verifier="race").generate(PROMPTS, params)
    found = asynchronous.generate(PROMPTS, params)
    asynchronous.drafter.close()
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert asynchronous.drafter.counts.longest <= cap


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_distribution_of_sampled_text_is_the_targets(rule):
    fast = engine(verifier=rule, seqs=128, V=3, lead_cap=4, min_lead=1)
    assert p_value(fast, [1, 2, 1], 2, 256) > 1e-4
    assert fast.drafter.counts.reused > 0


def test_greedy_text_is_the_targets_with_joins_and_ends():
    made = engine(seqs=2)
    prompts = [PROMPTS[i % 3] for i in range(7)]
    params = [SamplingParams(temperature=0, max_tokens=5 + 3 * i) for i in range(7)]
    results = made.generate(prompts, params)
    expected = [plain_greedy(made.target, p, g.max_tokens) for p, g in zip(prompts, params, strict=True)]
    assert [r.token_ids for r in results] == expected
    assert made.drafter.counts.longest <= made.drafter.lead_cap
    assert results[0].stats.drafter_counts["published"] > 0


def test_nothing_is_drafted_behind_the_end_of_the_text():
    expected = plain_greedy(tables()[0], PROMPTS[0], 12)
    made = engine(eos=(expected[-1],))
    (result,) = made.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=40))
    assert result.token_ids == expected[: expected.index(expected[-1]) + 1]
    assert result.finish_reason == "stop"


def test_draft_steps_run_inside_verify_passes(tmp_path, monkeypatch):
    """Seen in the trace of real threads, and in the file as Perfetto reads it; the passes are long, as a busy machine's threads take turns."""
    made = engine(trace=True)
    score = made.target.score

    def long_pass(*args, **options):
        time.sleep(0.02)
        return score(*args, **options)

    monkeypatch.setattr(made.target, "score", long_pass)
    made.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=48))
    trace = made.drafter.trace
    assert trace.draft_steps_inside > 0
    assert 0 < trace.overlap <= sum(e.end - e.begin for e in trace.of("verify"))
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {DRAFT, VERIFY}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans} == {"draft", "verify", "wait"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["pid"] == 1 for e in spans)
    made.drafter.close()


def test_a_trace_counts_only_what_lies_within_a_pass():
    trace = Trace()
    for begin, end in ((0.0, 4.0), (5.0, 9.0)):
        trace.add(VERIFY, "verify", begin, end)
    for begin, end in ((0.5, 1.0), (3.5, 5.5), (8.0, 9.0), (9.0, 9.5)):
        trace.add(DRAFT, "draft", begin, end)
    assert (trace.draft_steps_inside, trace.overlap) == (2, 0.5 + 0.5 + 0.5 + 1.0)


class Killed(BaseException):
    """What ends a thread from within."""


@pytest.mark.parametrize("error", [Killed("a kill"), MemoryError("no memory"), ValueError("NaN")])
def test_a_workers_death_is_raised_in_the_caller_and_another_one_takes_over(error):
    calls = []

    def delay():
        calls.append(1)
        if len(calls) == 5:
            raise error

    made = engine(delay=delay)
    began = time.perf_counter()
    with pytest.raises(DraftWorkerError, match="draft worker has died") as raised:
        made.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30))
    assert time.perf_counter() - began < 30
    assert raised.value.__cause__ is error
    again = made.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert [r.token_ids for r in again] == [plain_greedy(made.target, p, 12) for p in PROMPTS]
    assert again[0].stats.drafter_counts["published"] > 0


def test_a_worker_that_vanishes_without_a_word_is_noticed():
    made = engine()
    worker = made.drafter._worker
    worker._run = lambda: None
    with pytest.raises(DraftWorkerError, match="has ended"):
        made.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8))


def test_the_worker_ends_with_the_engine():
    gc.collect()  # the workers of other tests
    before = threading.active_count()
    made = engine()
    made.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert threading.active_count() == before + 1
    del made
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_is_told_that_the_worker_is_elsewhere():
    made = engine()
    made.generate(PROMPTS, SamplingParams(max_tokens=4))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            made.generate(PROMPTS, SamplingParams(max_tokens=4))
        except DraftWorkerError as error:
            code = 7 if "forked" in str(error) and "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_one_core_is_refused(monkeypatch):
    monkeypatch.setattr(amusd, "usable_processors", lambda: [3])
    with pytest.raises(IncompatibleError, match="on one core"):
        AmusdDrafter.build(Parts(*tables(), None, ()))


def test_a_process_forked_from_one_with_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    target, small = tables()
    small.on_device = True
    with pytest.raises(IncompatibleError, match="forked from one that uses CUDA"):
        AmusdDrafter.build(Parts(target, small, None, ()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter_options": {"lead_cap": 0}}, "lead_cap=0 was given"),
        ({"drafter_options": {"lead_cap": 3, "min_lead": 4}}, "min_lead=4"),
        ({"drafter_options": {"burst": 0}}, "burst=0"),
        ({"drafter": "ngram"}, "drafter='ngram'"),
        ({"drafter": None}, "drafter=None"),
        ({"policy": "adaptive"}, "expected at most a depth"),
        ({"num_paths": 2}, "expected at most a depth"),
        ({"draft_model": None}, "without a draft model"),
        ({"verifier": "greedy_plus_one"}, "greedy_plus_one"),
    ],
)
def test_what_cannot_run_ahead_is_refused(options, said):
    target, small = tables()
    with pytest.raises((InvalidInputError, IncompatibleError), match=said):
        Engine.of(target, **{"draft_model": small, "asynchronous": True, **options})


def test_the_targets_own_model_cannot_be_its_draft():
    target, _ = tables()
    with pytest.raises(IncompatibleError, match="one of its own"):
        Engine.of(target, draft_model=target, asynchronous=True)


def test_a_form_of_the_output_is_followed_without_drafts():
    made = Engine.embedded(asynchronous=True)
    params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(choice=["yes", "no"])
    )
    with pytest.warns(DrafterWarning, match="two threads"):
        assert made.generate("Well, ", params)[0].text in ("yes", "no")


def test_depth_is_what_a_pass_takes_and_the_rule_decides_the_kind():
    target, small = tables()
    made = Engine.of(target, draft_model=small, asynchronous=True, verifier="race", depth=3)
    assert made.drafter.info.name == "amusd:coupled"
    result = made.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=30))[0]
    assert len(result.stats.drafted_by_depth) <= 3
