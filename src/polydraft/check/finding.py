"""One test of `polydraft check`, and the size of mistake that it would have shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


def two_sided(z: float) -> float:
    """Probability that a standard normal is farther from 0 than z.

    Example:
        >>> round(two_sided(1.96), 3)
        0.05
    """
    return math.erfc(abs(z) / math.sqrt(2))


def upper_quantile(p: float) -> float:
    """What a standard normal exceeds with probability p, 0 < p < 1."""
    return -NormalDist().inv_cdf(p)


def kolmogorov_smirnov(u: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Largest distance of a sample's distribution function from that of the uniform distribution on [0, 1], and its p-value.

    Kolmogorov's series with Stephens' correction for small samples (1970): within a quarter of the exact p-value from 30 values on, where that is above 1e-6.

    Example:
        >>> round(kolmogorov_smirnov([0.1, 0.3, 0.5, 0.7, 0.9])[0], 3)
        0.1
    """
    values = np.sort(np.asarray(u, np.float64))
    n = len(u)
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - values).max(), (values - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    k = np.arange(
        1, 101
    )  # terms of the series; from the fourth on they are below 1e-10 where the value is above 1
    p_value = 2 * float((np.where(k % 2, 1, -1) * np.exp(-2 * (k * scaled) ** 2)).sum())
    return distance, min(max(p_value, 0.0), 1.0) if scaled > 0.2 else 1.0


POWER = 0.9
"""Probability with which a mistake of the size that is printed would have been found."""


@dataclass(frozen=True)
class Finding:
    """One test: what was looked at, on how many steps or tokens, how far off (a lower bound of the total variation distance
    for verifiers, the Kolmogorov-Smirnov distance for texts), how plausible that is by chance, and the standard error of the effect."""

    what: str
    count: int
    effect: float
    p_value: float
    error: float = 0.0

    @property
    def look(self) -> str:
        """What it is a test of, the name before the first comma."""
        return self.what.partition(",")[0]

    def detectable(self, level: float) -> float:
        """Effect that so many steps show at this level with probability `POWER`: of a mean, or of a share of steps where it is larger.

        Example:
            >>> round(Finding("verifier, position 1, best", 900, 0.0, 1.0, error=0.01).detectable(1e-6), 3)
            0.062
        """
        return max(
            (upper_quantile(level / 2) + upper_quantile(1 - POWER)) * self.error,
            1 - (1 - POWER) ** (1 / self.count),
        )
