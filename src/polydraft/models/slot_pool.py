"""Who has a slot of a model: free ones, those that are taken, and the texts that free ones still hold for requests that begin alike."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from weakref import WeakKeyDictionary

from polydraft.core import Target
from polydraft.errors import CapacityError
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slots import TREE_ROOM, SlotModel

_RETAINED: WeakKeyDictionary[Target, dict[int, Sequence[object]]] = WeakKeyDictionary()
"""The texts whose columns free slots of a model still have, the oldest first, for everyone that takes slots of it."""
MIN_COPIED = 4
"""Columns that are worth a copy."""


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Tokens with which both texts begin.

    Example:
        >>> common_length([3, 1, 4], [3, 1, 5, 9])
        2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_TAKEN: ContextVar[list[tuple["Slots", int]] | None] = ContextVar("taken", default=None)
"""What `given_back_on_error` watches."""


@contextmanager
def given_back_on_error() -> Generator[None, None, None]:
    """Where the block raises, the slots that it took, of any model, are given back: those that it has not given back itself.

    Example:
        >>> from polydraft.models import load, pair
        >>> slots = Slots(load.load_model(str(pair.draft_folder()), max_num_seqs=2))
        >>> try:
        ...     with given_back_on_error():
        ...         slots.take() + None
        ... except TypeError:
        ...     slots.num_free
        2
    """
    outer = _TAKEN.get()
    watched = list[tuple[Slots, int]]()
    token = _TAKEN.set(watched)
    try:
        yield
    except BaseException:
        for slots, slot in watched:
            slots.abandon(slot)
        raise
    finally:
        _TAKEN.reset(token)
    if outer is not None:
        outer += watched


class Slots:
    """The slots of a model, each of them free or taken: everyone that runs sequences in one takes its slots here and gives each back once.

    numbers: those to be handed out; default all.

    Example:
        >>> from polydraft.models import load, pair
        >>> slots = Slots(load.load_model(str(pair.draft_folder()), max_num_seqs=2))
        >>> slots.take(), slots.num_free
        (0, 1)
        >>> slots.give_back(0)
        >>> slots.num_free
        2
    """

    def __init__(self, model: Target, numbers: Sequence[int] | None = None) -> None:
        self.model = model
        self._free = list(range(model.max_num_seqs) if numbers is None else numbers)[::-1]
        self._taken: dict[int, Sequence[object]] = {}
        """The text that each is filled with; () where its taker does not say."""
        self._retained = _RETAINED.setdefault(model, {})
        self.prefix_cache: PrefixCache | None = None
        """Where texts go whose slots are taken for others."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, token_ids: Sequence[object] = ()) -> int:
        """A slot, the taker's until it is given back: one that retains little but the beginning of the text, no more than that; else an empty one,
        or the oldest. What another holds of the beginning beyond that is copied.

        Raises:
            CapacityError: all are taken.
        """
        if not self._free:
            raise CapacityError(
                f"the model has {len(self._taken)} slots and all are taken; raise max_num_seqs."
            )
        slot = self._best(token_ids)
        self.make_room(len(token_ids) + TREE_ROOM, but=slot)
        retained_ids = self._retained.pop(slot, ())
        length = 0
        if self.model.lengths[slot] == len(retained_ids):  # else someone else used the slot
            length = self.model.resumes(slot, common_length(retained_ids, token_ids))
        if (
            self.prefix_cache is not None
            and len(retained_ids) > length
            and self.model.lengths[slot] == len(retained_ids)
        ):
            self.prefix_cache.store(slot, retained_ids)
        if length:
            self.model.cut(slot, length)
        else:
            self.model.release([slot])  # where it could not be emptied when it was given back
        self._free.remove(slot)
        assert slot not in self._taken
        self._taken[slot] = ()
        if (watched := _TAKEN.get()) is not None:
            watched.append((self, slot))
        try:
            self._copy_beginning(slot, length, token_ids)
        except BaseException:
            self.abandon(slot)
            raise
        return slot

    def num_unread(self, token_ids: Sequence[object]) -> int:
        """Tokens of a text beyond its beginning that `take` would find read: of free slots and of the prefix cache."""
        lengths = [
            common_length(text, token_ids)
            for slot, text in self._retained.items()
            if self.model.lengths[slot] == len(text)
        ]
        stored = 0 if self.prefix_cache is None else self.prefix_cache.length(token_ids)
        return len(token_ids) - max([*lengths, stored])

    def make_room(self, num_tokens: int, but: int | None = None) -> None:
        """Give back memory of free slots, the oldest first, until what slots hold leaves room for so many tokens more. but: one that is to be taken."""
        model = self.model
        if not model.cache_grows or not isinstance(model, SlotModel):
            return
        for slot in [*(slot for slot in self._free if slot not in self._retained), *self._retained]:
            if int(model.written.sum()) + num_tokens <= model.cache_tokens:
                return
            if slot not in self._free or slot == but or not model.written[slot]:
                continue
            retained_ids = self._retained.pop(slot, ())
            if self.prefix_cache is not None and retained_ids and model.lengths[slot] == len(retained_ids):
                self.prefix_cache.store(slot, retained_ids)
            model.trim(slot)

    def store_retained(self) -> None:
        """Put what free slots retain into the prefix cache, the oldest first."""
        if self.prefix_cache is not None:
            for slot, token_ids in self._retained.items():
                if self.model.lengths[slot] == len(token_ids):
                    self.prefix_cache.store(slot, token_ids)

    def holds(self, slot: int, token_ids: Sequence[object]) -> None:
        """What a taken slot is filled with, to be copied as far as it has come by those that take one for a text that begins alike."""
        self._taken[slot] = token_ids

    def _copy_beginning(self, slot: int, length: int, token_ids: Sequence[object]) -> None:
        if len(token_ids) < length + MIN_COPIED:
            return
        lengths = self.model.lengths
        texts = {
            free: text for free, text in self._retained.items() if lengths[free] == len(text)
        } | self._taken

        def common(other: int) -> int:
            return self.model.resumes(other, min(common_length(texts[other], token_ids), int(lengths[other])))

        source = max(texts, key=common)
        if common(source) >= length + MIN_COPIED:
            self.model.release([slot])
            self.model.copy(source, slot, common(source))
        if (
            self.prefix_cache is not None
            and self.prefix_cache.length(token_ids) >= int(self.model.lengths[slot]) + MIN_COPIED
        ):
            self.prefix_cache.load(slot, token_ids)

    def _best(self, token_ids: Sequence[object]) -> int:
        """The free slot that retains the longest beginning, where that is half of its text; else an empty one, the last that was given back,
        or the oldest: what only begins alike, as all chats do, is not written over while there is room beside it."""
        empty = [slot for slot in self._free if slot not in self._retained]
        held = {
            slot: common_length(self._retained[slot], token_ids)
            for slot in self._free
            if slot in self._retained
        }
        longest = max(held, key=lambda slot: held[slot], default=None)
        if longest is not None and 2 * held[longest] >= len(self._retained[longest]):
            return longest
        return empty[-1] if empty else next(iter(held))

    def abandon(self, slot: int) -> None:
        """Give a slot back, if it is taken, while another error is raised; a model that cannot empty it now does so before it is taken again."""
        if slot in self._taken:
            with suppress(Exception):
                self.give_back(slot)

    def give_back(self, slot: int, token_ids: Sequence[object] = ()) -> None:
        """Empty a slot; it is free even where the model fails to. text: what its columns are of, which it retains for a text that begins so."""
        del self._taken[slot]
        assert slot not in self._free
        self._free.append(slot)
        if token_ids:
            self._retained[slot] = token_ids
        else:
            self.model.release([slot])
