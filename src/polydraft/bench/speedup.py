"""Speed-up over interleaved turns: the median ratio within a turn, with an interval that needs no distribution.

The median of n turns lies between the k-th smallest and the k-th largest with probability 1 - 2 P(Binomial(n, 1/2) < k) (the sign test, inverted:
David & Nagaraja, Order Statistics, 7.1). Below six turns that is less than 95% for all of them, so there is no interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

ROUNDS = 6
"""The fewest that have a 95% interval."""


@dataclass(frozen=True)
class Speedup:
    """ratio: median over turns.  interval: of 95%, or None where there are too few turns.

    Example:
        >>> print(Speedup.of([1.4, 1.5, 1.3, 1.6, 1.4, 1.5]))
        1.45 [1.30, 1.60]
        >>> print(Speedup.of([0.8, 1.5, 0.7, 1.6, 1.1, 1.2]))
        too noisy to tell [0.70, 1.60]
    """

    ratio: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Speedup":
        """Of what each turn had."""
        ordered = sorted(ratios)
        n = len(ratios)
        k = 0
        beyond = 0
        while 2 * (beyond + comb(n, k)) <= 0.05 * 2**n:
            beyond += comb(n, k)
            k += 1
        return cls(median(ordered), (ordered[k - 1], ordered[-k]) if k else None)

    @property
    def doubt(self) -> str | None:
        """Why the turns do not tell which is faster, or None."""
        if self.interval is None:
            return "too few repetitions to tell"
        return "too noisy to tell" if self.interval[0] <= 1.0 <= self.interval[1] else None

    def __str__(self) -> str:
        text = self.doubt or f"{self.ratio:.2f}"
        return text if self.interval is None else "{} [{:.2f}, {:.2f}]".format(text, *self.interval)


def repetitions(num_prompts: int) -> int:
    """The fewest repetitions of so many prompts that have an interval.

    Example:
        >>> repetitions(2), repetitions(50)
        (3, 1)
    """
    return -(-ROUNDS // num_prompts)
