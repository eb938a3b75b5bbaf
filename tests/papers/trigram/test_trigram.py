"""ADED: the table, its online updates, and the drafter."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft import Engine
from polydraft.core import Budget
from polydraft.drafters.text import index_file
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.papers.trigram.drafter import TrigramDrafter, TrigramStore, TrigramTable
from polydraft.papers.trigram.table import WIDTH
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.match import emitted_probs
from tests.drafters.sessions import distributions, models, play, requests, trigram_table

WIDE = Budget.grown(64, 4, width=24)
RULES = {"window": 16, "bump": 0.04, "cap": 3.0}
corpora = st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=6)


def naive(documents, top):
    """Successors of each pair by counting in dictionaries."""
    counts = {}
    for text in documents:
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            counts.setdefault((a, b), Counter())[c] += 1
    ranked = {pair: sorted(n.items(), key=lambda x: (-x[1], x[0]))[:top] for pair, n in counts.items()}
    return {pair: [(c, n / sum(counts[pair].values())) for c, n in found] for pair, found in ranked.items()}


@settings(max_examples=40, deadline=None)
@given(corpora, st.integers(1, 4))
def test_the_table_equals_a_naive_count_and_no_triple_crosses_documents(documents, top):
    if not any(documents):
        return
    table = trigram_table(documents, 4, top=top)
    expected = naive(documents, top)
    for a in range(4):
        for b in range(4):
            found = table.successors(a, b)
            assert [c for c, _ in found] == [c for c, _ in expected.get((a, b), [])]
            assert [w for _, w in found] == pytest.approx([w for _, w in expected.get((a, b), [])])


def naive_bumps(table, rounds, window, bump, cap):
    weights = {}
    for tokens in rounds:
        last = tokens[-window:]
        for a, b, c in zip(last, last[1:], last[2:], strict=False):
            row = weights.setdefault((a, b), dict(table.successors(a, b)))
            row[c] = min(cap, row.get(c, 0.0) + bump)
    return weights


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=3, max_size=60), st.integers(3, 8))
def test_overlapping_windows_bump_as_a_dictionary_does(text, window):
    table = trigram_table([[0, 1, 2, 3, 0, 1, 3]], 5)
    store = TrigramStore(64)
    rounds = [text[:i] for i in range(3, len(text) + 1)]
    for tokens in rounds:
        store.bump(table, tokens, window=window, bump=0.04, cap=0.5)
    for (a, b), row in naive_bumps(table, rounds, window, 0.04, 0.5).items():
        assert dict(store.successors(a, b)) == pytest.approx(row, abs=1e-5)
        found = [w for _, w in store.successors(a, b)]
        assert found == sorted(found, reverse=True)


def test_weights_stop_exactly_at_the_cap():
    store = TrigramStore(4)
    for _ in range(100):
        store.bump(TrigramTable.empty(), [1, 2, 3], window=3, bump=0.04, cap=3.0)
    assert store.successors(1, 2) == [(3, 3.0)]


def test_a_full_row_loses_its_lightest_successor():
    store = TrigramStore(4)
    for c in range(WIDTH + 1):
        for _ in range(1 if c == 5 else 2):
            store.bump(TrigramTable.empty(), [1, 2, c], window=3, bump=0.04, cap=3.0)
    found = [c for c, _ in store.successors(1, 2)]
    assert len(found) == WIDTH
    assert WIDTH in found
    assert 5 not in found


def test_a_full_store_forgets_the_pair_bumped_longest_ago():
    store = TrigramStore(3)
    table = TrigramTable.empty()
    for a in (1, 2, 3, 1, 4):
        store.bump(table, [a, 7, 8], window=3, bump=0.1, cap=3.0)
    assert [bool(store.successors(a, 7)) for a in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.num_keys == 3


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=80),
    st.integers(1, 9),
)
def test_bounded_store_equals_an_ordered_dictionary(triples, most):
    store = TrigramStore(most)
    table = TrigramTable.empty()
    expected = {}
    for a, b, c in triples:
        store.bump(table, [a, b, c], window=3, bump=0.25, cap=3.0)
        row = expected.pop((a, b), {})
        row[c] = min(3.0, row.get(c, 0) + 0.25)
        expected[a, b] = row
        if len(expected) > most:
            del expected[next(iter(expected))]
    assert {(a, b): dict(store.successors(a, b)) for a, b in expected} == expected
    assert store.num_keys == len(expected)
    again = TrigramStore(most)
    again.read_arrays(*store.to_arrays().values())
    assert all(
        np.array_equal(x, y)
        for x, y in zip(store.to_arrays().values(), again.to_arrays().values(), strict=True)
    )


TABLE = trigram_table([[0, 1, 2, 3, 4, 0, 1, 2, 4, 3, 0, 1, 3, 2, 0, 1, 2, 3, 1, 0, 1, 4] * 3], 5)


def drafted(drafter, state, budget=WIDE):
    return drafter.propose([state], [budget]).tree.tokens[0].tolist()


def test_a_repeated_phrase_changes_the_draft():
    drafter = TrigramDrafter(TABLE, window=5, bump=0.5)
    state, *_ = drafter.start(requests([0, 1]))
    assert drafted(drafter, state, Budget.grown(1, 1))[1] == 2
    state, *_ = drafter.start(requests([4, 0, 1, 4, 0, 1]))
    assert drafted(drafter, state, Budget.grown(1, 1))[1] == 4


def test_a_static_table_learns_nothing():
    drafter = TrigramDrafter(TABLE, bump=0.0)
    state, *_ = drafter.start(requests([0, 1, 4] * 9 + [0, 1]))
    assert state.store.num_keys == 0
    assert drafted(drafter, state, Budget.grown(1, 1))[1] == 2


@pytest.mark.parametrize("prompt", [[3], [4, 4]])
def test_a_short_context_or_an_unknown_pair_gives_an_empty_draft(prompt):
    drafter = TrigramDrafter(TABLE)
    state, *_ = drafter.start(requests(prompt))
    assert drafted(drafter, state) == prompt[-1:]


def test_redrawing_after_a_failed_match_is_biased_and_the_match_rule_is_not():
    """The released code's sampling: draw y for each path row, and draw anew if none of them matches."""
    p = np.array([0.5, 0.3, 0.2], dtype=np.float64)
    drafter = TrigramDrafter(trigram_table([[1, 2, 0]], 3))
    draft = drafter.propose(drafter.start(requests([1, 2])), [Budget.grown(1, 1)])
    assert draft.tree.tokens.tolist() == [[2, 0]]
    targets = np.broadcast_to(p, (1, 2, 3))

    def tv(rows):
        accept = 1 - (1 - p[0]) ** rows
        distribution = (1 - accept) * p + accept * np.array([1.0, 0, 0])
        return float(np.abs(distribution - p).sum() / 2)

    assert (tv(1), tv(3)) == pytest.approx((0.25, 0.4375))
    verdict = registry.verifier("match")(draft, targets)
    distribution = verdict.stop[0, 0] * verdict.after(np.array([0]))[0] + verdict.stop[0, 1] * np.array(
        [1.0, 0, 0]
    )
    np.testing.assert_allclose(distribution, p, rtol=0, atol=1e-12)
    assert isinstance(registry.verifier("match"), PerNode)
    assert np.array_equal(emitted_probs(p[None], None, draft.tree.tokens[:, 1:]), p[None])


def test_a_shared_store_teaches_the_next_request_and_a_private_one_does_not():
    text = [0, 1, 4, 0, 1, 4, 0, 1, 4]
    for store, expected in ((TrigramStore(64), 4), (None, 2)):
        drafter = TrigramDrafter(TABLE, store=store, bump=0.5)
        drafter.release(drafter.start(requests(text)))
        (state,) = drafter.start(requests([3, 0, 1]))
        assert drafted(drafter, state, Budget.grown(1, 1))[1] == expected


def test_threads_share_a_store_without_losing_a_bump():
    store = TrigramStore(256)
    table = TrigramTable.empty()

    def learn(base):
        for i in range(400):
            store.bump(table, [1, 2, 3], window=3, bump=0.001953125, cap=1e6)
            store.bump(table, [base, i % 32, 5], window=3, bump=1.0, cap=1e6)

    workers = [threading.Thread(target=learn, args=(10 + i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert store.successors(1, 2) == [(3, 1600 * 0.001953125)]
    assert store.num_keys == 1 + 4 * 32


def test_a_saved_store_drafts_as_before(tmp_path):
    store = TrigramStore(64)
    drafter = TrigramDrafter(TABLE, store=store)
    states = drafter.start(requests([0, 1, 2]))
    play(drafter, states, [[0, 1, 2]], models()[0], [WIDE], 10)
    store.save(tmp_path / "store", 5)
    again = TrigramDrafter(TABLE, store=TrigramStore.load(tmp_path / "store", 64), window=3)
    same = TrigramDrafter(TABLE, store=store, window=3)
    for prompt in ([0, 1], [1, 2], [3, 4]):
        assert drafted(again, *again.start(requests(prompt))) == drafted(same, *same.start(requests(prompt)))


def test_the_embedded_engine_refuses_a_table_of_another_tokenizer(tmp_path):
    words = load.load_tokenizer(str(pair.target_folder()))
    for name, (size, tokens_of) in {
        "fits": (2048, fingerprint(words)),
        "other": (2048, "0" * 16),
        "large": (4096, ""),
    }.items():
        TextIndex.build([[1, 2, 3, 4]], size, tokens_of=tokens_of).save(tmp_path / name)
    assert (
        Engine.embedded(
            drafter="trigram", drafter_options={"index": tmp_path / "fits"}
        ).drafter.table.num_entries
        == 2
    )
    with pytest.raises(IncompatibleError, match="fingerprint 0000"):
        Engine.embedded(drafter="trigram", drafter_options={"index": tmp_path / "other"})
    with pytest.raises(IncompatibleError, match="vocabulary of 4096"):
        Engine.embedded(drafter="trigram", drafter_options={"index": tmp_path / "large"})


@pytest.mark.parametrize("kind", [SuffixStore, TrigramStore])
def test_the_embedded_engine_refuses_a_saved_store_of_another_tokenizer(tmp_path, kind):
    words = load.load_tokenizer(str(pair.target_folder()))
    name = "suffix" if kind is SuffixStore else "trigram"
    for file, tokens_of in {"fits": fingerprint(words), "other": "0" * 16}.items():
        kind().save(tmp_path / file, 2048, tokens_of)
    fits, other = (kind.load(tmp_path / file) for file in ("fits", "other"))
    assert Engine.embedded(drafter=name, drafter_options={"store": fits}).drafter.store is fits
    with pytest.raises(IncompatibleError, match="fingerprint 0000"):
        Engine.embedded(drafter=name, drafter_options={"store": other})


def test_more_successors_than_a_row_has_are_refused():
    with pytest.raises(InvalidInputError, match="top=17"):
        trigram_table([[1, 2, 3]], 5, top=17)


@pytest.mark.parametrize(
    "bad", [{"iterations": 0}, {"num_paths": 0}, {"c1": -1}, {"bump": 4.0}, {"window": 2}, {"max_pairs": 0}]
)
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        TrigramDrafter(**bad)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("size", WIDTH + 1, "size holds"),
        ("size", -1, "size holds"),
        ("weight", np.nan, "weight holds"),
        ("weight", np.inf, "weight holds"),
        ("token", 9, "token holds"),
        ("key", -1, "key holds"),
        ("key", 9, "< 5"),
        ("key", (1 << 32) + 2, "twice"),
    ],
)
def test_a_store_with_rows_that_cannot_be_is_refused(name, value, words, tmp_path):
    store = TrigramStore(8)
    store.bump(TABLE, [0, 1, 2, 3], window=4, bump=0.5, cap=3.0)
    store.save(tmp_path / "store", 5)
    assert TrigramStore.load(tmp_path / "store").successors(0, 1) == store.successors(0, 1)
    arrays = dict(index_file.load(tmp_path / "store", "trigram-store", width=WIDTH).arrays)
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] = value
    index_file.save(tmp_path / "store", "trigram-store", arrays, vocab_size=5, tokens_of="")
    with pytest.raises(InvalidInputError, match=words):
        TrigramStore.load(tmp_path / "store")


def test_distributions_of_a_searched_tree_are_asked_at_every_node():
    target, _ = models()
    drafter = TrigramDrafter(TABLE)
    draft = drafter.propose(drafter.start(requests([0, 1])), [WIDE])
    p, _ = distributions(target, draft, [[0, 1]])
    assert p.shape[:2] == draft.tree.tokens.shape
    assert draft.tree.num_nodes > 10
