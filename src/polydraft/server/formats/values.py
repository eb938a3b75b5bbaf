"""Arguments as formats code them, read back to JSON values, with the types of a tool's schema where the text alone does not say."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from polydraft.server.formats.form import Format

WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
DEEPEST = 64
"""Levels of values in values that are read."""


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Schemas of a tool's parameters by name."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any) -> frozenset[str]:
    """Names of the types that a schema allows; none where it does not say.

    Example:
        >>> sorted(types_of({"anyOf": [{"type": "string"}, {"type": "null"}]})), types_of({})
        (['null', 'string'], frozenset())
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds = schema.get("type", ())
    types = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}
    for several in ("anyOf", "oneOf"):
        types.update(*(types_of(option) for option in schema.get(several, ())))
    for constant in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
        if isinstance(constant, str):
            types.add("string")
    return frozenset(types)


def is_text(schema: Any) -> bool:
    """Whether a schema allows texts alone."""
    return types_of(schema) == {"string"}


def typed(text: str, schema: Any) -> Any:
    """A value whose text stands between marks: by its schema, else JSON where it is JSON, else a text.

    Example:
        >>> typed("3", {"type": "string"}), typed("3", {"type": "integer"}), typed("{'a': True}", {}), typed("so", {})
        ('3', 3, {'a': True}, 'so')
    """
    if is_text(schema):
        return _plain(text)
    try:
        value = _constant(text.strip())
    except ValueError:
        return _plain(text)
    kinds = types_of(schema)
    keeps_text = "string" in kinds and not _fits(value, kinds)
    return _plain(text) if keeps_text or (isinstance(value, str) and not _quoted(text)) else value


def _plain(text: str) -> str:
    marked = CDATA.fullmatch(text.strip())
    return marked[1] if marked else text


def _quoted(text: str) -> bool:
    return text.strip()[:1] in ('"', "'")


def _fits(value: Any, kinds: frozenset[str]) -> bool:
    """Whether a value has one of the types."""
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int | float):
        return not kinds.isdisjoint(("number", "integer"))
    return ("array" if isinstance(value, list) else "object") in kinds


def _constant(text: str) -> Any:
    """JSON, or one of Python's constants.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(text) from error


class ValueReader:
    """Reads values of the codings python and keyed from a text. quote: around texts, as the format writes them.

    Raises:
        ValueError: a text that is no value.
    """

    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self.quote = quote
        self.at = 0
        self.depth = 0

    def skip(self) -> None:
        """Blanks."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def takes(self, mark: str) -> bool:
        """Whether a mark stands here, which is read then."""
        self.skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expects(self, mark: str) -> None:
        """Read a mark that has to stand here."""
        if not self.takes(mark):
            raise ValueError(f"{mark!r} is missing at {self.at}")

    def key(self, ends: str) -> str:
        """A name, quoted or bare, up to what stands behind it."""
        self.skip()
        found = re.compile(rf"""["']?([^"'{re.escape(ends)},\s]+)["']?\s*{re.escape(ends)}""").match(
            self.text, self.at
        )
        if not found:
            raise ValueError(f"a name is missing at {self.at}")
        self.at = found.end()
        return found[1]

    def value(self) -> Any:
        """The value that stands here."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("values are too deep")
        try:
            return self._value()
        finally:
            self.depth -= 1

    def _value(self) -> Any:
        self.skip()
        for quote in dict.fromkeys((self.quote, '"', "'")):
            if self.text.startswith(quote, self.at):
                return self._text_in(quote)
        if self.takes("["):
            return self._items()
        if self.takes("{"):
            return self._object()
        word = re.compile(r"[^\s,\[\]{}()]+").match(self.text, self.at)
        if not word:
            raise ValueError(f"a value is missing at {self.at}")
        self.at = word.end()
        return WORDS[word[0]] if word[0] in WORDS else json.loads(word[0])

    def _text_in(self, quote: str) -> str:
        """A text in quotes: where they are of one character, one inside ends nothing unless a value may end there.

        Escapes are read, but where a quote inside has none: what does not escape that escapes nothing.
        """
        start = self.at + len(quote)
        if len(quote) > 1:
            end = self.text.index(quote, start)
            self.at = end + len(quote)
            return self.text[start:end]
        end = start
        escapes = True
        while not (self.text[end : end + 1] == quote and self._may_end(end + 1)):
            if end >= len(self.text):
                raise ValueError("a text does not end")
            escapes = escapes and self.text[end] != quote
            end += 2 if self.text[end] == "\\" else 1
        self.at = end + 1
        text = self.text[start:end]
        return _unescaped(text) if escapes else text

    def _may_end(self, at: int) -> bool:
        return bool(re.compile(r"\s*([,\]})]|:|$)").match(self.text, at))

    def _items(self) -> list[Any]:
        items = list[Any]()
        while not self.takes("]"):
            items.append(self.value())
            if not self.takes(","):
                self.expects("]")
                break
        return items

    def _object(self) -> dict[str, Any]:
        values = dict[str, Any]()
        while not self.takes("}"):
            name = self._quoted_key() or self.key(":")
            values[name] = self.value()
            if not self.takes(","):
                self.expects("}")
                break
        return values

    def _quoted_key(self) -> str | None:
        """A key in the format's quotes."""
        self.skip()
        for quote in (self.quote, '"', "'"):
            if self.text.startswith(quote, self.at):
                name = self._text_in(quote)
                self.expects(":")
                return name
        return None

    def arguments(self) -> dict[str, Any]:
        """What stands between the brackets of a call."""
        values = dict[str, Any]()
        self.skip()
        while self.at < len(self.text):
            name = self.key("=")
            values[name] = self.value()
            if not self.takes(","):
                break
        self.skip()
        if self.at < len(self.text):
            raise ValueError(f"more stands at {self.at}")
        return values


def _unescaped(text: str) -> str:
    """A text with its escapes read, where they are escapes."""
    try:
        return json.loads('"' + re.sub(r'(?<!\\)"', r"\"", text.replace("\\'", "'")) + '"', strict=False)
    except ValueError:
        return text


def read_arguments(form: Format, text: str, schema: Any) -> dict[str, Any]:
    """The arguments of a whole call by the coding of a format, but for tagged ones and JSON, which are read in pieces.

    Raises:
        ValueError: they are something else.

    Example:
        >>> read_arguments(Format("x", coding="python"), "city='Rome', days=[1, None]", {})
        {'city': 'Rome', 'days': [1, None]}
    """
    if form.coding == "nested":
        return _elements(text, form.prefix, schema)
    reader = ValueReader(text, form.quote)
    if form.coding == "python":
        return reader.arguments()
    value = reader.value()
    reader.skip()
    if not isinstance(value, dict) or reader.at < len(text):
        raise ValueError("more stands behind the arguments")
    return value


def _elements(text: str, prefix: str, schema: Any) -> dict[str, Any]:
    """The elements of a text by name."""
    values = dict[str, Any]()
    properties = properties_of(schema)
    for key, inner in _pairs(text, prefix):
        values[key] = _content(inner, prefix, properties.get(key, {}))
    return values


def _pairs(text: str, prefix: str) -> list[tuple[str, str]]:
    """Names and texts of the elements that a text is made of.

    Raises:
        ValueError: it is not.
    """
    pairs = list[tuple[str, str]]()
    begins = re.compile(rf"\s*{re.escape(prefix)}<([^<>/\s]+)>")
    at = 0
    while text[at:].strip():
        found = begins.match(text, at)
        if not found:
            raise ValueError(f"an element is missing at {at}")
        end = _end_of(text, found.end(), prefix, found[1])
        pairs.append((found[1], text[found.end() : end]))
        at = end + len(f"{prefix}</{found[1]}>")
    return pairs


def _end_of(text: str, at: int, prefix: str, key: str) -> int:
    """Where an element ends, in which others of its name may be."""
    open_elements = 1
    for mark in re.compile(rf"{re.escape(prefix)}<(/?){re.escape(key)}>").finditer(text, at):
        open_elements += -1 if mark[1] else 1
        if not open_elements:
            return mark.start()
    raise ValueError(f"the element {key!r} does not end")


def _content(text: str, prefix: str, schema: Any) -> Any:
    kinds = types_of(schema)
    if is_text(schema) or f"{prefix}<" not in text:
        empty = {"array": [], "object": {}, "null": None}
        if not text.strip() and kinds and "string" not in kinds:
            return next((empty[kind] for kind in empty if kind in kinds), text)
        return typed(text, schema)
    try:
        pairs = _pairs(text, prefix)
    except ValueError:
        return text
    if {key for key, _ in pairs} == {"item"} and "object" not in kinds:
        items = schema.get("items", {}) if isinstance(schema, Mapping) else {}
        return [_content(inner, prefix, items) for _, inner in pairs]
    return _elements(text, prefix, schema)
