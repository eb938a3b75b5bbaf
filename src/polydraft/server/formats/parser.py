"""What an answer says, thinks and calls, from its text in pieces of any length; nothing of it vanishes.

What is no call by the format is content. A model that answers in another format than its own (`named.ANY`, or JSON alone that names a tool) is understood.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import regex
from pydantic_core import from_json

from polydraft.core.thinking import BLANKS, Thinking
from polydraft.server.formats import named
from polydraft.server.formats.form import SLOT, Format
from polydraft.server.formats.values import is_text, properties_of, read_arguments, typed

SLOTS = {
    "name": r"(?P<name>[a-zA-Z0-9_.-]{1,256}?)",
    "id": r"[a-zA-Z0-9_.:-]{0,80}?",
    "index": r"\d{1,6}",
    "key": r"(?P<key>[^<>\"\n]{1,256}?)",
    "type": r"(?P<type>\w{1,16})",
    "string": r"(?P<string>true|false)",
}
BARE = regex.compile(
    r'(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*"(?P<name>[a-zA-Z0-9_.-]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])'
)
"""The head of a call without marks."""
MOST_HEAD = 1024
"""Characters that a head may have."""


@dataclass
class ToolCall:
    """One call. arguments: its JSON as far as it was written.  complete: whether that is all of it."""

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: named.HERMES.new_id())

    @property
    def input(self) -> dict[str, Any]:
        """The arguments by name; of those that are broken off, what is there of them. What is no object is one text.

        Example:
            >>> ToolCall("add", '{"city": "Ro').input, ToolCall("add", "Rome").input
            ({'city': 'Ro'}, {'arguments': 'Rome'})
        """
        partly = False if self.complete else "trailing-strings"
        try:
            found = from_json(self.arguments or "{}", allow_partial=partly)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"arguments": self.arguments}


@dataclass
class Piece:
    """What a piece of an answer adds: content, reasoning, or to the call of this number."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""


class Head(NamedTuple):
    """A way in which a call begins. begin: its mark.  pattern: of a whole head from its mark on.  form: of the arguments behind it.

    own: it is the model's own format.
    """

    begin: str
    pattern: Any
    form: Format
    own: bool


def expression(text: str) -> str:
    """An expression of a text with slots, in which blanks may be others.

    Example:
        >>> bool(regex.fullmatch(expression("<f={name}>\\n"), "<f=add> "))
        True
    """
    parts = list[str]()
    seen = set[str]()
    for number, part in enumerate(SLOT.split(text)):
        if number % 2:
            parts.append(f"(?P={part})" if part in seen and part == "name" else SLOTS[part])
            seen.add(part)
            continue
        words = regex.findall(r"\s+|[{}\[\]:,]|[^\s{}\[\]:,]+", part)
        parts += [
            r"\s*"
            if word.isspace()
            else rf"\s*{regex.escape(word)}\s*"
            if word in "{}[]:,"
            else regex.escape(word)
            for word in words
        ]
    return "".join(parts)


@lru_cache(maxsize=32)
def heads_of(form: Format) -> tuple[Head, ...]:
    """All ways in which a call may begin in an answer of a model."""
    heads = list[Head]()
    for one in dict.fromkeys((form, *named.ANY)):
        own = one is form
        behind = _behind_head(one)
        alone = one.read_head or expression(one.head.lstrip())
        for begin, opening in ((one.begin, one.opening), (one.call_begin, "")):
            if begin and (opening or begin == one.call_begin):
                pattern = regex.compile(expression(opening) + alone + behind)
                heads.append(Head(begin, pattern, one, own))
    return tuple(heads)


def _behind_head(form: Format) -> str:
    """What has to follow a head."""
    if form.coding in ("json", "keyed"):
        return r"\s*(?=[{\"])" if form.coding == "json" else r"\s*(?=\{)"
    if form.coding != "tagged" or form.parameter is None:
        return ""
    opening = expression(SLOT.split(form.parameter.opening)[0].strip())
    tail = form.tail.split()
    return rf"\s*(?={opening}|{expression(tail[0])})" if tail else rf"\s*(?={opening})"


class AnswerParser:
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
        self._tools = tools or {}
        self._form = form
        self._thinking = thinking
        self.calls = list[ToolCall]()
        opened = thinking is not None and thinking.opened
        self._text = "" if opened else form.preset
        self._state = self._start
        if thinking is None:
            self._state = self._content
        elif opened:
            self._state = self._thoughts
        self._blank = True
        """Whether nothing but blanks came of the part that is read; they are dropped."""
        self._drops_blanks = opened
        self._last = False
        self._at_start = True
        self._calling = form
        self._raw = ""
        """Of a call that is read whole, from its head on."""
        self._depth = 0
        self._open_objects = 0
        self._quoted = False
        self._escaped = False
        self._separator = ""
        """Before the next parameter, in JSON."""

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

    def _said(self, text: str) -> Piece:
        self._at_start = self._at_start and not text.strip()
        return Piece(content=text)

    def _heads(self) -> tuple[Head, ...]:
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
        held = 0 if self._last else _held(before, (mark,))
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
        held = _held(self._text, marks)
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
        waits = False
        for head in self._heads():
            if not text.startswith(head.begin):
                continue
            found = head.pattern.match(text)
            if found and (head.own or found["name"] in self._tools):
                content = self._before(at)
                self._text = text[found.end() :]
                return self._begins(found["name"], head.form, content)
            whole = head.pattern.fullmatch(text, partial=True)
            waits = waits or (not found and whole is not None and len(text) < MOST_HEAD)
        thinking = self._thinking
        if thinking is not None and self._form.channels and text.startswith(thinking.opening):
            content = self._before(at)
            self._text = text[len(thinking.opening) :]
            self._state = self._thoughts
            self._blank = True
            return self._said(content)
        hidden = max((mark for mark in self._form.hidden if text.startswith(mark)), key=len, default=None)
        longer = [mark for mark in self._form.hidden if mark.startswith(text) and mark != text]
        if not self._last and (waits or longer):
            return self._only_before(at)
        if hidden is not None:
            content = self._before(at)
            self._text = text[len(hidden) :]
            return self._said(content)
        mark = max((mark for mark in self._marks() if text.startswith(mark)), key=len)
        begun = self._text[: at + len(mark)]
        self._text = text[len(mark) :]
        content = begun.lstrip() if self._drops_blanks else begun
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

    # calls

    @property
    def _streams(self) -> bool:
        return self._calling.coding in ("json", "tagged")

    def _begins(self, name: str, form: Format, content: str = "") -> Piece:
        self._calling = form
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._open_objects = form.depth
        self._separator = "{"
        if self._streams:
            self.calls.append(ToolCall(name, id=self._form.new_id()))
            self._state = self._json if form.coding == "json" else self._parameter
            return Piece(content, len(self.calls) - 1, name)
        self._raw = form.call_head(name, "", 0)
        self._name = name
        self._state = self._whole
        return self._said(content)

    def _whole(self) -> Piece | None:
        """A call whose arguments are read when all of them are there."""
        end = _end_of(self._text, self._calling)
        if end is None:
            return None
        arguments = self._text[: end[0]]
        try:
            values = read_arguments(self._calling, arguments, self._tools.get(self._name))
        except (ValueError, IndexError, RecursionError):
            raw = self._raw + self._text[: end[1]]
            self._raw = ""
            self._text = self._text[end[1] :]
            self._state = self._content
            return self._said(raw)
        self._raw = ""
        self._text = self._text[end[0] :]
        self.calls.append(ToolCall(self._name, "", True, self._form.new_id()))
        self.calls[-1].arguments = json.dumps(values, ensure_ascii=False)
        self._state = self._tail
        return Piece(call=len(self.calls) - 1, name=self._name, arguments=self.calls[-1].arguments)

    def _json(self) -> Piece | None:
        """Arguments as JSON: an object, or a text that holds one."""
        if not self._text:
            return None
        if not self.calls[-1].arguments and self._text.startswith('"'):
            return self._json_in_text()
        end = next((at for at, character in enumerate(self._text, 1) if self._closes(character)), None)
        arguments = self._text[:end]
        self._text = "" if end is None else self._text[end:]
        return self._adds(arguments, complete=end is not None)

    def _json_in_text(self) -> Piece | None:
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(self._text)
        except ValueError:
            return None
        self._text = self._text[end:]
        return self._adds(value, complete=True)

    def _adds(self, arguments: str, *, complete: bool = False) -> Piece:
        self.calls[-1].arguments += arguments
        self.calls[-1].complete = complete
        if complete:
            self._state = self._tail
        return Piece(call=len(self.calls) - 1, arguments=arguments)

    def _closes(self, character: str) -> bool:
        """Whether a character ends the object of the arguments."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            return self._depth == 0 and character in "}]"
        return False

    def _parameter(self) -> Piece | None:
        """The next parameter of tagged arguments, or their end."""
        assert self._calling.parameter is not None
        text = self._text.lstrip()
        opening = _opening(self._calling)
        found = opening.match(text)
        if found:
            self._text = text[found.end() :]
            self._key = found["key"].strip()
            said = found.groupdict()
            schema = properties_of(self._tools.get(self.calls[-1].name)).get(self._key, {})
            if said.get("string") == "true" or said.get("type") == "string":
                schema = {"type": "string"}
            self._schema = schema
            self._opened_text = False
            self._state = self._value
            key = f"{self._separator}{json.dumps(self._key, ensure_ascii=False)}: "
            self._separator = ", "
            return self._adds(key)
        waits = not text or opening.fullmatch(text, partial=True) is not None
        tail = self._calling.tail.strip()
        if not self._last and (waits or (tail.startswith(text) and len(text) < len(tail))):
            return None
        if not text.startswith(tail.split("\n")[0]) and self._last:
            return None
        self._text = text
        return self._adds("{}" if self._separator == "{" else "}", complete=True)

    def _value(self) -> Piece | None:
        """A parameter's value: texts as they come, others when all of them is there."""
        parameter = self._calling.parameter
        assert parameter is not None
        closing = parameter.closing.strip()
        end = self._closing(closing)
        streams = is_text(self._schema) and not parameter.quoted
        if streams and not self._opened_text:
            if not self._text and end is None:
                return None
            if not self._last and "<![CDATA[".startswith(self._text[:9].lstrip()) and self._text.strip():
                streams = False
        if end is None:
            return self._part_of_text(parameter, streams)
        value = self._text[:end]
        self._text = self._text[end + len(closing) :]
        if parameter.closing.startswith("\n"):
            value = value.removesuffix("\n")
        if parameter.opening.endswith("\n") and not self._opened_text:
            value = value.removeprefix("\n")
        self._state = self._parameter
        if self._opened_text:
            return self._adds(json.dumps(value, ensure_ascii=False)[1:])
        return self._adds(json.dumps(typed(value, self._schema), ensure_ascii=False))

    def _closing(self, closing: str) -> int | None:
        """Where the closing mark of a value stands: one behind which another parameter or the call's end follows."""
        at = self._text.find(closing)
        tail = self._calling.tail.strip().split("\n")[0]
        opening = _opening(self._calling)
        while at >= 0:
            behind = self._text[at + len(closing) :].lstrip()
            more = opening.fullmatch(behind, partial=True) or opening.match(behind)
            if more or behind.startswith(tail) or (not tail and not behind):
                if not self._last and (not behind or not (opening.match(behind) or behind.startswith(tail))):
                    return None
                return at
            if tail.startswith(behind):
                return at if self._last else None
            at = self._text.find(closing, at + 1)
        return None

    def _part_of_text(self, parameter: Any, streams: bool) -> Piece | None:
        """What is certain of a text whose end is not there."""
        if not streams or self._closing_begun(parameter):
            return None
        held = _held(self._text, (parameter.closing, parameter.closing.strip()))
        ready = self._text[: len(self._text) - held]
        if not ready.strip("\n") and not self._opened_text:
            return None
        if not self._opened_text and parameter.opening.endswith("\n"):
            ready = ready.removeprefix("\n")
            self._text = self._text[-(len(ready) + held) :]
        if not ready:
            return None
        self._text = self._text[len(ready) :]
        written = json.dumps(ready, ensure_ascii=False)[1:-1]
        quote = "" if self._opened_text else '"'
        self._opened_text = True
        return self._adds(quote + written)

    def _closing_begun(self, parameter: Any) -> bool:
        return parameter.closing.strip() in self._text

    def _tail(self) -> Piece | None:
        """What ends a call behind its arguments."""
        while self._open_objects:
            end = _object_end(self._text)
            if end is None:
                return None
            self._text = self._text[end:]
            self._open_objects -= 1
        tail = self._calling.tail.rpartition("}")[2]
        marks = ["```"] if self._calling is named.LLAMA else tail.split()
        rest = _without(self._text, marks, self._last)
        if rest is None:
            return None
        self._text = rest
        self._state = self._between
        return Piece()

    def _between(self) -> Piece | None:
        """Behind a call: another, the end of all calls, or content."""
        form = self._calling
        text = self._text.lstrip()
        separator = form.separator.strip()
        head = _next_head(form)
        closing = form.closing.strip()
        behind = text.removeprefix(separator).lstrip() if separator else text
        if form.opening or separator == ";":
            found = head.match(behind)
            if found:
                self._text = behind[found.end() :]
                return self._begins(found["name"], form)
            waits = (
                not text
                or separator.startswith(text)
                or head.fullmatch(behind, partial=True)
                or closing.startswith(text)
            )
            if waits and not self._last and not (closing and text.startswith(closing)):
                return None
            if closing and text.startswith(closing):
                text = text[len(closing) :]
        elif not text and not self._last:
            return None
        self._text = text
        self._drops_blanks = True
        self._at_start = False
        self._state = self._content
        return Piece()


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text with which a mark may begin."""
    longest = max(map(len, marks), default=1)
    lengths = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in lengths if any(len(m) > n and m.startswith(text[-n:]) for m in marks)), 0)


@lru_cache(maxsize=64)
def _opening(form: Format) -> Any:
    """Of a parameter."""
    assert form.parameter is not None
    return regex.compile(expression(form.parameter.opening.strip()))


@lru_cache(maxsize=64)
def _next_head(form: Format) -> Any:
    return regex.compile((form.read_head or expression(form.head.strip())) + _behind_head(form))


def _without(text: str, marks: list[str], last: bool) -> str | None:
    """A text without the marks that it begins with, in order, some of which may be missing; None where more has to come."""
    for mark in marks:
        plain = text.lstrip()
        if plain.startswith(mark):
            text = plain[len(mark) :]
        elif mark.startswith(plain) and not last:
            return None
    return text


def _object_end(text: str) -> int | None:
    """Behind the bracket that closes an object of which the text is the rest."""
    found = regex.match(r'(?:[^"{}]|"(?:[^"\\]|\\.)*")*+\}', text)
    return found.end() if found else None


def _end_of(text: str, form: Format) -> tuple[int, int] | None:
    """Where the arguments of a call end, and the call; None where they do not yet."""
    if form.coding == "nested":
        at = text.find(form.tail)
        return None if at < 0 else (at, at + len(form.tail))
    if form.coding == "keyed":
        at = text.find("}" + form.tail)
        return None if at < 0 else (at + 1, at + 1 + len(form.tail))
    found = regex.match(
        rf"(.*?){regex.escape(form.tail)}\s*(?:{regex.escape(form.closing or ']')}|,\s*[\w.-]+\()",
        text,
        regex.DOTALL,
    )
    while found:
        end = found.end(1)
        try:
            read_arguments(form, text[:end], None)
            return end, end + len(form.tail)
        except (ValueError, IndexError):
            found = regex.match(
                rf"(.{{{end + 1},}}?){regex.escape(form.tail)}\s*(?:{regex.escape(form.closing or ']')}|,\s*[\w.-]+\()",
                text,
                regex.DOTALL,
            )
    return None
