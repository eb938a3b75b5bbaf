"""Where a sequence stands with its drafts: they pay, they pause, or they are looked at once more behind a pause."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from polydraft.core.budget import NOTHING, Budget
from polydraft.policy.acceptance import Acceptance
from polydraft.policy.costs import Costs
from polydraft.policy.repeats import Repeats

FIRST_PAUSE = 8
LONGEST_PAUSE = 256
HELD = 4
LOOK = 2
"""Steps for which a budget holds, and drafts that follow a pause to look again."""


class Stage(Enum):
    """How a sequence is drafted for."""

    DRAFTING = auto()
    """Its drafts pay, or nobody knows better."""
    PAUSED = auto()
    """Nothing is drafted for some steps."""
    LOOKING = auto()
    """Behind a pause: something is drafted to see whether it pays by now."""


class Event(Enum):
    """What a step shows."""

    PAYS = auto()
    """Its draft is worth its seconds."""
    HOPES = auto()
    """It is not; a token that is accepted for sure would be, and there are looks left."""
    FAILS = auto()
    """It is not."""
    CLOSED = auto()
    """Its text is not read for drafts in such a batch."""
    OVER = auto()
    """The pause is over."""


TRANSITIONS = {
    Stage.DRAFTING: {Event.PAYS: Stage.DRAFTING, Event.FAILS: Stage.PAUSED, Event.CLOSED: Stage.PAUSED},
    Stage.PAUSED: {Event.OVER: Stage.LOOKING},
    Stage.LOOKING: {
        Event.PAYS: Stage.DRAFTING,
        Event.HOPES: Stage.LOOKING,
        Event.FAILS: Stage.PAUSED,
        Event.CLOSED: Stage.PAUSED,
    },
}


class Weighed(NamedTuple):
    """What a draft was weighed by. speed: tokens per second of the batch.  rows: of the forward pass without it.  gain: of the draft, see `marginal`."""

    speed: float = 0.0
    rows: float = 1.0
    gain: float = 0.0


UNWEIGHED = Weighed()


@dataclass
class Course:
    """A policy's record of a sequence. acceptance: of its own steps.  costs: None to follow the live ones.  repeats: of its text.  weighed: by what, the last time.

    budget: the last one.  held: steps for which it still holds.  step_budget: of the present step.
    stage: see above.  pause: steps of the last one, until drafts pay again.  pause_left, looks: steps of the pause, and drafts to look again, that are left.
    """

    acceptance: Acceptance
    costs: Costs | None
    repeats: Repeats
    weighed: Weighed = UNWEIGHED
    budget: Budget = NOTHING
    held: int = 0
    step_budget: Budget = NOTHING
    stage: Stage = Stage.DRAFTING
    pause: int = 0
    pause_left: int = 0
    looks: int = 0

    @property
    def survival(self) -> float:
        """Accepted tokens by drafted node, as expected."""
        expected = self.acceptance.expected
        return (expected.tokens - 1.0) / max(expected.nodes, 1.0)

    @property
    def paused(self) -> bool:
        return self.stage is Stage.PAUSED

    def meet(self, event: Event, min_pause: int = 0) -> None:
        """Go on to the next stage. min_pause: minimum steps of a pause that begins; each is twice as long as the one before."""
        self.stage = TRANSITIONS[self.stage][event]
        if event is Event.PAYS:
            self.pause = 0
            self.looks = 0
            self.held = HELD - 1
        elif event is Event.HOPES:
            self.looks = self.looks - 1
            self.held = 0
        elif event is Event.FAILS:
            self.pause = min(max(2 * self.pause, FIRST_PAUSE, min_pause), LONGEST_PAUSE)
            self.pause_left = self.pause - 1
            self.looks = LOOK
        elif event is Event.CLOSED:
            self.pause_left = FIRST_PAUSE - 1

    def wait(self) -> None:
        """Nothing is drafted in this step, as others wait for it: a look is left for the next."""
        self.step_budget = NOTHING
        self.looks += self.stage is Stage.LOOKING

    def rest(self) -> bool:
        """Whether this step is one of a pause."""
        if self.paused:
            self.pause_left -= 1
            if not self.pause_left:
                self.meet(Event.OVER)
            return True
        return False
