"""How far a model has read a text: a slot of its KV cache, and how many committed tokens of the text that slot holds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from polydraft.core.batch import select
from polydraft.core.targets import Scores, Target


@dataclass(eq=False)
class Cursor:
    """A text in a slot of a model: of a target, a draft model, a head or a second sequence.

    The last token of a text is the root of the next tree, which a step reads: what is read before is all but that.
    prompt_length: first tokens that stand in a prompt, which a model may read in another way than those that were generated.

    Example:
        >>> from polydraft.models import load, pair
        >>> cursor = Cursor(load.load_model(str(pair.draft_folder()), max_num_seqs=2), 0)
        >>> text = [5, 6, 7, 8, 9]
        >>> _ = cursor.read(text, 3)
        >>> cursor.length, cursor.num_unread(text)
        (3, 1)
        >>> cursor.cut(2)
        >>> cursor.num_unread(text)
        2
    """

    model: Target
    slot: int
    prompt_length: int = 0

    def __post_init__(self) -> None:
        self.model.set_prompt_length(self.slot, self.prompt_length)

    @property
    def length(self) -> int:
        """Tokens of the text that are read."""
        return int(self.model.lengths[self.slot])

    def num_unread(self, text: Sequence[int]) -> int:
        """Tokens of a text, its last one left out, that are not read yet."""
        return len(text) - 1 - self.length

    def unread(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """What a draft model has to read of a text to draft, the root last."""
        return text[self.length :]

    def read(self, text: Sequence[int], count: int, hidden: Sequence[int] = ()) -> Scores:
        """Append the next so many tokens of a text; their hidden states of these layers."""
        start = self.length
        return self.model.prefill([self.slot], [text[start : start + count]], hidden=hidden)

    def cut(self, length: int) -> None:
        """Forget all but the first so many tokens."""
        if self.length > length:
            self.model.cut(self.slot, length)

    def copy(self, to: "Cursor") -> None:
        """Put what is read here in the place of what another slot of the model holds."""
        to.cut(0)
        self.model.copy(self.slot, to.slot, self.length)


class Reading(NamedTuple):
    """A text that a cursor is to read. source: what its cache depends on beside the text."""

    cursor: Cursor
    text: Sequence[int]
    source: Hashable = ()


def read_all(readings: Sequence[Reading], hidden: Sequence[int] = ()) -> list[Scores]:
    """Read several texts to their last tokens, in one call of the model that they share; the hidden states of each.

    None of them is read to its end already.
    """
    if not readings:
        return []
    unread = [text[cursor.length : -1] for cursor, text, _ in readings]
    scores = readings[0].cursor.model.prefill([r.cursor.slot for r in readings], unread, hidden=hidden)
    return [states_of(scores, row, len(ids)) for row, ids in enumerate(unread)]


def read_each_once(readings: Sequence[Reading]) -> None:
    """The same without states: of equal texts, such as the samples of one prompt, one is read and the others copy it."""
    cursors = {
        (source, tuple(text)): cursor for cursor, text, source in readings if not cursor.num_unread(text)
    }
    behind = [reading for reading in readings if reading.cursor.num_unread(reading.text)]
    copies = list[tuple[Cursor, Cursor]]()
    first = list[Reading]()
    for reading in behind:
        cursor, text, source = reading
        equal = cursors.setdefault((source, tuple(text)), cursor)
        if equal is cursor:
            first.append(reading)
        else:
            copies.append((equal, cursor))
    read_all(first)
    for equal, cursor in copies:
        equal.copy(cursor)


def states_of(scores: Scores, row: int, count: int) -> Scores:
    """One text's part of what several were read with: its first so many tokens."""
    own = select(scores, [row])
    return replace(own, hidden={layer: states[:, :count] for layer, states in own.hidden.items()})
