"""A long prompt that joins is read in pieces, which changes no token and holds up nobody for longer than a piece."""

from types import SimpleNamespace

import numpy as np
import pytest

from polydraft import Engine, Request, SamplingParams
from polydraft.core import TokenTree
from polydraft.core.cursor import Cursor
from polydraft.engine import reader
from polydraft.models import load, pair
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
def test_a_prompt_that_joins_is_read_in_pieces_between_rounds_and_once_for_all_samples(
    monkeypatch, drafter, n
):
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: 50)
    target = Noted()
    engine = Engine.of(target, drafter=drafter, policy="fixed" if drafter else None)
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
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: 50)
    target = Noted()
    engine = Engine.of(target, drafter=None)
    engine.add_request(Request("one", tuple(i % 6 for i in range(250)), GREEDY, 0))
    engine.step()
    assert target.events == [249, "pass"]
    gone = engine.add_request(Request("two", tuple(i % 5 for i in range(300)), GREEDY, 0))
    engine.step()
    engine.abort_request("two")
    engine.step()
    assert (
        target.events[2:] == [50, "pass", "pass"]
        and gone.finish_reason == "abort"
        and engine.num_running == 1
    )


def test_a_prompt_that_is_read_alone_is_read_in_steps_of_which_each_hears_an_abort(monkeypatch):
    monkeypatch.setattr(reader, "ALONE_FIRST", 40)
    monkeypatch.setattr(reader, "ALONE_MIN", 40)
    monkeypatch.setattr(reader, "ALONE_SECONDS", 0.0)
    target = Noted()
    engine = Engine.of(target, drafter=None)
    gone = engine.add_request(Request("gone", tuple(i % 6 for i in range(370)), GREEDY, 0))
    engine.step()
    assert gone.stats.read_tokens == 40
    prompt = tuple(i % 5 for i in range(101))
    kept = [engine.add_request(Request("kept", prompt, GREEDY, 0, j)) for j in range(2)]
    engine.abort_request("gone")
    while engine.has_unfinished_requests:
        engine.step()
    assert gone.finish_reason == "abort" and [e for e in target.events if e != "pass"] == [40, 40, 40, 20]
    assert [sample.token_ids for sample in kept] == [plain_greedy(target, prompt, 20)] * 2 and kept[
        0
    ].stats.read_tokens == 101


def test_pieces_are_half_as_long_as_a_round_within_bounds_and_longer_where_more_are_read():
    read = reader.Reader(TableModel(), lambda: 0.0)
    assert read.room() == reader.FEWEST
    read._seconds_per_token = 0.001
    read.step_seconds = 0.1
    assert (read.room(), read.room(3), read.room(60)) == (50, 150, 250)
    read.step_seconds = 9.0
    assert read.room() == reader.MOST


def test_pieces_are_cut_to_what_rounds_leave_of_the_time_of_a_step():
    read = reader.Reader(TableModel(), lambda: 0.0, max_step=0.1075)
    read._seconds_per_token = 0.001
    read.step_seconds = 0.1
    assert read.room() == read.room(9) == 7


@pytest.fixture(scope="module")
def compiled():
    return load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=6, max_model_len=512)


def run(target, prompts, joining=True, **options):
    """Tokens of one text that runs and of prompts that join it, and in which order these are done."""
    engine = Engine.of(target, tie_margin=None, **options)
    samples = [engine.add_request(Request("0", PROMPTS[0], GREEDY.with_(max_tokens=120), 0))]
    if joining:
        engine.step()
    samples += [
        engine.add_request(Request(str(i), p, GREEDY.with_(max_tokens=4), i))
        for i, p in enumerate(prompts, 1)
    ]
    done = []
    while engine.has_unfinished_requests:
        done += [output.request_id for output in engine.step() if output.finished]
    assert engine.num_free == target.max_num_seqs
    return [s.token_ids for s in samples], done


PROMPTS = [
    tuple(5 + (i * k) % 1900 for i in range(length))
    for k, length in ((3, 9), (7, 130), (11, 20), (13, 60), (11, 20))
]


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("room", [3, 50])
def test_pieces_ride_in_the_passes_of_a_target_that_mixes_and_change_no_token(
    compiled, monkeypatch, drafter, room
):
    options = {"drafter": drafter, **({"depth": 3} if drafter else {})}
    alone = [run(compiled, [p], joining=False, **options)[0][1] for p in PROMPTS[1:]]
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: room)
    prefills = []
    prefill = compiled.prefill
    monkeypatch.setattr(
        compiled, "prefill", lambda *given, **o: prefills.append(given) or prefill(*given, **o)
    )
    together, done = run(compiled, PROMPTS[1:], **options)
    assert together[1:] == alone
    assert len(prefills) == 1  # that of the first, which nobody waited for
    assert done[:3] == ["2", "4", "3"] or done[:3] == ["4", "2", "3"]


def test_a_mixed_pass_is_a_score_and_a_prefill_bit_for_bit(compiled):
    ids = list(PROMPTS[1])
    tree = TokenTree(np.array([[5, 6, 7, 8], [9, 1, 0, 0]]), np.array([[-1, 0, 0, 1], [-1, 0, -1, -1]]))

    def begun():
        compiled.release(range(6))
        compiled.prefill([0, 1, 2, 3], [ids[:40], ids[:7], ids[:3], ids[:9]])

    begun()
    scored = compiled.score([0, 1], tree, hidden=(0, 2))
    read = [compiled.prefill([slot], [ids[a:b]], hidden=(0, 2)) for slot, a, b in ((2, 3, 90), (3, 9, 14))]
    after = compiled.score([2, 3], TokenTree.roots(np.array([4, 4]))).logits
    begun()
    mixed, pieces = compiled.score_mixed([0, 1], tree, {2: ids[3:90], 3: ids[9:14]}, hidden=(0, 2))
    assert np.array_equal(mixed.logits, scored.logits) and compiled.lengths.tolist()[:4] == [40, 7, 90, 14]
    for layer in (0, 2):
        assert np.array_equal(mixed.hidden[layer], scored.hidden[layer])
        for b, one in enumerate(read):
            assert np.array_equal(pieces.hidden[layer][b, : one.hidden[layer].shape[1]], one.hidden[layer][0])
    assert np.array_equal(compiled.score([2, 3], TokenTree.roots(np.array([4, 4]))).logits, after)
    compiled.release(range(6))


def test_a_short_prompt_is_read_before_a_long_one_and_delays_it_by_no_more_than_its_length():
    target = TableModel(max_num_seqs=9)
    read = reader.Reader(target, lambda: 0.0)
    request = SimpleNamespace(source_token_ids=())
    new = [
        SimpleNamespace(token_ids=[0] * n, cursor=Cursor(target, slot), second=None, request=request, due=0)
        for slot, n in enumerate((301, 21, 101, 11))
    ]
    for s in new[:3]:
        read.join(s)
    read._num_read = 295
    read.join(new[3])
    assert [s.cursor.slot for s in sorted(new, key=lambda s: s.due)] == [1, 2, 0, 3]
