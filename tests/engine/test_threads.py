"""Adds and aborts come from any thread and are done between rounds; every output comes once."""

import gc
import threading

import pytest

from polydraft import Engine, Request, SamplingParams
from polydraft.engine import admission, roster
from polydraft.engine.sequence import Sample
from polydraft.errors import CapacityError, InvalidInputError
from tests.engine.tables import TableModel, plain_greedy, table_engine

GREEDY = SamplingParams(temperature=0, max_tokens=9)


def test_adds_and_aborts_from_threads_leave_no_holes_and_no_doubles():
    engine = Engine.of(TableModel(max_num_seqs=3), drafter="ngram", depth=3)
    samples = {}
    outputs = []
    prompts = {f"{t}-{i}": (t, i % 7) for t in range(4) for i in range(60)}

    def ask(t):
        for i in range(60):
            name = f"{t}-{i}"
            samples[name] = engine.add_request(Request(name, prompts[name], GREEDY, 0))
            if i % 3 == 0:
                engine.abort_request(f"{t}-{i // 2}")

    asking = [threading.Thread(target=ask, args=(t,)) for t in range(4)]
    for thread in asking:
        thread.start()
    while engine.has_unfinished_requests or any(thread.is_alive() for thread in asking):
        outputs += engine.step()
    assert engine.num_free == 3 and not any(engine.target.texts)
    for name, sample in samples.items():
        own = [o for o in outputs if o.request_id == name]
        assert [o.finished for o in own].count(True) == 1 and own[-1].sample is sample
        assert [t for o in own for t in o.token_ids] == sample.token_ids
        whole = plain_greedy(engine.target, prompts[name], 9)
        assert sample.token_ids == (
            whole if sample.finish_reason == "length" else whole[: len(sample.token_ids)]
        )
    assert {s.finish_reason for s in samples.values()} == {"length", "abort"}


def test_several_threads_may_generate_and_stream():
    engine = table_engine(seqs=3)
    found = {}

    def generate(t):
        found[t] = [r.token_ids for r in engine.generate([[t, i] for i in range(5)], GREEDY)]

    def stream(t):
        found[t] = [[token for o in engine.stream([t, i], GREEDY) for token in o.token_ids] for i in range(5)]

    threads = [threading.Thread(target=(generate, stream)[t % 2], args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {t: [plain_greedy(engine.target, [t, i], 9) for i in range(5)] for t in range(4)}


def test_streams_that_take_turns_miss_nothing():
    engine = table_engine()
    one = engine.stream([1], GREEDY)
    two = engine.stream([2], GREEDY)
    got = [next(one).token_ids, next(two).token_ids]
    engine.generate([[3]], GREEDY)
    assert got[0] + [t for o in one for t in o.token_ids] == plain_greedy(engine.target, [1], 9)
    assert got[1] + [t for o in two for t in o.token_ids] == plain_greedy(engine.target, [2], 9)


class Collects(TableModel):
    """The third pass collects garbage."""

    def score(self, *given, **options):
        if self.passes == 2:
            gc.collect()
        return super().score(*given, **options)


def test_a_stream_that_is_collected_inside_a_step_leaves_before_the_next():
    engine = Engine.of(Collects(), drafter=None)
    cycle = {"stream": engine.stream([1], GREEDY)}
    next(cycle["stream"])
    cycle["itself"] = cycle
    del cycle
    engine.generate([[2]], GREEDY)
    engine.step()
    assert engine.num_free == 4 and not engine.has_unfinished_requests


def test_generating_many_prompts_looks_at_each_a_few_times(monkeypatch):
    looks = 0

    class Counted(Sample):
        @property
        def finish_reason(self):
            nonlocal looks
            looks += 1
            return self.__dict__.get("why")

        @finish_reason.setter
        def finish_reason(self, why):
            self.__dict__["why"] = why

    monkeypatch.setattr(admission, "Sample", Counted)
    engine = Engine.of(TableModel(max_num_seqs=2), drafter=None)
    params = SamplingParams(temperature=0, max_tokens=2)
    counts = []
    for number in (30, 120):
        looks = 0
        engine.generate([[1]] * number, params)
        counts.append(looks)
    assert counts[1] <= 4.2 * counts[0]


def test_no_more_samples_may_wait_than_the_bound(monkeypatch):
    monkeypatch.setattr(roster, "MOST_WAITING", 5)
    engine = table_engine()
    with pytest.raises(CapacityError, match="while 5 samples wait"):
        engine.generate([[1]] * 2, GREEDY.with_(n=3))
    assert not engine.has_unfinished_requests
    assert len(engine.generate([[1]], GREEDY.with_(n=5))[0].samples) == 5


def test_an_absurd_number_of_samples_is_refused():
    with pytest.raises(InvalidInputError, match="n=1000000"):
        SamplingParams(n=1_000_000)
