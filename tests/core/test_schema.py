"""The one check of files: what fits passes, and the first thing that does not is named."""

import re

import numpy as np
import pytest

from polydraft.files.schema import (
    ANYTHING,
    CONFIG,
    PROFILE,
    PROMPT,
    Array,
    ListOf,
    Number,
    Record,
    String,
    fault,
    read_json,
)

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (3, Number(0, 3), None),
        (4, Number(0, 3), "it is 4; expected an integer from 0 to 3"),
        (True, Number(), "it is True; expected an integer >= 0"),
        (1.0, Number(), "it is 1.0"),
        (10**400, Number(), "it is an integer of 1329 bits"),
        (NAN, Number(whole=False), "it is nan; expected a number >= 0"),
        (INF, Number(whole=False), "it is inf"),
        (2, Number(0, "n - 1"), "it is 2; expected an integer from 0 to 1"),
        ("ab", String("[ab]*"), None),
        ("abc", String("[ab]*"), "it is 'abc'"),
        ("\ud800", String(), "it is '\\\\ud800'; expected text"),
        ([1, 2], ListOf(Number(), "n", "n"), None),
        ([1], ListOf(Number(), "n", "n"), "it is \\[1\\]; expected a list of 2 to 2"),
        ([1, -2], ListOf(Number(), "n", "n"), "it\\[1\\] is -2"),
        ({"a": {"b": 1}}, Record({"a": Record({"b": Number()})}), None),
        ({"a": {"b": []}}, Record({"a": Record({"b": Number()})}), "a.b is \\[\\]"),
        ({"a": 1, "c": 1}, Record({"a": ANYTHING}), "it has the names \\['a', 'c'\\]; expected \\['a'\\]"),
        ({}, Record({"a": ANYTHING}, more=True), "it has the names \\[\\]"),
        ({"c": 1}, Record({"a": ANYTHING}, more=True, partial=True), None),
        (None, (None, Number()), None),
        ("x", (None, Number()), "it is 'x'; expected null or an integer >= 0"),
        ([NAN], (None, ListOf(Number(whole=False))), "it\\[0\\] is nan"),
    ],
)
def test_what_does_not_fit_is_named(value, schema, said):
    found = fault(value, schema, {"n": 2})
    assert found is None if said is None else re.match(said, str(found)), found


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([[0, 1], [1, 0]], np.int32), None),
        (np.zeros((0, 2), np.int32), None),
        (np.zeros((2, 2), np.int64), "it holds int64 of 2 dimensions; expected int32 or float32 of 2"),
        (np.zeros(2, np.int32), "it holds int32 of 1 dimensions"),
        (np.zeros((2, 3), np.int32), "it has the shape (2, 3); expected (2, 2)"),
        (np.array([[0, -1]], np.int32), "it holds numbers from -1 to 0; expected them from 0 to 1"),
        (np.array([[0, np.nan]], np.float32), "it holds numbers from nan to nan"),
        (np.array([[0, np.inf]], np.float32), "it holds numbers from 0.0 to inf"),
    ],
)
def test_arrays_are_checked_by_format_shape_and_range(array, said):
    found = fault(array, Array(("int32", "float32"), ("T", "n"), 0, "n - 1"), {"n": 2})
    assert found is None if said is None else str(found).startswith(said)


def test_infinity_is_beyond_every_bound_in_any_format():
    assert fault(np.array([np.inf], np.float32), Array(("float32",), ("T",), 0)) is not None


def test_a_size_is_one_size_in_all_arrays():
    schema = Record({"a": Array(("int64",), ("T",)), "b": Array(("int64",), ("T",), 0, "T - 1")})
    assert fault({"a": np.zeros(3, np.int64), "b": np.array([0, 2, 1])}, schema) is None
    assert (
        fault({"a": np.zeros(3, np.int64), "b": np.array([0, 2])}, schema)
        == "b has the shape (2,); expected (3,)"
    )
    assert (
        fault({"a": np.zeros(2, np.int64), "b": np.array([0, 2])}, schema)
        == "b holds numbers from 0 to 2; expected them from 0 to 1"
    )


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 10_000])
def test_damaged_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="it is damaged where JSON was expected"):
        read_json(text)


def test_no_schema_takes_nonsense():
    for schema in (PROFILE, CONFIG, PROMPT):
        assert all(
            fault(nonsense, schema, {"depths": 1, "places": 1, "features": 1})
            for nonsense in ([], 1, None, "x")
        )
