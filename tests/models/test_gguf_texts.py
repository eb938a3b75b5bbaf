"""Texts of a list are found where stepping over them one by one finds them, whatever they hold and wherever a piece ends."""

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polydraft.models.store import gguf_texts
from polydraft.models.store.gguf_texts import LENGTH, text_starts

TEXTS = st.lists(
    st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            [b"", b"\0", b"\0" * 9, b"\1" + b"\0" * 7, b"ab" * 200, b"\5" + b"\0" * 7 + b"hello"]
        ),
    ),
    max_size=40,
)


def encoded(texts):
    return b"".join(LENGTH.pack(len(text)) + text for text in texts)


def one_by_one(data, start, count):
    starts = [start]
    for _ in range(count):
        starts.append(starts[-1] + LENGTH.size + LENGTH.unpack_from(data, starts[-1])[0])
    return starts


@given(texts=TEXTS, before=st.binary(max_size=5), after=st.binary(max_size=20), piece=st.integers(1, 60))
@example([b"a"] * 30, b"", b"", 17)
@example([b"a" * 255, b"b" * 256, b"c"], b"x", b"\0" * 20, 1 << 20)
def test_texts_are_found_as_by_stepping_over_each(texts, before, after, piece):
    data = before + encoded(texts) + after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_texts, "PIECE", piece)
        found = text_starts(data, len(before), len(texts))
    assert found.dtype == np.int64
    assert found.tolist() == one_by_one(data, len(before), len(texts))


@pytest.mark.parametrize("count", [3, 4, 1 << 60])
def test_a_list_that_ends_early_is_an_error(count):
    data = encoded([b"ab", b"cd"])
    with pytest.raises(struct.error):
        text_starts(data, 0, count)


def test_a_length_beyond_all_data_is_told_by_where_it_ends():
    data = encoded([b"ab"]) + LENGTH.pack(1 << 40)
    assert text_starts(data, 0, 2)[-1] > len(data)
    with pytest.raises((struct.error, OverflowError)):
        text_starts(encoded([b"ab"]) + LENGTH.pack((1 << 64) - 1), 0, 3)
