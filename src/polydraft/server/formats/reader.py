"""Calls of an answer from behind their heads on, in pieces of any length: JSON and tagged arguments as they come, others when they are whole;
and where what an answer writes ends: marks that have begun, marks behind a call, and the arguments of a call that is read whole."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex
from pydantic_core import from_json

from polydraft.server.formats import named
from polydraft.server.formats.form import Format, Parameter
from polydraft.server.formats.heads import next_head, opening_of
from polydraft.server.formats.values import is_text, properties_of, read_arguments, typed


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


class CallReader(ABC):
    """States of a reader that is in a call; each gives what it has read, None where it waits for more. tools: parameters by name."""

    def __init__(self, tools: Mapping[str, Any], form: Format) -> None:
        self._tools = tools
        self._form = form
        self.calls = list[ToolCall]()
        self._text = ""
        self._last = False
        self._state: Callable[[], Piece | None] = self._content
        self._at_start = True
        self._drops_blanks = False
        self._calling = form
        self._raw = ""
        """Of a call that is read whole, from its head on."""
        self._depth = 0
        self._open_objects = 0
        self._quoted = False
        self._escaped = False
        self._separator = ""
        """Before the next parameter, in JSON."""

    @abstractmethod
    def _content(self) -> Piece | None:
        """The state behind calls."""

    def _said(self, text: str) -> Piece:
        self._at_start = self._at_start and not text.strip()
        return Piece(content=text)

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
        end = end_of(self._text, self._calling)
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
        text = self._text.lstrip()
        opening = opening_of(self._calling)
        found = opening.match(text)
        if found:
            self._text = text[found.end() :]
            return self._key_of(found)
        waits = not text or opening.fullmatch(text, partial=True) is not None
        tail = self._calling.tail.strip()
        if not self._last and (waits or (tail.startswith(text) and len(text) < len(tail))):
            return None
        if not text.startswith(tail.split("\n")[0]) and self._last:
            return None
        self._text = text
        return self._adds("{}" if self._separator == "{" else "}", complete=True)

    def _key_of(self, found: Any) -> Piece:
        """The beginning of a parameter."""
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
        opening = opening_of(self._calling)
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

    def _part_of_text(self, parameter: Parameter, streams: bool) -> Piece | None:
        """What is certain of a text whose end is not there."""
        if not streams or self._closing_begun(parameter):
            return None
        held = num_held(self._text, (parameter.closing, parameter.closing.strip()))
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

    def _closing_begun(self, parameter: Parameter) -> bool:
        return parameter.closing.strip() in self._text

    def _tail(self) -> Piece | None:
        """What ends a call behind its arguments."""
        while self._open_objects:
            end = object_end(self._text)
            if end is None:
                return None
            self._text = self._text[end:]
            self._open_objects -= 1
        tail = self._calling.tail.rpartition("}")[2]
        marks = ["```"] if self._calling is named.LLAMA else tail.split()
        rest = without(self._text, marks, self._last)
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
        head = next_head(form)
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
            if closing and (text.startswith(closing) or closing.startswith(text)):
                text = text[len(closing) :]
        elif not text and not self._last:
            return None
        self._text = text
        self._drops_blanks = True
        self._at_start = False
        self._state = self._content
        return Piece()


def num_held(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text with which a mark may begin."""
    longest = max(map(len, marks), default=1)
    lengths = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in lengths if any(len(m) > n and m.startswith(text[-n:]) for m in marks)), 0)


def without(text: str, marks: list[str], last: bool) -> str | None:
    """A text without the marks that it begins with, in order, some of which may be missing; None where more has to come."""
    for mark in marks:
        plain = text.lstrip()
        if plain.startswith(mark):
            text = plain[len(mark) :]
        elif mark.startswith(plain):
            return "" if last else None  # a mark that is cut is no content
    return text


def object_end(text: str) -> int | None:
    """Behind the bracket that closes an object of which the text is the rest."""
    found = regex.match(r'(?:[^"{}]|"(?:[^"\\]|\\.)*")*+\}', text)
    return found.end() if found else None


def end_of(text: str, form: Format) -> tuple[int, int] | None:
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
