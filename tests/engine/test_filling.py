"""A long prompt that joins is read in pieces, which changes no token and holds up nobody for longer than a piece."""

import pytest

from polydraft import Engine, Request, SamplingParams
from polydraft.engine import filling
from tests.engine.tables import TableModel, plain_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=20)


class Noted(TableModel):
    """Remembers how many tokens each prefill read, and the passes between."""

    def __init__(self):
        super().__init__(max_model_len=400)
        self.events = []

    def prefill(self, slots, token_ids, **options):
        self.events.append(sum(map(len, token_ids)))
        return super().prefill(slots, token_ids, **options)

    def score(self, *given, **options):
        self.events.append("pass")
        return super().score(*given, **options)


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_joins_is_read_in_pieces_between_rounds_and_once_for_all_samples(monkeypatch, drafter, n):
    monkeypatch.setattr(filling.Filling, "room", lambda self: 50)
    target = Noted()
    engine = Engine.of(target, drafter=drafter, plan="fixed" if drafter else None)
    prompt = tuple(i % 6 for i in range(231))
    one = engine.add_request(Request("one", (1, 2, 3), GREEDY, 0))
    engine.step()
    del target.events[:]
    others = [engine.add_request(Request("two", prompt, GREEDY, 0, j)) for j in range(n)]
    while engine.has_unfinished_requests:
        engine.step()
    assert [e for e in target.events if e != "pass"] == [50, 50, 50, 50, 30]
    assert target.events[:9] == [50, "pass"] * 4 + [30]
    assert one.token_ids == plain_greedy(target, (1, 2, 3), 20)
    assert all(other.token_ids == plain_greedy(target, prompt, 20) for other in others)
    assert engine.num_free == 4


def test_a_prompt_that_nobody_waits_for_is_read_at_once_and_an_abort_ends_the_reading(monkeypatch):
    monkeypatch.setattr(filling.Filling, "room", lambda self: 50)
    target = Noted()
    engine = Engine.of(target, drafter=None)
    engine.add_request(Request("one", tuple(i % 6 for i in range(300)), GREEDY, 0))
    engine.step()
    assert target.events == [299, "pass"]
    gone = engine.add_request(Request("two", tuple(i % 5 for i in range(300)), GREEDY, 0))
    engine.step()
    engine.abort_request("two")
    engine.step()
    assert target.events[2:] == [50, "pass", "pass"] and gone.finish_reason == "abort" and engine.num_running == 1


def test_pieces_are_half_as_long_as_a_round_within_bounds():
    read = filling.Filling(TableModel(), lambda: 0.0)
    assert read.room() == filling.FEWEST
    read._tokens_per_second, read.round_seconds = 1000.0, 0.1
    assert read.room() == 50
    read.round_seconds = 9.0
    assert read.room() == filling.MOST
