"""P-values without scipy agree with scipy's."""

import numpy as np
import pytest
from scipy import stats

from polydraft.check.finding import kolmogorov_smirnov, two_sided, upper_quantile


@pytest.mark.parametrize("n", [30, 300, 5000])
@pytest.mark.parametrize("power", [1.0, 0.9, 0.7, 0.5])
def test_the_distance_from_the_uniform_distribution_has_the_p_value_of_scipy(n, power):
    for seed in range(5):
        u = np.random.default_rng(seed).random(n) ** power
        exact = stats.kstest(u, "uniform")
        distance, p_value = kolmogorov_smirnov(u)
        assert distance == pytest.approx(exact.statistic)
        assert p_value == pytest.approx(exact.pvalue, rel=0.25) or max(p_value, exact.pvalue) < 1e-6


def test_tails_of_the_normal_distribution_are_those_of_scipy():
    for z in (0.0, 0.5, -3.0, 10.0):
        assert two_sided(z) == pytest.approx(2 * stats.norm.sf(abs(z)))
    for p in (1e-12, 1e-5, 0.1, 0.5, 0.9):
        assert upper_quantile(p) == pytest.approx(stats.norm.isf(p), abs=1e-12)
