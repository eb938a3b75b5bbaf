"""The slots that a sequence takes: one of the target, and one for the second sequence where a decoding method reads one.

Where slots grow, no request has a fixed share of the KV cache. One that grows beyond what is there makes the one that came last wait, which is read again
later and loses no token (preemption by recomputation, Kwon et al. 2023, arXiv 2309.06180).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager

from polydraft.core import BlockCopying, Decoding, EncoderDecoder, SecondSequenceDecoding, Target
from polydraft.core.cursor import Cursor
from polydraft.engine.second import Second
from polydraft.engine.sequence import Sequence
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slot_pool import Slots
from polydraft.models.slots import TREE_ROOM


class SlotRoom:
    """Memory of a target's KV cache where slots grow. per_request: slots that each request takes."""

    def __init__(self, target: Target, slots: Slots, per_request: int = 1) -> None:
        self._slots = slots
        self._per_request = per_request
        bound = target.cache_grows and target.cache_tokens < target.max_num_seqs * (
            target.max_model_len + TREE_ROOM
        )
        self._most = target.cache_tokens if bound else None

    def _taken(self, sequences: Seq[Sequence]) -> int:
        return self._per_request * sum(len(s.token_ids) + TREE_ROOM for s in sequences)

    def admits(self, s: Sequence, running: Seq[Sequence]) -> bool:
        """Whether what runs leaves room for one more, as long as it is now."""
        return self._most is None or not running or self._taken([*running, s]) <= self._most

    def outgrown(self, running: list[Sequence]) -> list[Sequence]:
        """Those that have to wait, the last first, so that the others have room for their next step."""
        staying = list(running)
        while self._most is not None and len(staying) > 1 and self._taken(staying) > self._most:
            staying.pop()
        return running[len(staying) :][::-1]

    def make(self, running: Seq[Sequence]) -> None:
        """Take the memory of free slots for the next step of those that run."""
        if self._most is not None:
            self._slots.make_room(self._per_request * len(running) * TREE_ROOM)


class Seats:
    """slots: of the target.  second: the second sequences, or None.  room: memory of the KV cache.  Arguments as of `Loop`."""

    def __init__(
        self, target: Target, decoding: Decoding | None, keep_prefixes: bool, prefix_cache_bytes: int
    ) -> None:
        self._target = target
        self.slots = Slots(target)
        self.second = (
            Second(decoding, target, self.slots) if isinstance(decoding, SecondSequenceDecoding) else None
        )
        shared = self.second is not None and self.second.model is target
        self.room = SlotRoom(target, self.slots, 2 if shared else 1)
        self._retains = (
            keep_prefixes
            and self.second is None
            and target.rolls_back
            and not isinstance(target, EncoderDecoder)
        )
        if self._retains and isinstance(target, BlockCopying):
            self.slots.prefix_cache = PrefixCache(target, prefix_cache_bytes)

    @property
    def are_free(self) -> bool:
        """Whether there are those of one more sequence."""
        return self.slots.num_free > 0 and (self.second is None or self.second.has_room)

    def take(self, s: Sequence) -> None:
        """Its slot, which may hold the beginning of its text from before."""
        slot = self.slots.take(self._shared(s)[: len(s.token_ids) - 1] if self._retains else ())
        s.seat = Cursor(self._target, slot, s.num_prompt_tokens - 1)
        if self._retains:
            self.slots.holds(slot, self._shared(s))

    def _shared(self, s: Sequence) -> Seq[int]:
        """What requests that begin alike may take from its slot."""
        return s.token_ids[: s.num_prompt_tokens - 1] if self._target.reads_prompts_apart else s.token_ids

    def complete(self, s: Sequence) -> None:
        """The second slot, once it is known how much the first holds of what is needed."""
        s.sample.stats.cached_tokens = s.cursor.length if self._retains else 0
        if self.second is not None:
            self.second.take(s)

    def leave(self, s: Sequence, *, retain: bool) -> None:
        """Give back what it has. retain: its slot holds its tokens and nothing else, and may go on holding them."""
        if s.seat is not None:
            slot = s.seat.slot
            s.seat = None
            shared = self._shared(s) if retain and self._retains else ()
            if 0 < len(shared) < self._target.lengths[slot]:
                self._target.cut(slot, self._target.resumes(slot, len(shared)))
            self.give_back(slot, shared)
        if self.second is not None:
            self.second.leave(s)

    def give_back(self, slot: int, token_ids: Seq[int] = ()) -> None:
        """A slot of the target. token_ids: it may go on holding them, as far as they are read."""
        self.slots.give_back(slot, token_ids[: int(self._target.lengths[slot])] if self._retains else ())

    @contextmanager
    def idle(self) -> Iterator[tuple[int, int]]:
        """An empty slot, and one of a second sequence, or the same, for as long as the block lasts."""
        with ExitStack() as stack:
            slot = second_slot = self.slots.take()
            stack.callback(self.slots.give_back, slot)
            if self.second is not None:
                second_slot = self.second.slots.take()
                stack.callback(self.second.slots.give_back, second_slot)
            yield slot, second_slot
