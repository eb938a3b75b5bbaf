"""How a model thinks behind a prompt, by its format."""

from collections.abc import Sequence
from typing import Any

from polydraft.core.thinking import Thinking
from polydraft.server.formats.form import Format
from polydraft.server.formats.named import THINKING

MOST_MARK_TOKENS = 16
"""That a mark and the blanks behind it may be at the end of a prompt."""


def opens_thoughts(text: str, marks: tuple[str, str]) -> bool:
    """Whether a text ends inside of thoughts.

    Example:
        >>> opens_thoughts("<think>Two", THINKING[0]), opens_thoughts("<think></think>Two", THINKING[0])
        (True, False)
    """
    return text.rfind(marks[0]) > text.rfind(marks[1])


def thinking_of(
    tokenizer: Any, form: Format, prompt: Sequence[int], continued: str | None = None
) -> Thinking | None:
    """How a model thinks behind a prompt; None where it is in the middle of an answer. continued: the beginning of that, where it has one.

    A format that has marks offers them, unless its prompt has closed them: then its models answer at once.
    """
    marks = form.thinking or THINKING[0]
    if continued is not None:
        return Thinking(*marks, opened=True) if opens_thoughts(continued, marks) else None
    end = tokenizer.decode(list(prompt[-MOST_MARK_TOKENS:])).rstrip()
    opened = end.endswith(marks[0].rstrip())
    offered = form.thinking is not None and not end.endswith(marks[1])
    return Thinking(*marks, opened=opened, offered=offered)
