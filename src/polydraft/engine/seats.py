"""The slots that a sequence takes: one of the target, and one for the second sequence where a decoding method reads one."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager

from polydraft.core import BlockCopying, Decoding, EncoderDecoder, SecondSequenceDecoding, Target
from polydraft.engine.room import Room
from polydraft.engine.second import Second
from polydraft.engine.sequence import Sequence
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slot_pool import Slots


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
        self.room = Room(target, self.slots, 2 if shared else 1)
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
        s.slot = self.slots.take(s.token_ids[:-1] if self._retains else ())
        if self._retains:
            self.slots.holds(s.slot, s.token_ids)

    def complete(self, s: Sequence) -> None:
        """The second slot, once it is known how much the first holds of what is needed."""
        assert s.slot is not None
        s.sample.stats.cached_tokens = int(self._target.lengths[s.slot]) if self._retains else 0
        if self.second is not None:
            self.second.take(s)

    def leave(self, s: Sequence, *, retain: bool) -> None:
        """Give back what it has. retain: its slot holds its tokens and nothing else, and may go on holding them."""
        if s.slot is not None:
            slot = s.slot
            s.slot = None
            self.give_back(slot, s.token_ids if retain else ())
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
