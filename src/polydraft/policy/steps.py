"""The step that a policy learnt from last: what its forward pass had, and whether its seconds tell what such steps cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OFTEN = 64
SELDOM = 7
"""Steps that are all timed at first, and then one in so many, which shares no divisor with HELD."""
RARELY = 32
"""One step in so many is timed where all sequences sleep: more would cost more than they tell."""
SETTLED = 1
"""Steps with drafts, or without, whose seconds are not looked at after others: a draft model catches up, and caches forget."""


@dataclass
class LastStep:
    """What a step had. batch: its sequences.  num_tokens: of a sequence's text, on the mean.  rows: of its forward pass.  depth: of its drafts.
    drafting: sequences with drafts.

    alike: how many in a row had drafts, or none, as it.  timed: all whose seconds were known.  slept: in which all sequences rested, in a row.
    """

    batch: int = 1
    num_tokens: float = 0.0
    rows: int = 1
    depth: int = 0
    drafting: int = 0
    alike: int = 0
    timed: int = 0
    slept: int = 0

    def begin(self, sequences: Sequence[Any]) -> None:
        """A step of these sequences is about to be decided."""
        self.batch = max(len(sequences), 1)
        self.num_tokens = sum(len(s.token_ids) for s in sequences) / self.batch

    def reset(self, num_sequences: int) -> None:
        """A step of so many sequences is learnt from, of which no draft is known yet."""
        self.batch = num_sequences
        self.rows = num_sequences
        self.depth = 0
        self.drafting = 0

    def add(self, nodes: int, depth: int) -> None:
        """It had this draft, too."""
        self.rows += nodes
        self.depth = max(self.depth, depth)
        self.drafting += 1

    def sleep(self, sequences: Sequence[Any]) -> bool:
        """All sequences rest once more; whether this step is timed: as one of plain decoding behind others."""
        self.slept += 1
        if self.sleeps:
            return False
        self.begin(sequences)
        self.reset(self.batch)
        self.alike = SETTLED
        return True

    @property
    def sleeps(self) -> bool:
        """Whether its seconds are left aside, as it is one of many of plain decoding."""
        return self.slept % RARELY != 0

    def is_telling(self) -> bool:
        """Count a step whose seconds are known; whether they are to be looked at."""
        self.timed += 1
        is_seldom = self.timed > OFTEN and self.timed % SELDOM and not self.slept
        return self.alike >= SETTLED and not is_seldom
