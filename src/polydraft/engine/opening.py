"""Whether a request begins with drafts: not while their code is compiled, nor in a batch in which they do not pay; and whether it waits for them.

A text that depends on drafts, as a seed or a budget was given, or on their costs, waits until these are there. The size of the batch is the one that is
expected: clients that have their answers ask anew, one after the other, and the first of them would see an empty batch.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from math import exp

from polydraft.core import Target
from polydraft.engine import reading
from polydraft.engine.sequence import Sequence
from polydraft.engine.speculation import Menu

FADES = 1.0
"""Seconds after which 1 / e of those that left are still expected back. Sixteen that have left count for two after three seconds."""


class Arrivals:
    """How many sequences run together soon: as many as now, or nearly as many as a moment ago. clock: in seconds.

    Example:
        >>> now = 0.0
        >>> arrivals = Arrivals(lambda: now)
        >>> arrivals.expect(16)
        16
        >>> now = 0.1
        >>> arrivals.expect(1), arrivals.expect(20)
        (15, 20)
        >>> now = 5.0
        >>> arrivals.expect(1)
        1
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected = 0.0
        self._time = 0.0

    def expect(self, num_sequences: int) -> int:
        """So many run and wait now."""
        now = self._clock()
        faded = exp(min(self._time - now, 0.0) / FADES)
        self._time = now
        self._expected = num_sequences + max(self._expected - num_sequences, 0.0) * faded
        return round(self._expected)


class Opening:
    """menu: whose default's drafts may still be compiled."""

    def __init__(self, target: Target, menu: Menu) -> None:
        self._target = target
        self._menu = menu

    def _compiles(self, s: Sequence) -> bool:
        """Whether the code of its drafts is being compiled."""
        return s.speculation is self._menu.default and self._menu.is_compiling

    def follows_costs(self, s: Sequence) -> bool:
        """Whether its text depends on costs that are missing: it is first in line, and waits until nothing runs and they are measured."""
        shared_noise = s.speculation.verifier.info.shared_noise
        return s.follows_drafts and s.request.budget is None and not shared_noise and s.speculation.unmeasured

    def awaits_drafts(self, s: Sequence) -> bool:
        """Whether it waits while drafts are compiled, as its text depends on them or on their costs; those behind it do not."""
        budget = s.request.budget
        depends = s.follows_drafts if budget is None else budget.max_nodes > 0
        return depends and (self._compiles(s) or (self.follows_costs(s) and self._menu.is_compiling))

    def next(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first that does not wait for drafts."""
        return next((s for s in waiting if not self.awaits_drafts(s)), None)

    def begin(self, s: Sequence, expected: int) -> None:
        """Join without drafts where those would not pay in a batch of so many, so that no drafter reads the prompt for nothing."""
        drafter = s.speculation.drafter
        policy = s.speculation.policy
        if s.postponed or s.held:
            s.drafting = True
            s.postponed = 0
            s.held = False
        if s.drafting and self._compiles(s):
            s.drafting = False
            s.held = True
        elif drafter is not None and drafter.needs.hidden and s.drafting:
            s.drafting = policy.opens(s, expected)
            s.postponed = 0 if s.drafting else expected

    def resume(self, running: Seq[Sequence], expected: int) -> list[Sequence]:
        """Draft for what began before its drafts were compiled, and for what joined a batch twice as large, where it pays to read it once more:
        those are returned."""
        resumed = list[Sequence]()
        for s in [s for s in running if s.held and not s.filling and not self._compiles(s)]:
            reads_states = s.speculation.drafter is not None and s.speculation.drafter.needs.hidden
            s.drafting = not reads_states
            s.held = False
            s.postponed = 2 * expected if reads_states else 0
        for s in [s for s in running if s.postponed >= 2 * max(expected, 1) and not s.filling]:
            policy = s.speculation.policy
            s.postponed = expected
            if policy.opens(s, expected, again=True):
                reading.resume(self._target, s)
                resumed.append(s)
        return resumed
