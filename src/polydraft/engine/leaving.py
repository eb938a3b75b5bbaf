"""How sequences leave their slots: finished, aborted, failed, or to wait again as memory is short or a step was interrupted."""

import warnings
from contextlib import ExitStack

from polydraft.engine import drafter_state
from polydraft.engine.outbox import Outbox
from polydraft.engine.output import StepOutput
from polydraft.engine.roster import Roster
from polydraft.engine.seats import Seats
from polydraft.engine.sequence import Sequence
from polydraft.errors import GrammarError, PolydraftError, RequestWarning


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
