"""Who waits for a slot and who has one, first come, first served; and what was asked since the last step."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from polydraft.engine.sequence import Sequence
from polydraft.errors import BusyError

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
