"""The reasoning of models that think between <think> and </think> before they answer, apart from the answer."""

from collections.abc import Sequence
from typing import Any

__all__ = ["ReasoningParser", "opens_reasoning"]

BEGIN, END = "<think>", "</think>"


def opens_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside reasoning: some chat templates write the first mark themselves."""
    return tokenizer.decode(list(prompt[-len(BEGIN) :])).rstrip().endswith(BEGIN)


class ReasoningParser:
    """Reasoning and content of one answer, from its text in pieces of any length. reasoning: whether the text begins inside reasoning.

    Example:
        >>> parser = ReasoningParser()
        >>> [parser.push(text) for text in ("<thi", "nk>\\nTwo and", " two.</th", "ink>\\n\\nFour.")]
        [('', ''), ('Two and', ''), (' two.', ''), ('', 'Four.')]
    """

    def __init__(self, reasoning: bool = False) -> None:
        self._text, self._begun, self._reasoning, self._content = "", reasoning, reasoning, False
        self._blank = True
        """Whether nothing but blanks came of the part that is read; they are dropped."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """What more text adds to each. last: nothing follows."""
        self._text += text
        if not self._begun:
            opening = self._text.lstrip()
            if BEGIN.startswith(opening) and opening != BEGIN and not last:
                return "", ""
            self._begun, self._reasoning = True, opening.startswith(BEGIN)
            self._content = not self._reasoning
            self._text, self._blank = (opening.removeprefix(BEGIN), True) if self._reasoning else (self._text, False)
        reasoning = self._take_reasoning(last) if self._reasoning else ""
        return reasoning, self._released(self._text) if self._content else ""

    def _take_reasoning(self, last: bool) -> str:
        before, mark, behind = self._text.partition(END)
        if mark:
            reasoning = self._released(before).rstrip()
            self._text, self._reasoning, self._content, self._blank = behind, False, True, True
            return reasoning
        held = next((n for n in range(min(len(END) - 1, len(before)), 0, -1) if before.endswith(END[:n])), 0)
        ready = before if last else before[: len(before) - held].rstrip()  # blanks before the mark are none of it
        reasoning = self._released(ready)
        self._text = before[len(ready) :]
        return reasoning

    def _released(self, text: str) -> str:
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        self._text = ""
        return text
