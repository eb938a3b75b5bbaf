"""Who owns a slot of a model: everyone that runs sequences in one takes its slots here and gives each back once."""

from collections.abc import Sequence

from polydraft.core import Target
from polydraft.errors import CapacityError

__all__ = ["Slots"]


class Slots:
    """The slots of a model, each of them free or taken.

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
        self._model = model
        self._free = list(range(model.max_num_seqs) if numbers is None else numbers)[::-1]
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """An empty slot, the taker's until it is given back.

        Raises:
            CapacityError: all are taken.
        """
        if not self._free:
            raise CapacityError(f"the model has {len(self._taken)} slots and all are taken; raise max_num_seqs.")
        self._model.release(self._free[-1:])  # where it could not be emptied when it was given back
        slot = self._free.pop()
        assert slot not in self._taken
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Empty a slot; it is free even where the model fails to."""
        self._taken.remove(slot)
        assert slot not in self._free
        self._free.append(slot)
        self._model.release([slot])
