"""What a model thinks before it answers: the marks around it, and where an output is between them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["BLANKS", "Place", "Thinking"]

BLANKS = " \t\r\n"


class Place(NamedTuple):
    """Where an output is: before anything but blanks, in its thoughts, or in its answer.

    tail: of what was read, that in which a mark may begin; where the thoughts are just over, what stands behind their mark.
    """

    phase: Literal["start", "thoughts", "answer"]
    tail: str = ""


@dataclass(frozen=True)
class Thinking:
    """How a model thinks: first of all, and between two marks.

    opened: the prompt ends inside of the thoughts.  offered: a model whose answer has a form may think before it.

    Example:
        >>> thinking = Thinking()
        >>> place = thinking.after(thinking.begin(), "<think>Two and two.</th")
        >>> place.phase, thinking.after(place, "ink>Four.")
        ('thoughts', Place(phase='answer', tail='Four.'))
    """

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    offered: bool = False

    def begin(self) -> Place:
        """Of an output of which nothing was read."""
        return Place("thoughts" if self.opened else "start")

    def after(self, place: Place, piece: str) -> Place:
        """Behind one more piece of text."""
        text = place.tail + piece
        if place.phase == "answer":
            return Place("answer")
        if place.phase == "thoughts":
            _, mark, behind = text.partition(self.closing)
            kept = len(self.closing) - 1
            return Place("answer", behind) if mark else Place("thoughts", text[max(0, len(text) - kept) :])
        begun = text.lstrip(BLANKS)
        if begun.startswith(self.opening):
            return self.after(Place("thoughts"), begun[len(self.opening) :])
        return Place("start", begun) if self.opening.startswith(begun) else Place("answer")
