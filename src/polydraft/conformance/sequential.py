"""Does a sample of texts have a given distribution? A test that may be looked at after every sample, with an exact false-alarm rate.

A wealth that starts at 1 bets on other distributions: half of it on all of them (a Dirichlet mixture, a half a cell, as of Krichevsky & Trofimov 1981), half on
the known mistakes in equal parts. Its expectation is at most 1 whatever happens before, if the distribution is the given one. So (Ville 1939)

    Pr(wealth >= 1 / level at any time) <= level            p-value = 1 / the largest wealth so far, valid whenever one stops

No limit theorem is used: the bound holds for small samples and empty cells. For the other side, with probability 1 - level at all times at once,

    n KL(frequencies || truth) <= log(cases / level) + log Pr(sample | frequencies) - log Pr(sample | mixture)
    TV(truth, given) <= TV(frequencies, given) + sqrt(KL / 2)                       (Pinsker)
"""

from collections.abc import Mapping, Sequence
from math import inf, lgamma, log, sqrt

import numpy as np

IMPOSSIBLE = -1e12
"""Logarithm of a probability of 0."""
PRIOR = 0.5
"""Of each cell of the Dirichlet mixture."""


class Evidence:
    """Counts of texts in several cases, and what they say. expected: probabilities of the texts, a flat array a case.  mistakes: the same of each known mistake."""

    def __init__(self, expected: Sequence[np.ndarray], mistakes: Mapping[str, Sequence[np.ndarray]]) -> None:
        self.expected = [np.asarray(probs, np.float64).ravel() for probs in expected]
        self.mistakes = {name: [np.ravel(probs) for probs in rows] for name, rows in mistakes.items()}
        self.counts = [np.zeros(len(probs), np.int64) for probs in self.expected]
        self.largest_log_wealth = 0.0
        rows = [self.expected, *self.mistakes.values()]
        with np.errstate(divide="ignore"):
            logarithms = np.log(np.stack([np.concatenate(row) for row in rows]))
        self._logarithms = np.maximum(logarithms, IMPOSSIBLE)

    def add(self, case: int, texts: np.ndarray) -> None:
        """Count texts of a case, by their number, and look at the wealth."""
        self.counts[case] += np.bincount(texts, minlength=len(self.counts[case]))
        self.largest_log_wealth = max(self.largest_log_wealth, self.log_wealth)

    @property
    def samples(self) -> int:
        return int(sum(counts.sum() for counts in self.counts))

    @property
    def log_likelihoods(self) -> dict[str, float]:
        """Of the counts, under each known mistake; below `IMPOSSIBLE` where a text was seen that it cannot make."""
        likelihoods = self._logarithms[1:] @ np.concatenate(self.counts)
        return dict(zip(self.mistakes, likelihoods.tolist(), strict=True))

    @property
    def log_wealth(self) -> float:
        """Of the bets against the given distribution."""
        here = float(self._logarithms[0] @ np.concatenate(self.counts))
        if here <= IMPOSSIBLE:
            return inf
        bets = [log(0.5) + sum(map(_log_mixture, self.counts)) - here]
        share = log(0.5) - log(max(len(self.mistakes), 1))
        bets += [share + likelihood - here for likelihood in self.log_likelihoods.values()]
        return float(np.logaddexp.reduce(bets))

    def refuses(self, mistake: str, level: float) -> bool:
        """Whether the counts do not look like those of a mistake either, by the bet on all distributions against it."""
        wealth = sum(map(_log_mixture, self.counts)) - self.log_likelihoods[mistake]
        return wealth > -log(level)

    @property
    def p_value(self) -> float:
        """Smallest level at which the given distribution is refused."""
        return float(np.exp(-self.largest_log_wealth))

    @property
    def deviation(self) -> float:
        """Largest total variation distance of the frequencies of a case from what is expected."""
        return max(_distance(counts, probs) for counts, probs in zip(self.counts, self.expected, strict=True))

    def bound(self, level: float) -> float:
        """What no case's total variation distance exceeds, with probability 1 - level at all times at once."""
        bounds = []
        for counts, probs in zip(self.counts, self.expected, strict=True):
            n = int(counts.sum())
            if n == 0:
                return 1.0
            seen = counts[counts > 0]
            of_frequencies = float((seen * np.log(seen / n)).sum())
            divergence = (log(len(self.counts) / level) + of_frequencies - _log_mixture(counts)) / n
            bounds.append(_distance(counts, probs) + sqrt(max(divergence, 0.0) / 2))
        return min(1.0, max(bounds))


def _log_mixture(counts: np.ndarray) -> float:
    """Log-probability of a sample under the Dirichlet mixture of all distributions."""
    K = len(counts)
    n = int(counts.sum())
    of_cells = sum(lgamma(count + PRIOR) - lgamma(PRIOR) for count in counts[counts > 0].tolist())
    return lgamma(K * PRIOR) - lgamma(n + K * PRIOR) + of_cells


def _distance(counts: np.ndarray, probs: np.ndarray) -> float:
    n = counts.sum()
    return 0.0 if n == 0 else float(np.abs(counts / n - probs).sum() / 2)
