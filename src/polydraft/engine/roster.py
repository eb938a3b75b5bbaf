"""Who waits for a slot and who has one, first come, first served; what was asked since the last step; and how sequences leave.

They leave finished, aborted or failed, or to wait again as memory is short or a step was interrupted.
"""

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack

from polydraft.engine import drafter_state
from polydraft.engine.output import Outbox, StepOutput
from polydraft.engine.seats import Seats
from polydraft.engine.sequence import Sequence
from polydraft.errors import BusyError, GrammarError, PolydraftError, RequestWarning

MOST_WAITING = 65_536
"""Samples that may wait for a slot; more are refused."""


class Roster:
    """asked: sequences to add and ids of requests to abort, in the order of the calls, from any thread.  waiting, running: since then; those that run
    have a slot.  interrupted: what ran in the last step that raised."""

    def __init__(self) -> None:
        self.asked: deque[Sequence | str] = deque()
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []
        self.interrupted: list[Sequence] = []
        self._unfinished: dict[str, dict[Sequence, None]] = {}

    def __bool__(self) -> bool:
        return bool(self.asked or self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot, or to be taken in."""
        return len(self.waiting) + sum(isinstance(entry, Sequence) for entry in list(self.asked))

    def check_waiting(self, request_id: str) -> None:
        """Refuse one more sample where as many wait as may.

        Raises:
            BusyError: with their number.
        """
        if len(self.asked) + len(self.waiting) >= MOST_WAITING:
            raise BusyError(
                f"request {request_id!r} was given while {MOST_WAITING} samples wait, as many as may. "
                "Run some steps first, or split the call or its n."
            )

    def take_in(self, abort: Callable[[Sequence], None]) -> None:
        """Do what was asked since the last step."""
        while self.asked:
            entry = self.asked[0]
            if isinstance(entry, Sequence):
                self.waiting[entry] = None
                self._unfinished.setdefault(entry.request.id, {})[entry] = None
            else:
                for s in list(self._unfinished.get(entry, ())):
                    abort(s)
            self.asked.popleft()

    def abort_all(self) -> None:
        """Ask that all requests end that were added before."""
        ids = [entry.request.id for entry in list(self.asked) if isinstance(entry, Sequence)]
        self.asked.extend({*ids, *list(self._unfinished)})

    def run(self, s: Sequence) -> None:
        """A waiting sequence has a slot."""
        del self.waiting[s]
        self.running.append(s)

    def wait_again(self, sequences: Iterable[Sequence]) -> None:
        """Sequences wait before the others, the last one first."""
        for s in sequences:
            self.waiting[s] = None
            self.waiting.move_to_end(s, last=False)

    def interrupt(self) -> Seq[Sequence]:
        """Nobody runs: those that have not finished wait again, before the others. Returns all that ran."""
        stopped = self.running
        self.running = []
        self.interrupted = [s for s in stopped if not s.finished]
        self.wait_again(reversed(self.interrupted))
        return stopped

    def suspects(self) -> Iterator[Sequence]:
        """What ran in the last step that raised, each alone among those that wait; behind them all others wait, and before these those that have not finished."""
        suspects = self.interrupted
        others = self.waiting
        try:
            for s in suspects:
                if s in others:
                    self.waiting = OrderedDict({s: None})
                    yield s
        finally:
            unfinished = [s for s in suspects if s in others and not s.finished]
            self.waiting = OrderedDict.fromkeys([*unfinished, *(s for s in others if s not in suspects)])
            self.interrupted = []

    def forget(self, s: Sequence) -> None:
        """A sequence is over; one may be forgotten twice."""
        siblings = self._unfinished.get(s.request.id, {})
        siblings.pop(s, None)
        if not siblings:
            self._unfinished.pop(s.request.id, None)
        self.waiting.pop(s, None)
        if s in self.running:
            self.running.remove(s)


class Leaving:
    """teaching: see `Loop`."""

    def __init__(self, roster: Roster, seats: Seats, outbox: Outbox, teaching: bool) -> None:
        self._roster = roster
        self._seats = seats
        self._outbox = outbox
        self._teaching = teaching

    def abort(self, s: Sequence) -> None:
        """End a sequence that nobody wants any more."""
        self._end(s, "abort")

    def fail(self, s: Sequence, error: Exception) -> None:
        """End a sequence by an error; what it emitted stays."""
        s.sample.error = f"request {s.request.id!r}, sample {s.sample.index} failed: {error if isinstance(error, PolydraftError) else repr(error)}"
        s.sample.refused = isinstance(error, GrammarError)
        self._end(s, "error")
        warnings.warn(s.sample.error, RequestWarning, stacklevel=2)

    def _end(self, s: Sequence, finish_reason: str) -> None:
        s.stopper.end(finish_reason)
        self._outbox.give(StepOutput(s.request.id, [], [], s.publish(), s.sample, True))
        self.finish(s, retain=finish_reason == "abort")

    def finish(self, s: Sequence, *, retain: bool = False) -> None:
        """A finished sequence gives back what it holds and is forgotten; one that was interrupted on its way may leave again. retain: see `Seats.leave`."""
        self._evict(s, retain=retain)
        self._roster.forget(s)
        if s.speculation.drafter is not None and self._teaching:
            drafter_state.teach(s.speculation.drafter, s)

    def _evict(self, s: Sequence, *, retain: bool = False) -> None:
        """Take a sequence off its slots; what it emitted stays with it."""
        s.filling = False
        if s.speculation.drafter is not None:
            drafter_state.release(s.speculation.drafter, [s])
        self._seats.leave(s, retain=retain)

    def preempt(self) -> None:
        """Those that came last wait again, before the others, where all that runs has outgrown the KV cache."""
        room = self._seats.room
        running = self._roster.running
        for s in room.outgrown(running):
            running.remove(s)
            self._roster.wait_again([s])
            self._evict(s, retain=True)
        room.make(running)

    def interrupt(self) -> None:
        """All that runs waits again, before the others; what has finished leaves."""
        with ExitStack() as every:
            for s in self._roster.interrupt():
                every.callback(self.finish if s.finished else self._evict, s)
