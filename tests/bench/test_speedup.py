"""Speed-ups with their intervals: of the stated probability, and without a claim where rounds do not bear one."""

from itertools import product

import pytest

from polydraft.bench.speedup import ROUNDS, Speedup, repetitions


@pytest.mark.parametrize("n", range(ROUNDS, 14))
def test_the_interval_is_the_narrowest_that_holds_the_median_in_95_percent_of_all_patterns_of_rounds_below_and_above_it(
    n,
):
    found = Speedup.of([float(i) for i in range(n, 0, -1)])
    assert found.interval is not None
    k = int(found.interval[0])
    assert found.interval == (k, n + 1 - k)
    below = [sum(pattern) for pattern in product((0, 1), repeat=n)]

    def covers(k):
        return sum(k <= number <= n - k for number in below) / len(below)

    assert covers(k) >= 0.95 > covers(k + 1)


def test_rounds_that_are_all_faster_tell_a_ratio_with_its_interval():
    found = Speedup.of([1.4, 1.5, 1.3, 1.6, 1.4, 1.5])
    assert found.doubt is None and str(found) == "1.45 [1.30, 1.60]"
    assert str(Speedup.of([0.8] * 5 + [0.9])) == "0.80 [0.80, 0.90]"


def test_an_interval_that_holds_1_is_too_noisy_to_tell():
    assert str(Speedup.of([0.85, 0.8, 0.9, 0.7, 0.85, 1.1])) == "too noisy to tell [0.70, 1.10]"


def test_one_outlier_of_nine_rounds_does_not_hide_a_difference():
    assert str(Speedup.of([1.4, 1.5, 1.3, 1.6, 1.4, 1.5, 1.4, 1.4, 0.1])) == "1.40 [1.30, 1.50]"


def test_fewer_rounds_than_an_interval_needs_tell_nothing():
    for n in range(1, 9):
        few = Speedup.of([2.0] * n)
        assert (str(few) == "too few repetitions to tell") == (n < ROUNDS) == (few.interval is None)
    assert all(repetitions(n) * n >= ROUNDS > (repetitions(n) - 1) * n for n in range(1, 20))
