"""What two workers share of one sequence: the draft worker's lead over the verify worker, as a machine without clocks or threads.

McDanel 2024, AMUSD (arXiv 2410.17375); epochs, rows and the lead cap are ours, see docs/papers/amusd.md.

    text     committed tokens, the prompt's and those that the verify worker emitted
    ring     drafted tokens that wait behind the text, at most `cap`, each with the row q that it was drawn from
    epoch    number of the rollbacks so far; an item of an older one is dropped
    start    length of the text when the epoch began: with it, the place of a token keys its noise once and for all

Draft worker: `next`, where the step's epoch is new cut back and `acknowledge`, draw, `publish`.  Verify worker: `take`, score, `verified`.
Each call is one atomic change. Invariant: given the text and all that a verifier has looked at, every waiting token has the distribution of its row.
    A verifier that stopped within what was taken may have looked at all of it: nothing stays, even where the extra token equals a waiting one.
    Behind a draft that was accepted whole the extra token is fresh: where the next waiting token equals it, what waits behind that has its distribution still.
    A token that arrives after its place was committed counts as that next waiting token.
Traps: how far the lead grows may depend on clocks and on tokens that were published, never on the value of a token that is not.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from polydraft.errors import InvalidInputError


class Item(NamedTuple):
    """One drafted token. row: the distribution that it was drawn from, or None.  place: in the text."""

    token: int
    row: Any
    epoch: int
    place: int


class Step(NamedTuple):
    """What the draft worker may draw next: at most `room` tokens from `place` on. start: of the epoch."""

    epoch: int
    start: int
    place: int
    room: int


@dataclass
class Counts:
    """What became of drafted tokens. published: taken into the ring.  stale: dropped, as a rollback came first.
    overtaken: their place was committed before they came.  reused: extra tokens that were drafted already.
    rollbacks: epochs begun.  longest: most tokens that waited."""

    published: int = 0
    stale: int = 0
    overtaken: int = 0
    reused: int = 0
    rollbacks: int = 0
    longest: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Counts(**(both | {"longest": max(self.longest, other.longest)}))


class Lead:
    """The lead over one sequence.

    text: committed tokens.  cap: most tokens that wait.  ends: tokens behind which nothing is drafted.  longest: of text and lead together.

    Raises:
        InvalidInputError: a cap below 1.

    Example:
        >>> lead = Lead([5], cap=4)
        >>> step = lead.next()
        >>> lead.publish([Item(7, None, step.epoch, 1), Item(8, None, step.epoch, 2)])
        >>> [item.token for item in lead.take(1)]
        [7]
        >>> lead.verified([7, 8], accepted=1)  # the extra token was waiting
        >>> lead.epoch, lead.text, len(lead.ring)
        (0, [5, 7, 8], 0)
    """

    def __init__(
        self, text: Sequence[int], cap: int, ends: Collection[int] = (), longest: int | None = None
    ) -> None:
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise InvalidInputError(
                f"lead_cap={cap!r} was given; expected at least 1, the most drafted tokens that wait. For plain decoding use drafter=None."
            )
        self.text = list(text)
        self.cap = cap
        self.ends = frozenset(ends)
        self.longest = longest
        self.ring: deque[Item] = deque()
        self.epoch = 0
        self.acknowledged = 0
        self.start = len(self.text)
        self.taken = 0
        self.closed = False
        self.counts = Counts()

    @property
    def room(self) -> int:
        """Tokens that may be drafted now."""
        if self.closed or (self.ring and self.ring[-1].token in self.ends):
            return 0
        free_places = self.cap - len(self.ring)
        return (
            free_places
            if self.longest is None
            else max(0, min(free_places, self.longest - len(self.text) - len(self.ring)))
        )

    def next(self) -> Step | None:
        """What to draft now; None while nothing may be."""
        room = self.room
        return Step(self.epoch, self.start, len(self.text) + len(self.ring), room) if room else None

    def before(self, step: Step) -> list[int]:
        """The tokens before the place of a step that was just given: what a worker whose own differ adopts."""
        assert step.place == len(self.text) + len(self.ring)
        return [*self.text, *(item.token for item in self.ring)]

    def acknowledge(self, epoch: int) -> None:
        """The draft worker has cut back to the text of this epoch."""
        self.acknowledged = epoch

    def publish(self, items: Sequence[Item]) -> None:
        """Let drafted tokens wait, in order; those of an older epoch, or of one that was not acknowledged, are dropped."""
        for item in items:
            if not item.epoch == self.epoch == self.acknowledged or self.closed:
                self.counts.stale += 1
            elif item.place < len(self.text):
                self.counts.overtaken += 1
                if self.text[item.place] != item.token:
                    self._roll_back()
            elif not (self.ring and self.ring[-1].token in self.ends):
                assert item.place == len(self.text) + len(self.ring), "a token out of its place"
                assert len(self.ring) < self.cap, "a lead beyond its cap"
                self.ring.append(item)
                self.counts.published += 1
                self.counts.longest = max(self.counts.longest, len(self.ring))

    def take(self, most: int) -> list[Item]:
        """The first waiting tokens, for a forward pass; they wait until it is over."""
        self.taken = min(most, len(self.ring))
        return [self.ring[i] for i in range(self.taken)]

    def verified(self, tokens: Sequence[int], accepted: int) -> None:
        """A forward pass is over. tokens: what it emitted.  accepted: how many of those that were taken it accepted, fewer than it emitted."""
        num_taken = self.taken
        self.taken = 0
        self.text.extend(tokens)
        if accepted < num_taken:
            return self._roll_back()
        for i, token in enumerate(tokens):
            if not self.ring:  # the drafter is behind; what it is drawing is compared when it comes
                return None
            if self.ring.popleft().token != token:
                return self._roll_back()
            self.counts.reused += i >= num_taken
        return None

    def _roll_back(self) -> None:
        self.epoch = self.epoch + 1
        self.start = len(self.text)
        self.ring.clear()
        self.counts.rollbacks += 1
