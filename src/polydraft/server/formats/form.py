"""A format: how a model writes calls of tools and what it thinks, as data. Parser, grammar and the text of a history are made from it.

coding    arguments of add(city="Rome", days=3)
json      {"city": "Rome", "days": 3}
tagged    <parameter=city>Rome</parameter><parameter=days>3</parameter>      each parameter between marks, texts as they are
python    city="Rome", days=3
keyed     {city:<|"|>Rome<|"|>,days:3}                                       Gemma 4
nested    <city>Rome</city><days>3</days>                                    MiniMax M3, marks named by keys at any depth
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple
from uuid import uuid4

Coding = Literal["json", "tagged", "python", "keyed", "nested"]
MARK = re.compile(r"\]<\]\w+\[>\[<\w+>|<[^<>\n]{0,80}>|\[/?[A-Z_]+\]|<[a-z]+=|functools(?=\[)")
"""What looks like a mark of a format."""
SLOT = re.compile(r"\{(name|id|index|key|type|string)\}")
ID_LENGTH = 24


class Call(NamedTuple):
    """A call to write. arguments: by name.  id: that results name it by."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "call00001"


class Parameter(NamedTuple):
    """Of tagged arguments: marks around a value, with {key}, and where they are written {type} or {string} ("true" or "false")."""

    opening: str
    closing: str
    separator: str = ""
    quoted: bool = False
    """Whether texts are JSON, too."""
    python: bool = False
    """Whether values that are no texts are written as Python writes them."""


@dataclass(frozen=True)
class Format:
    """How calls and thoughts are written.

    opening, separator, closing: around and between calls.  head, tail: of a call, around its arguments, with the slots {name}, {id} and {index}.
    coding: of arguments.  parameter: of tagged ones.  quote: around texts, of python and keyed ones.  prefix: before each mark of nested ones.
    read_head: an expression of heads that are read beside that which is written; its groups are named like slots.
    sign: what says that calls begin, where that is not their first mark.  preset: what a prompt has written of the answer's first mark.
    others: what begins with that, too, and is no call.  needs_tools: whether the template refuses conversations without tools.
    first_index: the number of the first call.  id_length: of the identifiers that templates take, None for any.
    parallel: whether an answer may have several calls.
    lead: what may stand before calls where something was said before.
    thinking: marks around thoughts, None of a model that writes none.  channels: thoughts may come again behind an answer's beginning.
    hidden: marks around the answer, which are none of it.  before_text: those of them that stand before a text.
    tools: the template's name of the tools, None where it knows none.  knows_calls: whether the template writes calls of a history.
    origin: where this comes from: the template, a table of names, or what is taken for all others.
    """

    name: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    head: str = ""
    tail: str = ""
    coding: Coding = "json"
    parameter: Parameter | None = None
    quote: str = '"'
    prefix: str = ""
    read_head: str | None = None
    sign: str = ""
    preset: str = ""
    others: tuple[str, ...] = ()
    first_index: int = 0
    id_length: int | None = None
    parallel: bool = True
    lead: str = ""
    thinking: tuple[str, str] | None = None
    channels: bool = False
    hidden: tuple[str, ...] = ()
    before_text: str = ""
    tools: str | None = "tools"
    knows_calls: bool = True
    needs_tools: bool = False
    origin: Literal["template", "named", "default"] = "named"

    @cached_property
    def begin(self) -> str:
        """What says that calls begin; empty where a call without marks does."""
        return self.sign or first_mark(self.opening + self.head)

    @cached_property
    def call_begin(self) -> str:
        """What says that a call begins, which may be written without the opening."""
        return self.sign or first_mark(self.head)

    @cached_property
    def depth(self) -> int:
        """Objects of JSON that a head leaves open."""
        plain = SLOT.sub("", self.head)
        return plain.count("{") - plain.count("}") if self.coding == "json" else 0

    @property
    def written_parts(self) -> tuple[str, ...]:
        """All texts that it is made of."""
        parameter = self.parameter[:3] if self.parameter else ()
        parts = (self.lead, self.opening, self.separator, self.closing, self.head, self.tail)
        return (*parts, *parameter, *(self.thinking or ()), *self.hidden, self.before_text, self.prefix)

    def call_head(self, name: str, identifier: str, index: int) -> str:
        """A call up to its arguments."""
        return filled(self.head, name=name, id=identifier, index=str(index + self.first_index))

    def call_tail(self, identifier: str, index: int) -> str:
        """A call behind its arguments."""
        return filled(self.tail, id=identifier, index=str(index + self.first_index))

    def new_id(self) -> str:
        """An identifier of a call, as templates take it."""
        return f"call_{uuid4().hex[:ID_LENGTH]}" if self.id_length is None else uuid4().hex[: self.id_length]


def first_mark(text: str) -> str:
    """The mark with which a text begins, up to its first slot; empty where it begins with none.

    Example:
        >>> first_mark("\\n<tool_call>\\n<function={name}>"), first_mark("<function={name}>"), first_mark('{"name": ')
        ('<tool_call>', '<function=', '')
    """
    fixed = SLOT.split(text, maxsplit=1)[0].strip()
    found = MARK.match(fixed)
    if found:
        return found[0]
    return fixed if len(fixed) > 3 and not fixed.startswith(("{", "[")) else ""


def filled(text: str, **slots: str) -> str:
    """A text with its slots filled in.

    Example:
        >>> filled("functions.{name}:{index}", name="add", index="0")
        'functions.add:0'
    """
    return SLOT.sub(lambda slot: slots.get(slot[1], slot[0]), text)


def type_of(value: Any) -> str:
    """JSON's name of a value's type.

    Example:
        >>> [type_of(value) for value in ("a", True, 1, None, [], {})]
        ['string', 'boolean', 'number', 'null', 'array', 'object']
    """
    named: tuple[tuple[Any, str], ...] = ((str, "string"), (bool, "boolean"), ((int, float), "number"))
    more: tuple[tuple[Any, str], ...] = ((list, "array"), (dict, "object"))
    return next((name for kind, name in (*named, *more) if isinstance(value, kind)), "null")


def as_json(value: Any) -> str:
    """A value as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def written(form: Format, calls: Sequence[Call]) -> str:
    """The text of some calls.

    Example:
        >>> written(Format("x", head="<call>{name}", tail="</call>"), [Call("add", {"a": 1})])
        '<call>add{"a": 1}</call>'
    """
    texts = [
        form.call_head(call.name, call.id, index)
        + written_arguments(form, call.arguments)
        + form.call_tail(call.id, index)
        for index, call in enumerate(calls)
    ]
    return form.opening + form.separator.join(texts) + form.closing if texts else ""


def written_arguments(form: Format, arguments: Mapping[str, Any]) -> str:
    """Arguments by the coding of a format."""
    if form.coding == "tagged":
        assert form.parameter is not None
        return form.parameter.separator.join(_tagged(form.parameter, *item) for item in arguments.items())
    if form.coding == "python":
        return ", ".join(f"{key}={_literal(value, form.quote)}" for key, value in arguments.items())
    if form.coding == "keyed":
        return _keyed(dict(arguments), form.quote)
    if form.coding == "nested":
        return "".join(_element(form.prefix, key, value) for key, value in arguments.items())
    return as_json(arguments)


def _tagged(parameter: Parameter, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text and not parameter.quoted else as_json(value)
    opening = filled(parameter.opening, key=key, type=type_of(value), string=as_json(is_text))
    return f"{opening}{text}{parameter.closing}"


def _literal(value: Any, quote: str) -> str:
    if not isinstance(value, str):
        return as_json(value)
    return as_json(value) if quote == '"' else f"{quote}{value}{quote}"


def _keyed(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_keyed(item, quote) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_keyed(item, quote)}" for key, item in value.items()) + "}"
    return as_json(value)


def _element(prefix: str, key: str, value: Any) -> str:
    return f"{prefix}<{key}>{_children(prefix, value)}{prefix}</{key}>"


def _children(prefix: str, value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_element(prefix, key, item) for key, item in value.items())
    if isinstance(value, list):
        return "".join(_element(prefix, "item", item) for item in value)
    return value if isinstance(value, str) else as_json(value)
