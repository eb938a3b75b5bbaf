"""The suffix array against naive scans, and the drafts made of it."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import Engine
from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, Limits
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.suffix_array import PROBES, Candidates, draft, find, new_candidates
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.papers.retrieval.drafter import RetrievalDrafter
from tests.drafters.sessions import requests

V = 5
ANY = Budget.grown(1000, 4, width=1000)
corpora = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=40), min_size=1, max_size=4)


def hits(documents, pattern):
    """What follows every occurrence of the pattern, document by document."""
    n = len(pattern)
    return [
        d[i + n :] for d in documents for i in range(len(d) - n + 1) if list(d[i : i + n]) == list(pattern)
    ]


def grown(index, text, budget=ANY, **options):
    drafter = RetrievalDrafter(index, **options)
    return drafter.continuations(drafter.start(requests(text))[0], budget)


def paths(tree):
    """The tokens of every drafted node's path."""
    found = list[tuple[int, ...]]([()])
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@settings(max_examples=150, deadline=None)
@given(corpora, st.lists(st.integers(0, V - 1), min_size=1, max_size=6))
def test_counts_equal_a_scan_and_cross_no_document(documents, pattern):
    index = TextIndex.build(documents, V)
    assert index.count(pattern) == len(hits(documents, pattern))
    assert sorted(index.order.tolist()) == list(range(index.num_tokens))


@settings(max_examples=100, deadline=None)
@given(corpora)
def test_suffixes_are_sorted_whole(documents):
    index = TextIndex.build(documents, V)
    tokens = index.tokens.tolist()
    keys = [tokens[i:] for i in index.order.tolist()]
    assert keys == sorted(keys)


@settings(max_examples=150, deadline=None)
@given(corpora, st.lists(st.integers(0, V - 1), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 3))
def test_the_draft_is_the_trie_of_the_hits_of_the_longest_match(documents, text, least, more):
    tree = grown(TextIndex.build(documents, V), text, min_match=least, max_match=least + more)
    lengths = range(least, min(least + more, len(text)) + 1)
    longest = max((m for m in lengths if hits(documents, text[-m:])), default=0)
    if not longest:
        assert paths(tree) == []
        return
    found = hits(documents, text[-longest:])
    prefixes = Counter(tuple(h[:k]) for h in found for k in range(1, min(4, len(h)) + 1))
    mine = dict(zip(paths(tree), tree.scores[1:], strict=True))
    assert set(prefixes) <= set(mine), "shorter matches only add to it"
    for path, count in prefixes.items():
        assert mine[path] == pytest.approx(count / (prefixes[path[:-1]] if len(path) > 1 else len(found)))


def test_a_text_that_repeats_itself_is_sorted_and_counted_to_its_end():
    index = TextIndex.build([[1] * 500], V)
    assert index.order.tolist() == [*range(500), 500]
    assert index.count([1] * 300) == 201
    assert len(paths(grown(index, [1] * 40, Budget.grown(200, 200, 1), max_match=40))) == 200


def test_tokens_beyond_the_vocabulary_occur_nowhere():
    assert [TextIndex.build([[1, 4]], V).count([t]) for t in (4, V, V + 1, 70_000)] == [1, 0, 0, 0]


def test_the_most_frequent_prefixes_are_kept_first():
    index = TextIndex.build([[0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 4, 4]], V)
    assert paths(grown(index, [0, 1], Budget.grown(1, 4, 4))) == [(2,)]
    assert paths(grown(index, [0, 1], Budget.grown(2, 4, 4))) == [(2,), (2, 3)]
    assert set(paths(grown(index, [0, 1], Budget.grown(4, 4, 4)))) == {(2,), (2, 3), (2, 2), (4,)}


def test_frequent_children_are_found_among_a_thousand():
    rng = np.random.default_rng(0)
    followers = [7] * 3000 + [9] * 1000 + list(range(10, 1010)) * 2
    index = TextIndex.build([np.ravel([[3, 4, t] for t in rng.permutation(followers)])], 2000)
    tree = grown(index, [3, 4], Budget.grown(2, 1, 2))
    assert tree.tokens[1:] == [7, 9]
    assert tree.scores[1:] == [3000 / 6000, 1000 / 6000]


def test_a_trie_has_room_where_every_place_has_a_child_of_its_own():
    """Twice `PROBES` less one places of an interval are looked at in its worst case; nothing is written behind an array."""
    wide = range(2 * PROBES - 1)
    index = TextIndex.build([[1, 2, 10 + a, 100 + b] for a in range(PROBES) for b in wide], 200).arrays
    for most in (1, 2, 8):
        trial = GrownTree.rooted(2, Budget.grown(most, 6, 30))
        limits = Limits(most, 6, 30)
        longer = [np.full(len(x) + 9, -7, x.dtype) for x in new_candidates(limits)]
        low, high = find(index, np.array([1, 2]), 0)
        draft(
            trial.arrays, index, low, high, 2, (most, 0.0, 0.0), limits, Candidates(*(x[:-9] for x in longer))
        )
        assert trial.size == most + 1
        assert all((x[-9:] == -7).all() for x in longer)


def test_a_match_at_the_end_of_a_document_drafts_nothing():
    assert paths(grown(TextIndex.build([[0, 1, 2], [3, 4]], V), [1, 2])) == []


def test_shorter_matches_fill_the_paths_that_are_left():
    index = TextIndex.build([[0, 1, 2, 3], [4, 1, 2, 4]], V)
    assert paths(grown(index, [0, 1, 2], Budget.grown(9, 1, 1))) == [(3,)]
    assert paths(grown(index, [0, 1, 2], Budget.grown(9, 1, 2))) == [(3,), (4,)]


def test_a_saved_index_is_mapped_and_drafts_as_before(tmp_path):
    documents = [np.random.default_rng(i).integers(0, V, 300) for i in range(3)]
    index = TextIndex.build(documents, V)
    index.save(tmp_path / "i")
    again = TextIndex.load(tmp_path / "i")
    assert isinstance(again.order.base.base, np.memmap)
    assert again.num_bytes == 6 * (900 + 3)
    for text in ([0, 1, 2, 3], [4, 4], [1, 0, 1]):
        assert paths(grown(index, text)) == paths(grown(again, text))


def test_large_vocabularies_are_kept_whole():
    index = TextIndex.build([[100_000, 5, 100_000, 7]], 150_000)
    assert (index.count([100_000]), index.count([100_000, 7]), index.tokens.dtype) == (2, 1, np.int32)


@pytest.mark.parametrize("documents", [[], [[]]])
def test_an_empty_corpus_is_refused(documents):
    with pytest.raises(InvalidInputError, match="empty corpus"):
        TextIndex.build(documents, V)


def test_ids_and_places_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="token id 9 was given in document 1"):
        TextIndex.build([[1], [9]], V)
    index = TextIndex.build([[1, 2, 3]], V)
    replace(index, vocab_size=2).save(tmp_path / "ids")
    with pytest.raises(
        InvalidInputError, match="tokens holds numbers from 1 to 5; expected them from 0 to 2"
    ):
        TextIndex.load(tmp_path / "ids")
    replace(index, order=np.array([0, 1, 2, 9], np.uint32)).save(tmp_path / "places")
    with pytest.raises(InvalidInputError, match="order holds numbers from 0 to 9; expected them from 0 to 3"):
        TextIndex.load(tmp_path / "places")


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    TextIndex.build([[1, 2, 3]], V).save(tmp_path / "i")
    whole = (tmp_path / "i").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-1])
    with pytest.raises(InvalidInputError, match="truncated"):
        TextIndex.load(tmp_path / "cut")
    (tmp_path / "other").write_text(json.dumps({"a": 1}))
    with pytest.raises(InvalidInputError, match="was given as a text index"):
        TextIndex.load(tmp_path / "other")


def test_the_embedded_engine_refuses_no_index_and_one_of_another_tokenizer(tmp_path):
    words = load.load_tokenizer(str(pair.target_folder()))
    for name, tokens_of in {"fits": fingerprint(words), "other": "0" * 16}.items():
        TextIndex.build([[1, 2, 3, 4]], 2048, tokens_of=tokens_of).save(tmp_path / name)
    assert (
        Engine.embedded(
            drafter="retrieval", drafter_options={"index": tmp_path / "fits"}
        ).drafter.index.num_tokens
        == 5
    )
    with pytest.raises(IncompatibleError, match="fingerprint 0000"):
        Engine.embedded(drafter="retrieval", drafter_options={"index": tmp_path / "other"})
    with pytest.raises(InvalidInputError, match="without an index"):
        Engine.embedded(drafter="retrieval")


@pytest.mark.parametrize(("most", "least"), [(16, 0), (2, 3)])
def test_lengths_out_of_range_are_refused(most, least):
    with pytest.raises(InvalidInputError, match="1 <= min_match <= max_match"):
        RetrievalDrafter(TextIndex.build([[1]], V), max_match=most, min_match=least)
