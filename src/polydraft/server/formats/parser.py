"""What an answer says, thinks and calls, from its text in pieces of any length; nothing of it vanishes.

What is no call by the format is content. A model that answers in another format than its own (`named.ANY`, or JSON alone that names a tool) is understood.
"""

from collections.abc import Mapping
from typing import Any

import regex

from polydraft.core.thinking import BLANKS, Thinking
from polydraft.server.formats import named
from polydraft.server.formats.form import Format
from polydraft.server.formats.heads import BARE, MOST_HEAD, CallHead, heads_of
from polydraft.server.formats.reader import CallReader, Piece, num_held


class AnswerParser(CallReader):
    """Thoughts, content and calls of one answer. tools: parameters of those that may be called, by name.  form: how the model was trained to write.

    thinking: where the prompt leaves the thoughts; None: they stay in the content.

    Example:
        >>> parser = AnswerParser({"add": None})
        >>> parts = 'Let me see.\\n<tool_', 'call>\\n{"name": "add", "arguments": {"a": ', '1}}\\n</tool_call>'
        >>> [(piece.content, piece.name, piece.arguments) for part in parts for piece in parser.push(part)]
        [('Let me see.', None, ''), ('', 'add', ''), ('', None, '{"a": '), ('', None, '1}')]
        >>> parser.calls[0].complete
        True
    """

    def __init__(
        self,
        tools: Mapping[str, Any] | None = None,
        form: Format = named.HERMES,
        thinking: Thinking | None = None,
    ) -> None:
        super().__init__(tools or {}, form)
        self._thinking = thinking
        opened = thinking is not None and thinking.opened
        self._text = "" if opened else form.preset
        if thinking is not None:
            self._state = self._thoughts if opened else self._start
        self._blank = True
        """Whether nothing but blanks came of the part that is read; they are dropped."""
        self._drops_blanks = opened

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What more text adds. last: nothing follows."""
        self._text += text
        self._last = last
        pieces = list[Piece]()
        while (piece := self._state()) is not None:
            if piece.content or piece.reasoning or piece.call is not None:
                pieces.append(piece)
        if last:
            pieces += self._rest()
        return pieces

    def _rest(self) -> list[Piece]:
        """What is left at the end of an answer."""
        if self._state in (self._between, self._tail) or not (self._text or self._raw):
            return []
        if self._state == self._json or (self._state == self._value and self._streams):
            return []
        text = self._raw + self._text
        self._raw = ""
        self._text = ""
        return [self._said(text)] if text.strip() or self._at_start else []

    def _heads(self) -> tuple[CallHead, ...]:
        return heads_of(self._form) if self._tools else ()

    # before the answer, and thoughts

    def _start(self) -> Piece | None:
        assert self._thinking is not None
        text = self._text.lstrip(BLANKS)
        marks = (self._thinking.opening.strip(), self._thinking.closing.strip())
        for mark, state in zip(marks, (self._thoughts, self._content), strict=True):
            if text.startswith(mark):
                self._text = text[len(mark) :]
                self._drops_blanks = True
                self._blank = True
                self._state = state
                return Piece()
        hidden = next((mark for mark in self._form.hidden if text.startswith(mark)), None)
        if hidden is not None and not (text == hidden and not self._last):
            self._text = text[len(hidden) :]
            return Piece()
        if not self._last and any(mark.startswith(text) for mark in (*marks, *self._form.hidden)):
            return None
        self._state = self._content
        return Piece()

    def _thoughts(self) -> Piece | None:
        assert self._thinking is not None
        mark = self._thinking.closing
        before, found, behind = self._text.partition(mark)
        if found:
            thought = self._shown(before.rstrip())
            self._text = behind
            self._state = self._content
            self._drops_blanks = True
            self._blank = True
            return Piece(reasoning=thought)
        held = 0 if self._last else num_held(before, (mark,))
        ready = before if self._last else before[: len(before) - held].rstrip()
        if not ready:
            return None
        self._text = before[len(ready) :]
        return Piece(reasoning=self._shown(ready))

    def _shown(self, text: str) -> str:
        text = text.lstrip() if self._blank else text
        self._blank = self._blank and not text
        return text

    # content

    def _content(self) -> Piece | None:
        marks = self._marks()
        at, end = len(self._text), len(self._text)
        for mark in marks:
            found = self._text.find(mark, 0, end + len(mark) if end < len(self._text) else None)
            if 0 <= found < at:
                at = found
                end = found
        bare = self._bare(at)
        if bare is not None and bare.start() < at:
            return self._opens_bare(bare)
        if at < len(self._text):
            return self._at_mark(at)
        return self._plain(self._num_held(marks))

    def _marks(self) -> tuple[str, ...]:
        thinking = (self._thinking.opening,) if self._thinking is not None and self._form.channels else ()
        return tuple(dict.fromkeys((*thinking, *self._form.hidden, *(head.begin for head in self._heads()))))

    def _plain(self, held: int) -> Piece | None:
        """The content that is certain. held: characters at its end that may be a part of a mark."""
        ready = self._text[: len(self._text) - held]
        if not self._last or held:
            ready = ready.rstrip()  # blanks before a call are no content
        if not ready:
            return None
        self._text = self._text[len(ready) :]
        if self._drops_blanks:
            ready = ready.lstrip()
            self._drops_blanks = not ready
        return self._said(ready)

    def _num_held(self, marks: tuple[str, ...]) -> int:
        if self._last:
            return 0
        held = num_held(self._text, marks)
        if self._tools:
            openings = (m.start() for m in regex.finditer(r"`+|\{", self._text))
            bare = next(
                (at for at in openings if BARE.fullmatch(self._text, at, partial=True)), len(self._text)
            )
            held = max(held, len(self._text) - bare)
        return held

    def _bare(self, end: int) -> Any:
        """A call without marks before a place, that names a tool."""
        if not self._tools:
            return None
        return next((m for m in BARE.finditer(self._text, 0, end) if m["name"] in self._tools), None)

    def _opens_bare(self, found: Any) -> Piece:
        content = self._text[: found.start()].rstrip()
        self._text = self._text[found.end() :]
        bare = named.LLAMA
        return self._begins(found["name"], bare, content)

    def _at_mark(self, at: int) -> Piece | None:
        """A mark stands in the text: a call, thoughts, or what is none of the answer."""
        text = self._text[at:]
        begun, waits = self._head_at(text)
        if begun is not None:
            found, form = begun
            content = self._before(at)
            self._text = text[found.end() :]
            return self._begins(found["name"], form, content)
        thinking = self._thinking
        if thinking is not None and self._form.channels and text.startswith(thinking.opening):
            self._state = self._thoughts
            self._blank = True
            return self._drops(at, thinking.opening)
        hidden = max((mark for mark in self._form.hidden if text.startswith(mark)), key=len, default=None)
        longer = [mark for mark in self._form.hidden if mark.startswith(text) and mark != text]
        if not self._last and (waits or longer):
            return self._only_before(at)
        return self._mark_of_text(at) if hidden is None else self._drops(at, hidden)

    def _head_at(self, text: str) -> tuple[tuple[Any, Format] | None, bool]:
        """The head of a call with which a text begins, with its format; else whether it may become one."""
        waits = False
        for head in self._heads():
            if not text.startswith(head.begin):
                continue
            found = head.pattern.match(text)
            if found and (head.own or found["name"] in self._tools):
                return (found, head.form), False
            whole = head.pattern.fullmatch(text, partial=True)
            waits = waits or (not found and whole is not None and len(text) < MOST_HEAD)
        return None, waits

    def _drops(self, at: int, mark: str) -> Piece:
        """The content before a mark, which is none of the answer."""
        content = self._before(at)
        self._text = self._text[at + len(mark) :]
        return self._said(content)

    def _mark_of_text(self, at: int) -> Piece:
        """A mark that begins nothing is content."""
        mark = max((mark for mark in self._marks() if self._text.startswith(mark, at)), key=len)
        end = at + len(mark)
        content = self._text[:end].lstrip() if self._drops_blanks else self._text[:end]
        self._text = self._text[end:]
        self._drops_blanks = False
        return self._said(content)

    def _only_before(self, at: int) -> Piece | None:
        """The content before a mark of which more has to come."""
        drops = self._drops_blanks
        content = self._before(at)
        shown = self._text[:at].rstrip()
        if not content and not drops:
            return None
        self._text = self._text[at if drops and not content else len(shown) :]
        return self._said(content) if content else None

    def _before(self, at: int) -> str:
        content = self._text[:at].rstrip()
        if self._drops_blanks:
            content = content.lstrip()
            self._drops_blanks = self._drops_blanks and not content
        return content
