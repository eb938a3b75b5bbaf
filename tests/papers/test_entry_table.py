"""The bounded table against a plain dictionary, and what its files are refused for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.errors import InvalidInputError
from polydraft.papers.entry_table import Table, claim, find, lift, seat

WORDS = 2
keys = st.integers(0, 9)
entries = st.tuples(st.integers(0, 3), st.integers(0, 3))


def put(table, key, entry, num_known):
    """Store an entry as the foremost of its key, in place of one that begins with the same words."""
    at = claim(table.arrays, key)
    j = seat(table.arrays, at, entry, num_known)
    table.arrays.entries[at, j] = entry
    lift(table.arrays, at, j, 0)


def put_plainly(rows, max_keys, width, key, entry, num_known):
    """The same with a dictionary, whose keys are in the order of use."""
    row = rows.pop(key, [])
    same = [e for e in row if e[:num_known] == entry[:num_known]]
    rows[key] = [entry, *(e for e in row if e not in same)][:width]
    if len(rows) > max_keys:
        del rows[next(iter(rows))]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(keys, entries), max_size=80), st.integers(1, 6), st.integers(1, 4), st.integers(1, 2)
)
def test_a_table_equals_a_dictionary_with_bounds(puts, max_keys, width, num_known):
    table = Table(max_keys, width, WORDS)
    rows = {}
    for key, entry in puts:
        put(table, key, entry, num_known)
        put_plainly(rows, max_keys, width, key, entry, num_known)
        assert {
            k: list(map(tuple, table.entries(k).tolist())) for k in range(10) if find(table.arrays, k) >= 0
        } == rows
    assert (table.num_keys, table.num_entries) == (len(rows), sum(map(len, rows.values())))
    assert table.to_arrays()["key"].tolist() == list(rows), "the least recently used first"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(keys, entries), max_size=60), st.integers(1, 6))
def test_rows_that_are_put_in_again_are_those_taken_out_and_of_too_many_the_latest(puts, fewer):
    table = Table(8, 3, WORDS)
    again = Table(8, 3, WORDS)
    smaller = Table(fewer, 3, WORDS)
    for key, entry in puts:
        put(table, key, entry, WORDS)
    again.read_arrays(**table.to_arrays())
    smaller.read_arrays(**table.to_arrays())
    assert all(
        np.array_equal(a, b)
        for a, b in zip(table.to_arrays().values(), again.to_arrays().values(), strict=True)
    )
    assert smaller.to_arrays()["key"].tolist() == table.to_arrays()["key"].tolist()[-fewer:]
    assert all(
        np.array_equal(smaller.entries(k), table.entries(k)) for k in smaller.to_arrays()["key"].tolist()
    )


def test_memory_does_not_grow():
    table = Table(16, 4, WORDS)
    before = table.num_bytes
    for key in range(1000):
        put(table, key, (key % 7, 1), WORDS)
    assert (table.num_keys, table.num_bytes) == (16, before)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_table_without_room_is_refused(sizes):
    with pytest.raises(InvalidInputError, match="expected at least 1 each"):
        Table(*sizes)
