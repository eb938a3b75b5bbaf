"""What a model thinks before it answers: the marks around it, and where an output is between them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

BLANKS = " \t\r\n"


def characters(data: bytes) -> str:
    """Bytes as a text of as many characters: a token may be part of a character."""
    return data.decode("latin-1")


class PhaseOfText(NamedTuple):
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
        ('thoughts', PhaseOfText(phase='answer', tail='Four.'))
    """

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False
    offered: bool = False
    budget: int | None = None
    message: str = ""

    def begin(self) -> PhaseOfText:
        """Of an output of which nothing was read."""
        return PhaseOfText("thoughts" if self.opened else "start")

    def after(self, place: PhaseOfText, piece: str) -> PhaseOfText:
        """Behind one more piece of text."""
        text = place.tail + piece
        if place.phase == "answer":
            return PhaseOfText("answer")
        if place.phase == "thoughts":
            _, mark, behind = text.partition(self.closing)
            kept = len(self.closing) - 1
            return (
                PhaseOfText("answer", behind)
                if mark
                else PhaseOfText("thoughts", text[max(0, len(text) - kept) :])
            )
        begun = text.lstrip(BLANKS)
        if begun.startswith(self.opening):
            return self.after(PhaseOfText("thoughts"), begun[len(self.opening) :])
        if begun.startswith(self.closing):  # of a model that thinks nothing
            return PhaseOfText("answer", begun[len(self.closing) :])
        waits = self.opening.startswith(begun) or self.closing.startswith(begun)
        return PhaseOfText("start", begun) if waits else PhaseOfText("answer")

    def of_bytes(self) -> "Thinking":
        """The same, to read tokens with as `characters`."""
        opening, closing = (characters(mark.encode()) for mark in (self.opening, self.closing))
        return replace(self, opening=opening, closing=closing)

    def num_tokens(self, tokens: Iterable[bytes]) -> int:
        """How many of an output's tokens are thoughts and their marks.

        Example:
            >>> Thinking().num_tokens([b"<think>", b"\\n", b"</think>", b"Four", b"."])
            3
        """
        marks = self.of_bytes()
        place = self.begin()
        count = 0
        for number, token in enumerate(tokens, 1):
            before = place
            place = marks.after(place, characters(token))
            if place.phase == "answer":
                return number if before.phase == "thoughts" else 0
            count = number
        return count if place.phase == "thoughts" else 0
