"""The suffix arrays against a naive counter, and the drafts made of them."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, Request
from polydraft.core.geometry import chain
from polydraft.drafters.text.growing_text import GrowingText
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.suffix import SuffixDrafter, SuffixStore
from polydraft.drafters.text.suffix_array import matches_of
from polydraft.drafters.text.text_index import TextIndex
from polydraft.engine.loop import Loop
from polydraft.engine.speculation import Menu, Speculation
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.papers.mixture.drafter import MixtureDrafter
from tests.drafters.sessions import requests
from tests.engine.tables import TableModel


def mixed(suffix):
    return MixtureDrafter({"suffix": suffix, "ngram": NgramDrafter()})


CHAIN = Budget.grown(8, 8)


def occurrences(texts, depth):
    """How often every substring of at most `depth` tokens occurs, by listing them."""
    return Counter(
        tuple(text[i:j])
        for text in texts
        for i in range(len(text))
        for j in range(i + 1, min(i + depth, len(text)) + 1)
    )


def assert_counts(index, depth, texts, absent=()):
    expected = occurrences(texts, depth)
    assert {s: index.count(s) for s in expected} == expected
    assert all(index.count(s) == expected[tuple(s)] for s in absent)


def check(index):
    """Look at the whole order: the suffixes are there once each, sorted by `depth` tokens, and the intervals of pending ends are theirs."""
    text, order, _, pending, about = index.arrays
    length, num_sorted, num_pending, depth, separator = about[0].tolist()
    ends = np.append(np.flatnonzero(text[:length] == separator) + 1, length)
    suffixes = [text[at : min(at + depth, ends[ends > at][0])].tolist() for at in order[:num_sorted].tolist()]
    assert sorted(order[:num_sorted].tolist()) == list(range(length - num_pending)), (
        "a suffix that is missing, or there twice"
    )
    assert suffixes == sorted(suffixes), "suffixes that are out of order"
    for i, (low, high) in enumerate(pending[:num_pending].tolist()):
        end = text[length - num_pending + i : length].tolist()
        within = [k for k, suffix in enumerate(suffixes) if suffix[: len(end)] == end]
        assert within == list(range(low, high)) != [], "an interval that is not that of its end"


depths = st.sampled_from([2, 3, 5, 8])
texts = st.integers(1, 5).flatmap(lambda V: st.lists(st.integers(0, V - 1), max_size=50))
strings = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=8)


@pytest.mark.parametrize("few", [0, 20, 1000])
def test_a_growing_text_is_counted_as_a_naive_counter_does(few, monkeypatch):
    """Whether its tokens are appended one by one, or sorted together."""
    monkeypatch.setattr("polydraft.drafters.text.growing_text.FEW", few)

    @settings(max_examples=80, deadline=None)
    @given(depths, st.lists(texts, max_size=4), strings)
    def grows(depth, parts, absent):
        index = GrowingText(depth)
        text = []
        for part in parts:
            index.extend(part)
            text += part
            check(index)
            assert_counts(index, depth, [text], absent)
        assert index.tokens.tolist() == text
        expected = occurrences([text], depth)
        ends = [tuple(text[len(text) - m :]) for m in range(1, min(depth, len(text) + 1))]
        assert len(matches_of(index.arrays)) == sum(expected[end] > 1 for end in ends)

    grows()


@settings(max_examples=100, deadline=None)
@given(depths, st.sampled_from([12, 60, 1000]), st.lists(texts, max_size=25), strings)
def test_texts_that_come_and_go_are_counted_as_a_naive_counter_does(depth, max_tokens, added, absent):
    store = SuffixStore(max_tokens, depth)
    there = []
    for text in added:
        store.add(text)
        there = [*there, text[-max_tokens:]]
        while sum(map(len, there)) > max_tokens:
            there = there[1:]
        check(store)
        assert_counts(store, depth, there, absent)
        assert [x.tolist() for x in store.texts()] == there
        assert store.num_tokens == sum(map(len, there))


def zipf(count, V=400, seed=0):
    return (np.random.default_rng(seed).zipf(1.3, count) % V).tolist()


def test_a_store_after_evictions_is_the_store_of_what_stayed():
    store, fresh = (SuffixStore(3000, 16) for _ in range(2))
    parts = [zipf(500, seed=i) for i in range(20)]
    for part in parts:
        store.add(part)
    for part in parts[-6:]:
        fresh.add(part)
    assert all(np.array_equal(a, b) for a, b in zip(store.arrays, fresh.arrays, strict=True))


def test_memory_falls_when_texts_leave():
    store = SuffixStore(40_000, 16)
    for i in range(80):
        store.add(zipf(500, seed=i))
    full = store.num_bytes
    store.add(zipf(39_000, seed=80))
    store.add([1] * 39_999)
    store.add([2, 3])
    assert_counts(store, 2, [[2, 3]])
    assert store.num_bytes < full / 100


def test_a_token_of_history_costs_at_most_17_bytes():
    for text in (zipf(100_000), np.random.default_rng(0).integers(0, 2000, 100_000)):
        index = GrowingText()
        index.extend(text)
        assert index.num_bytes <= 17 * len(text)
        store = SuffixStore()
        store.add(text)
        assert store.num_bytes < 8.1 * len(text)


def test_a_long_text_costs_no_more_a_token_than_a_short_one_in_intervals_narrowed():
    """The pending ends that an append narrows are as many as the longest match, however long the text is."""
    index = GrowingText()
    narrowed = []
    for part in np.array_split(zipf(60_000), 6):
        index.extend(part)
        narrowed.append(len(matches_of(index.arrays)))
    assert max(narrowed) < 10


def test_damage_is_noticed():
    index = GrowingText()
    index.extend([1, 2, 3, 1, 2, 4, 1, 2])
    check(index)
    order = index.arrays.order
    order[:2] = order[1::-1].copy()
    with pytest.raises(AssertionError, match="out of order"):
        check(index)


def grown(drafter, prompt, budget=CHAIN):
    tree = drafter.continuations(drafter.start(requests(prompt))[0], budget)
    return tree.tokens[1:], [round(x, 3) for x in tree.scores[1:]]


def test_a_long_match_earns_a_long_draft_and_a_short_one_a_short_draft():
    drafter = SuffixDrafter(factor=1, offset=0)
    assert grown(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4])[0] == [5, 6, 7, 8]
    assert grown(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4])[0] == [5]
    assert grown(SuffixDrafter(factor=1, offset=2), [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4])[0] == [5, 6, 7]


def test_scores_are_ratios_of_counts_times_trust_in_the_match_and_the_likelier_branch_comes_first():
    """After one token of match the trust is 1/2, after three 3/4."""
    text = [9, 5, 1, 9, 5, 1, 9, 6, 2, 9, 7, 3, 9]
    assert grown(SuffixDrafter(factor=0, offset=9), text, Budget.grown(9, 1, 4)) == (
        [5, 7, 6],
        [0.25, 0.125, 0.125],
    )
    assert grown(SuffixDrafter(factor=0, offset=9, min_prob=0.2), text, Budget.grown(9, 1, 4)) == (
        [5],
        [0.25],
    )
    assert grown(SuffixDrafter(), [1, 2, 3, 4, 9, 1, 2, 3], Budget.grown(2, 2)) == ([4, 9], [0.75, 0.8])


def test_of_equally_frequent_continuations_the_latest_comes_first():
    assert grown(SuffixDrafter(), [9, 5, 8, 9, 6, 8, 9], Budget.grown(1, 1))[0] == [6]


def test_a_shorter_match_with_more_agreement_beats_a_longer_one():
    """After 8 9 four things followed; after 9 alone, one of them mostly."""
    text = [8, 9, 1, 0, 8, 9, 2, 0, 8, 9, 3, 0] + [7, 9, 4, 5, 6] * 12 + [8, 9]
    assert grown(SuffixDrafter(factor=0, offset=4), text, Budget.grown(3, 3))[0] == [4, 5, 6]


def test_the_shared_store_drafts_only_where_it_knows_better():
    store = SuffixStore(100)
    store.add([1, 2, 3, 4, 5, 6])
    drafter = SuffixDrafter(store, factor=1, offset=0)
    assert grown(drafter, [9, 1, 2, 3])[0] == [4, 5, 6]
    assert grown(SuffixDrafter(factor=1, offset=0), [9, 1, 2, 3])[0] == []
    assert grown(drafter, [1, 2, 3, 7, 7, 7, 1, 2, 3])[0] == [7, 7, 7], "the request's own text wins ties"


@pytest.mark.parametrize("within", [lambda suffix: suffix, mixed])
def test_the_store_is_told_each_output_once_and_nothing_else(within):
    store = SuffixStore(1000)
    options = SamplingParams(max_tokens=9, seed=3, stop_token_ids=[5])
    drafter = within(SuffixDrafter(store))
    rule = verifier("match")
    target = TableModel()
    loop = Loop(
        target, Menu(target, Speculation(drafter, rule, FixedPolicy(Budget.grown(4, 4)))), teaching=False
    )
    loop.add_request(Request("measured", (1, 2, 1, 2), SamplingParams(max_tokens=9), 0))
    while loop.has_unfinished_requests:
        loop.step()
    assert store.num_tokens == 0, "rounds that are only measured teach nothing"
    policy = FixedPolicy(Budget.fixed(chain(4)))
    engine = Engine.of(TableModel(), drafter=drafter, verifier=rule, policy=policy)
    made = engine.generate([[1, 2], [3, 3, 3]], options.with_(n=4))
    stream = engine.stream([1, 2], options)
    left = [*next(stream).token_ids]
    stream.close()
    assert {s.finish_reason for r in made for s in r.samples} == {"stop", "length"}
    assert sorted(x.tolist() for x in store.texts()) == sorted(
        [left, *(s.token_ids for r in made for s in r.samples)]
    )


def test_a_saved_store_drafts_as_before(tmp_path):
    store = SuffixStore(600, depth=8)
    for i in range(5):
        store.add(zipf(100, 20, seed=i))
    store.save(tmp_path / "store", 20)
    again = SuffixStore.load(tmp_path / "store", 600, depth=8)
    assert again.num_tokens == 500
    for i in range(5):
        prompt = zipf(30, 20, seed=10 + i)
        wide = Budget.grown(12, 6, 3)
        assert grown(SuffixDrafter(store), prompt, wide) == grown(SuffixDrafter(again), prompt, wide)
    assert [x.tolist() for x in SuffixStore.load(tmp_path / "store", 250).texts()] == [
        zipf(100, 20, seed=i) for i in (3, 4)
    ]
    SuffixStore(9).save(tmp_path / "empty", 20)
    assert SuffixStore.load(tmp_path / "empty").num_tokens == 0


def test_a_saved_store_is_an_index_of_its_texts_and_an_index_opens_a_store(tmp_path):
    store = SuffixStore()
    documents = [zipf(100, 20, seed=i) for i in range(5)]
    for text in documents:
        store.add(text)
    store.save(tmp_path / "store", 20)
    index = TextIndex.build(documents, 20)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(TextIndex.load(tmp_path / "store").arrays, index.arrays, strict=True)
    )
    index.save(tmp_path / "index")
    opened = SuffixStore.load(tmp_path / "index")
    check(opened)
    opened.add([3, 4])
    check(opened)
    assert_counts(opened, 64, [*documents, [3, 4]])


def test_a_store_with_ids_beyond_its_vocabulary_is_not_saved(tmp_path):
    store = SuffixStore(9)
    store.add([3, 25])
    with pytest.raises(InvalidInputError, match="token id 25 was given in document 0"):
        store.save(tmp_path / "store", 20)


def test_threads_share_a_store():
    store = SuffixStore(2000, depth=8)
    drafter = SuffixDrafter(store)

    def work(seed):
        for i in range(30):
            (state,) = drafter.start(requests(zipf(20, 9, seed=seed * 100 + i)))
            state.extend(zipf(30, 9, seed=seed * 100 + i + 50))
            drafter.continuations(state, CHAIN)
            drafter.learn_output(state.tokens[20:].tolist())

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    check(store)
    assert store.num_tokens == 1980
    assert_counts(store, 8, [x.tolist() for x in store.texts()])


@pytest.mark.parametrize(
    "given", [{"factor": 0, "offset": 0}, {"min_prob": 0}, {"depth": 1}, {"factor": -1, "offset": 3}]
)
def test_parameters_out_of_range_are_refused(given):
    with pytest.raises(InvalidInputError, match="expected"):
        SuffixDrafter(**given)


def test_what_a_text_or_a_store_cannot_take_is_refused():
    with pytest.raises(InvalidInputError, match="token id -3"):
        GrowingText().extend([1, -3])
    with pytest.raises(InvalidInputError, match="token id -3"):
        SuffixStore().add([1, -3])
    with pytest.raises(InvalidInputError, match="max_tokens"):
        SuffixStore(0)
