"""The suffix tree against a naive counter, and the drafts made of it."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, Request
from polydraft.drafters.mixture import MixtureDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.suffix import SuffixDrafter, SuffixStore
from polydraft.drafters.text.suffix_nodes import CHILD, COUNT, DEPTH, END, NEXT, PARENT, PREVIOUS, START, child
from polydraft.drafters.text.suffix_tree import SuffixTree, ends_of
from polydraft.engine.loop import Loop
from polydraft.engine.speculation import Menu, Speculation
from polydraft.errors import InvalidInputError
from polydraft.registry import verifier
from polydraft.tree import chain
from tests.drafters.sessions import requests
from tests.engine.tables import TableModel


def mixed(suffix):
    return MixtureDrafter({"suffix": suffix, "ngram": NgramDrafter()})


CHAIN = Budget.grown(8, 8)


def occurrences(texts, depth):
    """How often every substring of at most `depth` tokens occurs, by listing them."""
    return Counter(
        tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, min(i + depth, len(text)) + 1)
    )


def assert_counts(tree, texts, absent=()):
    expected = occurrences(texts, tree.depth)
    assert {s: tree.count(s) for s in expected} == expected
    assert all(tree.count(s) == expected[tuple(s)] for s in absent)


def children(nodes, n):
    found, c = [], nodes[n, CHILD]
    while c:
        found.append(int(c))
        c = nodes[c, NEXT]
    return found


def check(tree):
    """Walk the whole tree; what only its methods have changed is never wrong."""
    pool, nodes, _, _, _, about = tree.arrays
    mask, finished = len(pool) - 1, tree.max_tokens is not None
    held = sum(map(len, tree.texts())) if finished else int(about[END])
    oldest, seen, waiting = int(about[END]) - held, 1, [0]
    while waiting:
        n = waiting.pop()
        below = children(nodes, n)
        counts = [int(nodes[c, COUNT]) for c in below]
        assert [int(nodes[c, PREVIOUS]) for c in below] == [0, *below][: len(below)], "a child that does not name its neighbour"
        assert n == 0 or counts == sorted(counts, reverse=True), "siblings that are out of order"
        for c in below:
            length, age = nodes[c, DEPTH] - nodes[n, DEPTH], (nodes[c, START] - oldest) & mask
            assert nodes[c, PARENT] == n, "a child that does not name its parent"
            assert length > 0, "a node that is no deeper than its parent"
            assert age + (length if finished else 1) <= held, "an edge that refers to a text that has left"
            assert child(tree.arrays, n, pool[nodes[c, START]]) == c, "a node that the table of children does not find"
        assert n == 0 or sum(counts) <= nodes[n, COUNT], "a node whose count is below its children's"
        assert n == 0 or not finished or counts != [nodes[n, COUNT]], "an inner node that could be merged with its only child"
        seen += len(below)
        waiting += below
        assert seen <= tree.num_nodes, "more nodes than were counted"
    assert seen == tree.num_nodes, "fewer nodes than were counted"


depths = st.sampled_from([2, 3, 5, 8])
texts = st.integers(1, 5).flatmap(lambda V: st.lists(st.integers(0, V - 1), max_size=50))
strings = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=8)


@settings(max_examples=150, deadline=None)
@given(depths, st.lists(texts, max_size=4), strings)
def test_a_growing_text_is_counted_as_a_naive_counter_does(depth, parts, absent):
    tree, text = SuffixTree(depth), []
    for part in parts:
        tree.extend(part)
        text += part
        check(tree)
        assert_counts(tree, [text], absent)
    assert tree.tokens.tolist() == text


@settings(max_examples=100, deadline=None)
@given(depths, texts)
def test_the_places_are_the_ends_of_the_text_that_occurred_before(depth, text):
    tree = SuffixTree(depth)
    tree.extend(text)
    expected = occurrences([text], depth)
    assert len(ends_of(tree.arrays)) == sum(
        expected[tuple(text[len(text) - m :])] > 1 for m in range(1, min(depth, len(text) + 1))
    )


@settings(max_examples=100, deadline=None)
@given(depths, st.sampled_from([12, 60, 1000]), st.lists(st.one_of(texts, st.none()), max_size=25), strings)
def test_texts_that_come_and_go_are_counted_as_a_naive_counter_does(depth, max_tokens, steps, absent):
    """None takes the oldest text out; the bound does so too."""
    tree, there = SuffixTree(depth, max_tokens), []
    for step in steps:
        if step is not None:
            tree.add(step)
            there = [*there, step[-max_tokens:]][-len(tree.texts()) :]
        elif there:
            tree.remove_oldest()
            there = there[1:]
        check(tree)
        assert_counts(tree, there, absent)
        assert [x.tolist() for x in tree.texts()] == there
        assert tree.num_tokens <= max_tokens
    for _ in there:
        tree.remove_oldest()
    assert tree.num_nodes == 1


def zipf(count, V=400, seed=0):
    return (np.random.default_rng(seed).zipf(1.3, count) % V).tolist()


def test_a_tree_after_evictions_is_the_tree_of_what_stayed():
    tree, fresh = (SuffixTree(16, 3000) for _ in range(2))
    parts = [zipf(500, seed=i) for i in range(20)]
    for part in parts:
        tree.add(part)
    for part in parts[-6:]:
        fresh.add(part)
    assert (tree.num_nodes, tree.num_tokens) == (fresh.num_nodes, fresh.num_tokens)


def test_memory_falls_when_texts_leave():
    tree = SuffixTree(16, 40_000)
    for i in range(80):
        tree.add(zipf(500, seed=i))
    full = tree.num_bytes
    for _ in range(78):
        tree.remove_oldest()
    check(tree)
    assert tree.num_bytes < full / 3
    assert_counts(tree, [zipf(500, seed=i) for i in (78, 79)])


def test_a_token_of_history_costs_less_than_100_bytes():
    for text in (zipf(100_000), np.random.default_rng(0).integers(0, 2000, 100_000)):
        tree = SuffixTree()
        tree.extend(text)
        assert tree.num_bytes < 100 * len(text)


def test_a_long_text_costs_no_more_a_token_than_a_short_one_in_nodes_touched():
    """The places that an append touches are as many as the longest match, however long the text is."""
    tree = SuffixTree()
    touched = []
    for part in np.array_split(zipf(60_000), 6):
        tree.extend(part)
        touched.append(len(ends_of(tree.arrays)))
    assert max(touched) < 10


def test_damage_is_noticed():
    tree = SuffixTree()
    tree.extend([1, 2, 3, 1, 2, 4, 1, 2])
    tree.arrays.nodes[ends_of(tree.arrays)[1, 0], COUNT] = 0
    with pytest.raises(AssertionError, match="below its children's"):
        check(tree)


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
    assert grown(SuffixDrafter(factor=0, offset=9), text, Budget.grown(9, 1, 4)) == ([5, 7, 6], [0.25, 0.125, 0.125])
    assert grown(SuffixDrafter(factor=0, offset=9, min_prob=0.2), text, Budget.grown(9, 1, 4)) == ([5], [0.25])
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
    assert grown(drafter, [1, 2, 3, 7, 7, 7, 1, 2, 3])[0] == [7, 7, 7], "the request's own tree wins ties"


@pytest.mark.parametrize("within", [lambda suffix: suffix, mixed])
def test_the_store_is_told_each_output_once_and_nothing_else(within):
    store, options = SuffixStore(1000), SamplingParams(max_tokens=9, seed=3, stop_token_ids=[5])
    drafter, rule = within(SuffixDrafter(store)), verifier("match")
    target = TableModel()
    loop = Loop(target, Menu(target, Speculation(drafter, rule, FixedPolicy(Budget.grown(4, 4)))), teaching=False)
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
    assert sorted(x.tolist() for x in store.tree.texts()) == sorted([left, *(s.token_ids for r in made for s in r.samples)])


def test_a_saved_store_drafts_as_before(tmp_path):
    store = SuffixStore(600, depth=8)
    for i in range(5):
        store.add(zipf(100, 20, seed=i))
    store.save(tmp_path / "store", 20)
    again = SuffixStore.load(tmp_path / "store")
    assert (again.tree.depth, again.tree.max_tokens, again.num_tokens) == (8, 600, 500)
    for i in range(5):
        prompt, wide = zipf(30, 20, seed=10 + i), Budget.grown(12, 6, 3)
        assert grown(SuffixDrafter(store), prompt, wide) == grown(SuffixDrafter(again), prompt, wide)
    SuffixStore(9).save(tmp_path / "empty", 20)
    assert SuffixStore.load(tmp_path / "empty").num_tokens == 0


def test_a_store_with_ids_beyond_its_vocabulary_is_refused(tmp_path):
    store = SuffixStore(9)
    store.add([3, 25])
    store.save(tmp_path / "store", 20)
    with pytest.raises(InvalidInputError, match="tokens holds numbers from 3 to 25; expected them from 0 to 19"):
        SuffixStore.load(tmp_path / "store")


def test_threads_share_a_store():
    store = SuffixStore(2000, depth=8)
    drafter = SuffixDrafter(store)

    def work(seed):
        for i in range(30):
            (state,) = drafter.start(requests(zipf(20, 9, seed=seed * 100 + i)))
            state.extend(zipf(30, 9, seed=seed * 100 + i + 50))
            drafter.continuations(state, CHAIN)
            drafter.learn_output(state.tokens[20:])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    check(store.tree)
    assert store.num_tokens == 1980
    assert_counts(store.tree, [x.tolist() for x in store.tree.texts()])


@pytest.mark.parametrize("given", [{"factor": 0, "offset": 0}, {"min_prob": 0}, {"depth": 1}, {"factor": -1, "offset": 3}])
def test_parameters_out_of_range_are_refused(given):
    with pytest.raises(InvalidInputError, match="expected"):
        SuffixDrafter(**given)


def test_what_a_tree_cannot_take_is_refused():
    with pytest.raises(InvalidInputError, match="token id -3"):
        SuffixTree().extend([1, -3])
    with pytest.raises(InvalidInputError, match="max_tokens"):
        SuffixTree(8).add([1])
