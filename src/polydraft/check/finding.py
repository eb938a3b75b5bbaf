"""One test of `polydraft check`, and the size of mistake that it would have shown."""

from dataclasses import dataclass

from polydraft.check.p_values import upper_quantile

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
