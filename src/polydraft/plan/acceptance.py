"""How well drafts fit, by depth: counted for each sequence from what its own rounds kept, with decay, around a prior.

    a_d = (kept_d + strength m_d) / (seen_d + strength);  m_0 = prior_0, and m_d carries a_(d-1) on along the prior's shape

seen_d: rounds that came down to depth d and had a draft there; kept_d: of them, those that kept it. That is what the rule keeps,
whichever rule it is. Several draws count as e tries of which one has to fit, 1 - r = (1 - a)^e, see `sizes`: a round that kept none
as e, one that kept some as the r / a - (1 - r) e, over r, of which one expects the first to fit last, so that the mean is a.
The products of a_0, a_1, ... are the chances to get so deep, and their sum the tokens of a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["ASSUMED", "DEPTHS", "Record", "by_depth", "count"]

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
    """What one sequence's rounds have shown. kept, seen: see the module, or `ranked`.

    failed: rounds in a row that kept nothing; halved by one that kept something.  counted: rounds with a draft.
    asked, had: rounds in which a draft was asked for, and in which there was one, with decay.
    """

    kept: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    seen: np.ndarray = field(default_factory=lambda: np.zeros(DEPTHS))
    failed: int = 0
    counted: int = 0
    asked: float = 0.0
    had: float = 0.0

    def ask(self, had: bool, decay: float | None = None) -> None:
        """Take note that a draft was asked for, and whether there was one. decay: default HAVING_DECAY."""
        decay = HAVING_DECAY if decay is None else decay
        self.asked, self.had = decay * self.asked + 1.0, decay * self.had + had

    def share(self, expected: float) -> float:
        """Of the rounds in which a draft is asked for, those in which there is one. expected: before any was, for which it counts as one."""
        return (self.had + expected) / (self.asked + 1.0)

    def fold(self, num_accepted: int) -> None:
        """Take note that a draft was decided on."""
        self.counted += 1
        self.failed = self.failed // 2 if num_accepted else self.failed + 1

    def fade(self, factor: float) -> None:
        """Let the past count for less."""
        self.kept *= factor
        self.seen *= factor


def by_depth(record: Record, prior: np.ndarray, full: float = STRENGTH) -> np.ndarray:
    """[DEPTHS] of a_d; see the module. full: strength of the prior."""
    strength, rates = max(full * FAILING**record.failed, FLOOR), list[float]()
    expected = before = float(prior[0])
    for d, (kept, seen, own) in enumerate(zip(record.kept.tolist(), record.seen.tolist(), prior.tolist(), strict=True)):
        if d:
            expected = min(max(1.0 - (1.0 - rates[-1]) * (1.0 - own) / max(1.0 - before, 1e-6), 0.0), 0.999)
            strength = full
        before = own
        rates.append((kept + strength * expected) / (seen + strength))
    return np.array(rates)


def count(
    record: Record, parents: Sequence[int], path: Sequence[int], prior: np.ndarray, tries: np.ndarray | None, decay: float = DECAY
) -> None:
    """Fold in a round that kept the nodes `path` of a tree. tries: e by depth, None for one draw, or for drafts without a law."""
    accepted, end = len(path), path[-1] if path else 0
    rates = None if tries is None else by_depth(record, prior)
    record.fade(decay)
    for d in range(accepted + (end in parents[end + 1 :])):
        at, kept, seen = min(d, DEPTHS - 1), d < accepted, 1.0
        if tries is not None and rates is not None:
            a, e = min(max(rates[at], 1e-3), 0.999), tries[at]
            missed = (1.0 - a) ** e
            seen = ((1.0 - missed) / a - missed * e) / (1.0 - missed) if kept else e
        record.kept[at] += kept
        record.seen[at] += seen
    record.fold(accepted)
