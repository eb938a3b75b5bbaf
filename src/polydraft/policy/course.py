"""Where a sequence stands with its drafts: they pay, they pause, they are looked at once more behind a pause, or they have stopped for good.

`fit` cuts drafts that others wait for: beside prompts that are read in the same forward pass, and of sequences that look again, all of a batch at once.
A forward pass that reads a piece of a prompt has many rows, and what is drafted beside it costs a row's full arithmetic. The time of a step is one
budget: a piece takes what it takes beside plain decoding, and drafts a little more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf

from polydraft.core.budget import NOTHING, Budget
from polydraft.policy.acceptance import Acceptance
from polydraft.policy.costs import Costs
from polydraft.policy.credit import Credit
from polydraft.policy.marginal import UNWEIGHED, Weighed, gain
from polydraft.policy.repeats import Repeats

FIRST_PAUSE = 8
LONGEST_PAUSE = 256
HELD = 4
LOOK = 2
"""Steps for which a budget holds, and drafts that follow a pause to look again."""
LOOKING = 0.02
"""Share of its steps that a paused sequence may lose by looking again, at most."""


class Stage(Enum):
    """How a sequence is drafted for."""

    DRAFTING = auto()
    """Its drafts pay, or nobody knows better."""
    PAUSED = auto()
    """Nothing is drafted for some steps."""
    LOOKING = auto()
    """Behind a pause: something is drafted to see whether it pays by now."""
    STOPPED = auto()
    """Its credit is spent."""


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
    SPENT = auto()
    """Its credit does not pay for a draft that is rejected."""


TRANSITIONS = {
    Stage.DRAFTING: {
        Event.PAYS: Stage.DRAFTING,
        Event.FAILS: Stage.PAUSED,
        Event.CLOSED: Stage.PAUSED,
        Event.SPENT: Stage.STOPPED,
    },
    Stage.PAUSED: {Event.OVER: Stage.LOOKING},
    Stage.LOOKING: {
        Event.PAYS: Stage.DRAFTING,
        Event.HOPES: Stage.LOOKING,
        Event.FAILS: Stage.PAUSED,
        Event.CLOSED: Stage.PAUSED,
        Event.SPENT: Stage.STOPPED,
    },
    Stage.STOPPED: {Event.OVER: Stage.LOOKING},
}


@dataclass
class Course:
    """A policy's record of a sequence. acceptance: of its own steps.  costs: None to follow the live ones.  repeats: of its text.  weighed: by what, the last time.

    budget: the last one.  held: steps for which it still holds.  step_budget: of the present step.
    credit: that its drafts are paid from.  read: tokens of the text, behind the last step with drafts.
    stage: see above.  pause: steps of the last one, until drafts pay again.  pause_left, looks: steps of the pause, and drafts to look again, that are left.
    unheard: steps of it since its text was read for repeats.
    """

    acceptance: Acceptance
    costs: Costs | None
    repeats: Repeats
    credit: Credit
    read: int = 0
    weighed: Weighed = UNWEIGHED
    budget: Budget = NOTHING
    held: int = 0
    step_budget: Budget = NOTHING
    stage: Stage = Stage.DRAFTING
    pause: int = 0
    pause_left: float = 0
    looks: int = 0
    unheard: int = 0

    @property
    def survival(self) -> float:
        """Accepted tokens by drafted node, as expected."""
        expected = self.acceptance.expected
        return (expected.tokens - 1.0) / max(expected.nodes, 1.0)

    @property
    def paused(self) -> bool:
        """Whether nothing is drafted for it at present."""
        return self.stage in (Stage.PAUSED, Stage.STOPPED)

    def pay(self, loss: float) -> None:
        """Drafts lost so many plain steps, or saved them; a budget that the credit does not pay for holds no more."""
        self.credit.pay(loss)
        if self.credit.spent:
            self.held = 0

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
            self.pause_left = max(FIRST_PAUSE, min_pause) - 1
        elif event is Event.SPENT:
            self.pause_left = inf
            self.looks = LOOK
        elif event is Event.OVER:
            self.pause_left = 0

    def wait(self) -> None:
        """Nothing is drafted in this step, as others wait for it: a look is left for the next."""
        self.step_budget = NOTHING
        self.looks += self.stage is Stage.LOOKING

    def rest(self) -> bool:
        """Whether this step is one of a pause."""
        if self.paused:
            self.pause_left -= 1
            self.unheard += 1
            if not self.pause_left:
                self.meet(Event.OVER)
            return True
        return False

    def hear(self, token_ids: Sequence[int]) -> bool:
        """Read on for repeats; whether there is none."""
        self.repeats.read(token_ids)
        if not self.repeats.length:
            self.unheard = 0
        return not self.repeats.length


LONGER = 1.2
"""How many times as long a step may be for drafts that others wait for."""


def min_pause(num_sequences: int, costs: Costs) -> int:
    """Steps after which a look at one drafted token, which is not accepted, loses no more than LOOKING; all sequences of a batch look at once.

    Example:
        >>> costs = Costs.of({1: 1.0, 4: 1.0, 8: 2.0}, draft_start=0.0, draft_step=0.1)
        >>> min_pause(1, costs), min_pause(8, costs)
        (10, 110)
    """
    look = costs.step(2 * num_sequences, 1, num_sequences) / costs.step(num_sequences, 0)
    return round(LOOK * (look - 1.0) / LOOKING)


def most_rows(budget: Budget) -> int:
    """Rows of a forward pass that a draft may have, its spare siblings included.

    Example:
        >>> from polydraft.core.budget import Stop
        >>> most_rows(Budget.fixed((-1, 0)).ending(Stop((0.5,), min_spare_chance=(0.1, 0.2))))
        3
    """
    return max(
        budget.max_nodes, len(budget.stop.min_spare_chance) + 1 if budget.stop and budget.has_spares else 0
    )


def cut_to(budget: Budget, rows: int) -> Budget:
    """The same with so many rows at most.

    Example:
        >>> cut_to(Budget.fixed((-1, 0, 1, 2)), 2).parents, cut_to(Budget.grown(24, 4, 3), 2).max_nodes
        ((-1, 0, 1), 2)
    """
    if rows >= most_rows(budget):
        return budget
    shorter = budget.without_spares().within(rows)
    return shorter if budget.parents else replace(shorter, max_nodes=rows)


def fit(courses: Sequence[Course], num_sequences: int, riding: int, costs: Costs) -> None:
    """Cut what is asked for in this step. riding: prompt tokens in its forward pass.  costs: behind the texts of the batch.

    Drafts that survive most often come first, those that look again last, as long as the step takes no more than LONGER times what it takes without them,
    beside prompts none that the full price of its rows makes a loss. All stay where every sequence drafts, and none is expected to wait for a token longer
    than that. Without prompts one sequence may always look. Requests with a seed are left as they are.
    """
    drafting = [c for c in courses if c.step_budget.max_depth]
    waiting = [c for c in drafting if not c.costs and (riding or c.stage is Stage.LOOKING)]
    if not waiting or num_sequences + riding == 1:
        return
    others = [c.step_budget for c in drafting if c not in waiting]
    number = len(others)
    rows = num_sequences + riding + sum(map(most_rows, others))
    depth = max((budget.max_depth for budget in others), default=0)
    longest = LONGER * costs.step(rows, depth, max(number, 1))
    if riding and number + len(waiting) == num_sequences and _all_pay(courses, riding, longest, costs):
        return
    for course in sorted(waiting, key=lambda c: (c.stage is Stage.LOOKING, -c.survival)):
        count = _affordable(course, rows, depth, number + 1, longest, costs)
        count = max(count, not riding and number == len(others))
        if count == 0:
            course.wait()
            continue
        course.step_budget = cut_to(course.step_budget, count)
        rows = rows + count
        number = number + 1
        depth = max(depth, course.step_budget.max_depth)


def _all_pay(courses: Sequence[Course], riding: int, longest: float, costs: Costs) -> bool:
    """Whether no sequence is expected to wait for a token longer than that where all of them draft."""
    tokens, nodes, depths = zip(*(c.acceptance.expected for c in courses), strict=True)
    seconds = costs.step(len(courses) + riding + sum(nodes), max(depths), len(courses))
    return seconds <= longest * min(tokens)


def _affordable(course: Course, rows: int, depth: int, number: int, longest: float, costs: Costs) -> int:
    """Rows that a draft may have so that the step is not longer. rows, depth: of the step without it.  number: of drafts with it."""
    looks = course.stage is Stage.LOOKING
    if not looks and gain(course.acceptance.expected, course.weighed.speed, rows, number, costs) <= 0:
        return 0
    own_depth = course.step_budget.max_depth
    counts = range(1, most_rows(course.step_budget) + 1)
    return sum(costs.step(rows + n, max(depth, min(n, own_depth)), number) <= longest for n in counts)
