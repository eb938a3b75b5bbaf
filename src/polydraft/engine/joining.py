"""Waiting sequences that join: each gets its slots, and its cache is filled in pieces while others run."""

from collections.abc import Callable
from time import perf_counter

from polydraft.engine import reading
from polydraft.engine.admission import Opening
from polydraft.engine.reader import Reader
from polydraft.engine.roster import Roster
from polydraft.engine.seats import Seats
from polydraft.engine.sequence import Sequence
from polydraft.engine.speculation import Speculation
from polydraft.engine.texts import TextQueue


class Joining:
    """Of one engine. texts: that are read beside, none of which may be there while costs are measured."""

    def __init__(
        self, roster: Roster, seats: Seats, opening: Opening, reader: Reader, texts: TextQueue
    ) -> None:
        self._roster = roster
        self._seats = seats
        self._opening = opening
        self._reader = reader
        self._texts = texts

    def admit(self, num_expected: int, measure: Callable[[Speculation], None]) -> dict[Sequence, int]:
        """Move waiting sequences into free slots and fill their caches with all committed tokens but the last, in pieces while others run.

        num_expected: sequences that steps to come have.  measure: costs that a text depends on.

        Returns:
            how many tokens of which are left to the first forward pass of this step.
        """
        running = self._roster.running
        joining = list[Sequence]()
        beside = any(not s.filling for s in running)
        while (s := self._next(measure)) is not None:
            self._join(s, num_expected)
            joining.append(s)
        self._reader.encode(joining)
        return self._reader.read([s for s in running if s.filling], beside=beside)

    def _next(self, measure: Callable[[Speculation], None]) -> Sequence | None:
        """The waiting sequence that joins, if one may; costs that its text depends on are measured first."""
        roster = self._roster
        s = self._opening.next(roster.waiting) if self._seats.are_free else None
        if s is None or not self._seats.room.admits(s, roster.running):
            return None
        if self._opening.follows_costs(s):
            if roster.running or self._texts:
                return None
            measure(s.speculation)
        return s

    def _join(self, s: Sequence, num_expected: int) -> None:
        """A waiting sequence gets its slots, and its drafter begins where it reads on."""
        self._seats.take(s)
        self._roster.run(s)
        s.filling = True
        if s.sample.stats.seconds_waiting is None:
            s.sample.stats.seconds_waiting = perf_counter() - s.sample.stats.arrival
        self._opening.begin(s, num_expected)
        reading.join(s.speculation.drafter, s)
        self._seats.complete(s)
        self._reader.join(s)
