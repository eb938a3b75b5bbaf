"""`python -m studies.load` counts what its own clients were streamed."""

import asyncio

import pytest

from polydraft.errors import PolydraftError
from studies.load.__main__ import questions
from studies.load.measurement import load, stretches
from tests.server.conftest import serving as in_process
from tests.server.conftest import small_engine


def test_all_streams_are_timed_and_counted_and_a_refusal_is_told():
    with in_process(small_engine()) as served:
        found = asyncio.run(load("ours", served.url, questions((), 5), streams=3, max_tokens=7, chat=False))
        assert found.tokens == 35 and len(found.first) == 5 and min(found.first) > 0
        assert 0 < len(found.between) <= 30 and found.seconds > max(found.first)
        assert not found.stretch  # an answer has no eight tokens behind its first
        with pytest.raises(PolydraftError, match="400"):
            asyncio.run(load("ours", served.url, ["x"], streams=1, max_tokens=-2, chat=False))


def test_steps_of_several_tokens_are_waited_for_as_those_of_single_ones_that_come_as_fast():
    """Gaps between events are four times as long; a reader waits for the next tokens as long."""
    plain = stretches([float(n) for n in range(41)], [1.0] * 41)
    drafted = stretches([4.0 * n for n in range(11)], [4.0] * 11)
    assert set(plain) == set(drafted) == {1.0}
    assert max(stretches([0.0, 4.0, 14.0, 18.0], [4.0] * 4)) == 14 / 8  # one step took ten seconds more
