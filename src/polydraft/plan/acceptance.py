"""How well drafts fit, by depth: counted for each sequence from what its own rounds kept, with decay, around a prior.

    a_d = (kept_d + strength m_d) / (seen_d + strength);  m_0 = prior_0, and m_d carries a_(d-1) on along the prior's shape

seen_d: rounds that came down to depth d and had a draft there; kept_d: of them, those that kept it. That is what the rule keeps,
whichever rule it is. Several draws count as e tries of which one has to fit, 1 - r = (1 - a)^e, see `sizes`: a round that kept none
as e, one that kept some as the r / a - (1 - r) e, over r, of which one expects the first to fit last, so that the mean is a.
The products of a_0, a_1, ... are the chances to get so deep, and their sum the tokens of a call.
"""

from dataclasses import dataclass, field

import numpy as np
from numba import njit

__all__ = ["ASSUMED", "DEPTHS", "Record", "count", "rates"]

DEPTHS = 12
"""Depths told apart; deeper ones count as the last."""
STRENGTH = 16.0
"""Rounds that the prior counts for at every depth. With 8 chat lost 3%, on as many texts and modelled seconds; other workloads differed by 1% at most."""
ASSUMED = 2.0
"""The same of a prior that nothing was measured for: with 16 n-grams, which seldom have something to draft, asked 350 times in vain before they rested."""
DECAY = 0.85
"""What is left of a round after the next. Texts change: with recorded rounds of five workloads 0.8 to 0.9 chose best, 0.98 lost 1% to 8%."""
FAILING, FLOOR = 0.8, 0.5
"""What each further round in a row whose first draft fails leaves of the prior's strength, and its least: it must not hold out against a text that nothing fits."""
HAVING_DECAY = 0.95
"""What is left of a round that asked for a draft after the next, in the share of those that had one."""


@dataclass
class Record:
    """What one sequence's rounds have shown. kept, seen: see the module.

    failed: rounds in a row that kept nothing; halved by one that kept something.  counted: rounds with a draft.
    asked, had: rounds in which a draft was asked for, and in which there was one, with decay.
    lasting: what is left of a round after the next, where it is another than DECAY and HAVING_DECAY.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    failed: int = 0
    counted: int = 0
    asked: float = 0.0
    had: float = 0.0
    lasting: float | None = None

    def ask(self, had: bool) -> None:
        """Take note that a draft was asked for, and whether there was one."""
        decay = self.lasting or HAVING_DECAY
        self.asked, self.had = decay * self.asked + 1.0, decay * self.had + had

    def share(self, expected: float) -> float:
        """Of the rounds in which a draft is asked for, those in which there is one. expected: before any was, for which it counts as one."""
        return (self.had + expected) / (self.asked + 1.0)

    def fold(self, num_accepted: int) -> None:
        """Take note that a draft was decided on."""
        self.counted += 1
        self.failed = self.failed // 2 if num_accepted else self.failed + 1

    def learnt(self, prior: np.ndarray) -> tuple[float, ...]:
        """What the rounds of all sequences say of an acceptance that was taken to be `prior`."""
        return tuple(rates(self.kept, self.seen, prior, ASSUMED, ASSUMED).tolist())

    @property
    def strength(self) -> float:
        """Rounds that a prior of STRENGTH counts for at the first depth."""
        return max(STRENGTH * FAILING**self.failed, FLOOR)


@njit(cache=True)
def rates(kept: np.ndarray, seen: np.ndarray, prior: np.ndarray, first: float, full: float) -> np.ndarray:
    """[DEPTHS] of a_d; see the module. first, full: strength of the prior at depth 0, and below."""
    found = np.empty(len(prior))
    expected, strength = prior[0], first
    for d in range(len(prior)):
        if d:
            kept_on = (1.0 - found[d - 1]) * (1.0 - prior[d]) / max(1.0 - prior[d - 1], 1e-6)
            expected, strength = min(max(1.0 - kept_on, 0.0), 0.999), full
        found[d] = (kept[d] + strength * expected) / (seen[d] + strength)
    return found


@njit(cache=True)
def _count(
    kept: np.ndarray,
    seen: np.ndarray,
    prior: np.ndarray,
    first: float,
    num_accepted: int,
    reached: int,
    decay: float,
    tries: np.ndarray,
) -> None:
    expected = rates(kept, seen, prior, first, STRENGTH) if tries[0] > 1.0 else prior
    kept *= decay
    seen *= decay
    for d in range(reached):
        at, tried = min(d, len(kept) - 1), 1.0
        a, e = min(max(expected[at], 1e-3), 0.999), tries[min(d, len(tries) - 1)]
        if e > 1.0:
            missed = (1.0 - a) ** e
            tried = ((1.0 - missed) / a - missed * e) / (1.0 - missed) if d < num_accepted else e
        kept[at] += d < num_accepted
        seen[at] += tried


def count(record: Record, num_accepted: int, reached: int, prior: np.ndarray, tries: np.ndarray) -> None:
    """Fold in a round that kept so many drafts in a row and decided down to `reached` depths. tries: e by depth; 1 for drafts without a law."""
    _count(record.kept, record.seen, prior, record.strength, num_accepted, reached, record.lasting or DECAY, tries)
    record.fold(num_accepted)
