"""The rate of drafting while verifying, against the simulator that drives the very machine of the real workers."""

import random

import pytest

from polydraft.errors import InvalidInputError
from polydraft.papers.amusd.lead import Lead
from studies.theory.asynchronous import asynchronous_rate, synchronous_rate
from tests.papers.amusd.simulator import simulate


def simulated(acceptance, seconds, passes, count=4000, **sizes):
    """Tokens per second of texts of 200 tokens with acceptances drawn at random; token 1 is a right draft."""
    chance = random.Random(0)
    total = 0.0

    def verify(text, items):
        kept = next((n for n in range(len(items)) if chance.random() >= acceptance), len(items))
        last = 1 if kept == len(items) and chance.random() < acceptance else 0
        return [1] * kept + [last], kept

    cap = sizes.pop("cap")
    for _ in range(count // 200):
        total += simulate(
            Lead([1], cap),
            lambda text, start: (1, None),
            verify,
            draft_seconds=lambda: seconds,
            verify_seconds=passes,
            length=201,
            **sizes,
        )
    return count / total


@pytest.mark.parametrize(
    ("acceptance", "seconds", "sizes"),
    [
        (0.3, 0.3, {"min_lead": 2, "depth": 5, "cap": 12}),
        (0.9, 1.0, {"min_lead": 1, "depth": 4, "cap": 8}),
        (0.6, 5.3, {"min_lead": 1, "depth": 3, "cap": 8}),
    ],
)
def test_the_rate_is_the_simulators(acceptance, seconds, sizes):
    found = simulated(acceptance, seconds, lambda n: 3 + 0.21 * n, **sizes)
    assert asynchronous_rate(acceptance, seconds, lambda n: 3 + 0.21 * n, **sizes) == pytest.approx(
        found, rel=0.04
    )


def test_drafting_while_verifying_wins_at_high_acceptance_and_loses_at_low():
    sizes = {"min_lead": 2, "depth": 5, "cap": 12}
    for acceptance, wins in ((0.2, False), (0.9, True)):
        best = max(synchronous_rate(acceptance, 0.3, lambda n: 3 + 0.2 * n, depth) for depth in range(1, 12))
        assert (asynchronous_rate(acceptance, 0.3, lambda n: 3 + 0.2 * n, **sizes) > best) == wins


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError, match="1 <= min_lead <= depth <= cap"):
        asynchronous_rate(0.5, 1.0, lambda n: 1.0, min_lead=3, depth=2, cap=4)
