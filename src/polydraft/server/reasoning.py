"""What models think before they answer: the marks that a template knows, whether a prompt has opened them, and thoughts apart from the answer."""

from collections.abc import Sequence
from typing import Any

from polydraft.core.thinking import BLANKS, Thinking

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
)
"""Around the thoughts of a model, by family; the first are taken where a template has none."""
MOST_MARK_TOKENS = 16
"""That a mark and the blanks behind it may be at the end of a prompt."""


def marks_of(template: str) -> tuple[str, str]:
    """Those that a chat template writes or reads.

    Example:
        >>> marks_of("{{ '[THINK]' + m.thinking + '[/THINK]' }}"), marks_of("{{ m.content }}")
        (('[THINK]', '[/THINK]'), ('<think>', '</think>'))
    """
    return next((marks for marks in MARKS if marks[1] in template), MARKS[0])


def opens_thoughts(text: str, marks: tuple[str, str]) -> bool:
    """Whether a text ends inside of thoughts.

    Example:
        >>> opens_thoughts("<think>Two", MARKS[0]), opens_thoughts("<think></think>Two", MARKS[0])
        (True, False)
    """
    return text.rfind(marks[0]) > text.rfind(marks[1])


def thinking_of(
    tokenizer: Any, template: str, prompt: Sequence[int], continued: str | None = None
) -> Thinking | None:
    """How a model thinks behind a prompt; None where it is in the middle of an answer. continued: the beginning of that, where it has one.

    A template that knows marks offers them, unless its prompt has closed them: then its models answer at once.
    """
    marks = marks_of(template)
    if continued is not None:
        return Thinking(*marks, opened=True) if opens_thoughts(continued, marks) else None
    end = tokenizer.decode(list(prompt[-MOST_MARK_TOKENS:])).rstrip()
    opened = end.endswith(marks[0])
    return Thinking(*marks, opened=opened, offered=marks[1] in template and not end.endswith(marks[1]))


class ReasoningParser:
    """Reasoning and content of one answer, from its text in pieces of any length.

    Example:
        >>> parser = ReasoningParser()
        >>> [parser.push(text) for text in ("<thi", "nk>\\nTwo and", " two.</th", "ink>\\n\\nFour.")]
        [('', ''), ('Two and', ''), (' two.', ''), ('', 'Four.')]
    """

    def __init__(self, thinking: Thinking | None = None) -> None:
        thinking = thinking or Thinking()
        self._opening = thinking.opening
        self._closing = thinking.closing
        self._text = ""
        self._begun = thinking.opened
        self._reasoning = thinking.opened
        self._content = False
        self._blank = True
        """Whether nothing but blanks came of the part that is read; they are dropped."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """What more text adds to each. last: nothing follows."""
        self._text += text
        if not self._begun:
            opening = self._text.lstrip(BLANKS)
            if self._opening.startswith(opening) and opening != self._opening and not last:
                return "", ""
            self._begun = True
            self._reasoning = opening.startswith(self._opening)
            self._content = not self._reasoning
            if self._reasoning:
                self._text = opening.removeprefix(self._opening)
                self._blank = True
            else:
                self._blank = False
        reasoning = self._take_reasoning(last) if self._reasoning else ""
        return reasoning, self._released(self._text) if self._content else ""

    def _take_reasoning(self, last: bool) -> str:
        mark = self._closing
        before, found, behind = self._text.partition(mark)
        if found:
            reasoning = self._released(before).rstrip()
            self._text = behind
            self._reasoning = False
            self._content = True
            self._blank = True
            return reasoning
        held = next(
            (n for n in range(min(len(mark) - 1, len(before)), 0, -1) if before.endswith(mark[:n])), 0
        )
        ready = (
            before if last else before[: len(before) - held].rstrip()
        )  # blanks before the mark are none of it
        reasoning = self._released(ready)
        self._text = before[len(ready) :]
        return reasoning

    def _released(self, text: str) -> str:
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        self._text = ""
        return text
