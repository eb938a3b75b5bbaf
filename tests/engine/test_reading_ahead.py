"""A draft model reads a long prompt in pieces, a round each, which hold up no neighbour and change no text."""

from dataclasses import replace

import pytest

from polydraft import Engine, FixedPolicy, Request, SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine import reader
from tests.support.reading import read_counts

PROMPT = "def add(a, b):\n" + "    # a line that says little\n" * 24
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def noted(engine, monkeypatch):
    """Tokens that the draft model reads from now on, by call."""
    assert isinstance(engine.drafter, ModelDrafter)
    return read_counts(engine.drafter.model, monkeypatch)


def answered(engine, params):
    sample = engine.add_request(Request("long", tuple(engine.encode(PROMPT)), params, 5))
    while engine.has_unfinished_requests:
        engine.step()
    return sample


def test_a_long_prompt_is_read_by_the_draft_model_in_pieces_and_its_text_stays(monkeypatch):
    options = {"drafter": "model", "depth": 3, "max_num_seqs": 2}
    whole = answered(Engine.embedded(**options), LONG)
    monkeypatch.setattr(reader, "PIECE", 50)
    engine = Engine.embedded(**options)
    counts = noted(engine, monkeypatch)
    length = len(engine.encode(PROMPT))
    sample = answered(engine, LONG)
    assert sample.token_ids == whole.token_ids and sample.stats.drafted_tokens > 0
    assert max(counts) <= 50 and length - 60 < sum(counts) < length + 60 and len(counts) > 3
    assert isinstance(engine.drafter, ModelDrafter) and engine.num_free == engine.drafter.slots.num_free == 2


def test_a_text_that_follows_its_drafts_waits_for_them_piece_by_piece_and_stays(monkeypatch):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    options = {"drafter": "model", "depth": 3, "max_num_seqs": 2}
    whole = answered(Engine.embedded(**options), params)
    monkeypatch.setattr(reader, "PIECE", 50)
    engine = Engine.embedded(**options)
    counts = noted(engine, monkeypatch)
    sample = answered(engine, params)
    assert sample.token_ids == whole.token_ids and sample.stats.steps == whole.stats.steps
    assert max(counts) <= 50 and sum(counts) >= len(engine.encode(PROMPT)) - 1 - reader.AT_ONCE
    assert isinstance(engine.drafter, ModelDrafter) and engine.num_free == engine.drafter.slots.num_free == 2


def test_a_neighbour_goes_on_while_a_text_waits_for_its_drafts(monkeypatch):
    monkeypatch.setattr(reader, "AT_ONCE", 16)
    monkeypatch.setattr(reader, "PIECE_SECONDS", 1e-9)
    monkeypatch.setattr(reader, "SHARE", 1e9)  # the target reads at once, however long its steps take
    engine = Engine.embedded(drafter="model", depth=3, max_num_seqs=2)
    neighbour = engine.add_request(
        Request("short", tuple(engine.encode("x")), replace(LONG, max_tokens=900), 5)
    )
    engine.step()
    counts = noted(engine, monkeypatch)
    between = list[int]()
    late = engine.add_request(
        Request(
            "long", tuple(engine.encode(PROMPT)), SamplingParams(temperature=1.0, seed=5, max_tokens=8), 6
        )
    )
    while not late.token_ids and engine.has_unfinished_requests:
        engine.step()
        between.append(len(neighbour.token_ids))
    assert max(counts) <= 16 and len(counts) > 4 and len(set(between)) > len(counts) / 2


class Pausing(FixedPolicy):
    """Drafts at first, and again behind a long pause."""

    def budgets(self, sequences):
        return [Budget.fixed((-1,)) if 20 < len(s.token_ids) < 160 else self.budget for s in sequences]


@pytest.mark.parametrize("params", [LONG, replace(LONG, temperature=1.0, seed=5)], ids=["greedy", "seeded"])
def test_what_was_emitted_without_drafts_is_read_in_pieces_before_the_next_one(monkeypatch, params):
    def answer(engine):
        sample = engine.add_request(Request("long", (5, 6, 7), replace(params, max_tokens=200), 5))
        while engine.has_unfinished_requests:
            engine.step()
        return sample

    options = {"drafter": "model", "policy": Pausing(Budget.fixed(chain(3))), "max_num_seqs": 2}
    whole = answer(Engine.embedded(**options))
    monkeypatch.setattr(reader, "PIECE", 40)
    monkeypatch.setattr(reader, "AT_ONCE", 32)
    engine = Engine.embedded(**options)
    counts = noted(engine, monkeypatch)
    sample = answer(engine)
    assert sample.token_ids == whole.token_ids and sample.stats.drafted_tokens > 0
    assert max(counts) <= 40 and sum(counts) > 100
