"""Outcomes of functions of uniforms: exact by their comparisons, and by bisection; both against probabilities worked out by hand or by sums."""

import numpy as np
import pytest

from polydraft.conformance import branching, intervals
from polydraft.errors import InvalidInputError

ROW = np.array([0.2, 0.0, 0.5, 0.3])


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: int(np.searchsorted(ROW.cumsum(), rng.random(), side="right")),
        lambda rng: int((rng.random() >= ROW.cumsum()).sum()),
        lambda rng: int(np.argmax(ROW.cumsum() > rng.random())),
        lambda rng: rng.choice(4, p=ROW),
        lambda rng: next(x for x, end in enumerate(ROW.cumsum()) if 1 - rng_fixed(rng) < end),
    ],
    ids=["search", "count", "first above", "choice", "from the other end"],
)
def test_a_row_is_drawn_with_its_own_probabilities(draw):
    found = branching.outcomes(draw)
    assert [found.get(x, 0.0) for x in range(4)] == pytest.approx(ROW.tolist(), abs=1e-15)


def rng_fixed(rng):
    """The same uniform in every comparison of one draw."""
    if not hasattr(rng, "kept"):
        rng.kept = rng.random()
    return rng.kept


def test_comparisons_of_one_uniform_know_of_each_other():
    def place(source):
        u = source()
        return u < 0.5, u < 0.25, 4 * u - 1 > 0.2, u <= 0.3 / 0.5

    found = branching.outcomes(place)
    assert sum(found.values()) == pytest.approx(1)
    assert found[True, True, False, True] == pytest.approx(0.25)
    assert found[True, False, True, True] == pytest.approx(0.2)
    assert found[False, False, True, False] == pytest.approx(0.4)


def test_two_uniforms_are_independent():
    found = branching.outcomes(lambda rng: tuple((rng.random(2) < [0.3, 0.6]).tolist()))
    assert found == pytest.approx(
        {(True, True): 0.18, (True, False): 0.12, (False, True): 0.42, (False, False): 0.28}
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda source: float(source()) < 0.5, "as a number"),
        (lambda source: source() < source(), "two uniforms"),
        (lambda source: np.log(source()) < 0, "Uniform|as a number|loop of ufunc"),
        (lambda source: source() < np.random.default_rng().random(), "other numbers"),
    ],
    ids=["number", "two", "logarithm", "hidden noise"],
)
def test_what_cannot_be_enumerated_is_refused(function, words):
    with pytest.raises((InvalidInputError, TypeError), match=words):
        branching.outcomes(function)


def test_bisection_finds_the_sums_of_comparisons():
    def of_source(source):
        u, v, w = source(), source(), source()
        return 0 if u < 0.013 else (1 + (v < 0.4) if u < 0.7 else 3 + (w > 0.99))

    def of_array(u):
        return 0 if u[0] < 0.013 else int(1 + (u[1] < 0.4) if u[0] < 0.7 else 3 + (u[2] > 0.99))

    exact = branching.outcomes(of_source)
    assert intervals.outcomes(of_array, 3) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("small", [1e-3, 1e-5])
def test_bisection_finds_tokens_that_are_rarer_than_its_grid(small):
    row = np.array([0.3, small, 0.7 - 2 * small, small])

    def draw(u):
        return int(np.searchsorted(row.cumsum(), u[0], side="right"))

    found = intervals.outcomes(draw, 1, grid=8)
    assert [found[x] for x in range(4)] == pytest.approx(row.tolist(), abs=1e-9)


def test_bisection_refuses_a_function_with_noise_of_its_own():
    rng = np.random.default_rng(0)
    with pytest.raises(InvalidInputError, match="its uniforms alone"):
        intervals.outcomes(lambda u: int(rng.integers(1_000_000)), 1)
