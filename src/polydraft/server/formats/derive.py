"""The format of a template, found by rendering: conversations that differ in one thing are written by it, and what differs is the format.

A call is told from an answer, a call with one parameter from one with none and one with two, and one call from two. What a template does not
write, or writes in a way that no difference shows, is in `named`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from polydraft.models.tokens.chat_template import render
from polydraft.models.tokens.fitting import fitted
from polydraft.server.formats import named
from polydraft.server.formats.form import Call, Format, Parameter, first_mark, written_arguments

SEGMENT = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z_]+\]|\s|\w+|.", re.DOTALL)
"""What a difference may not begin or end in the middle of."""
ENDS = re.compile(r"(\s*<[^<>\n]*(eom|eos|eot|SPECIAL|tool_response)[^<>\n]*>\s*)+$")
"""Marks that end a turn."""
TEXT = "Wortlaut"
THOUGHT = "Gedanke"
FIRST, SECOND = "alpha_tool", "beta_tool"
KEY, OTHER = "erster", "zweiter"
VALUE, MORE = "Wert", "Zahl"
IDS = "callAAAA1", "callBBBB2"
TOKENS = {"bos_token": "", "eos_token": "", "unk_token": "", "pad_token": ""}
ASKED = {"role": "user", "content": "Frage"}


def tool(name: str) -> dict[str, Any]:
    """A tool as templates are told of it."""
    field = {"type": "string", "description": "Text."}
    schema = {"type": "object", "properties": {KEY: field, OTHER: field}, "required": [KEY]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TOOLS = [tool(FIRST), tool(SECOND)]


@dataclass(frozen=True)
class Written:
    """What a template writes of an assistant. template: its text.  tools: its name of the tools."""

    template: str
    tools: str | None = "tools"

    def conversation(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str | None:
        """A conversation as text; None where the template refuses it."""
        more = {**TOKENS, **({self.tools: named.tools_for(self.tools, TOOLS)} if self.tools else {}), **names}
        try:
            return render(self.template, fitted(self.template, messages), **more)
        except Exception:  # a template is a program, and this is how it refuses
            return None

    def answer(
        self, calls: Sequence[Call] = (), content: str = "", thoughts: str = "", **names: Any
    ) -> str | None:
        """What it writes of an answer, with what opens and closes that."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [_as_message(call) for call in calls]
        if thoughts:
            message["reasoning_content"] = thoughts
        before = self.conversation([ASKED], **names)
        text = self.conversation([ASKED, message], **names)
        if text is None or before is None:
            return None
        return text[_same(before, text) :]

    def prompt(self, **names: Any) -> str:
        """What it opens an answer with."""
        closed = self.conversation([ASKED], **names)
        opened = self.conversation([ASKED], add_generation_prompt=True, **names)
        return "" if closed is None or opened is None else opened[_same(closed, opened) :]


def _same(first: str, second: str) -> int:
    """Characters with which two texts begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(first), len(second)))


def _as_message(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


@lru_cache(maxsize=32)
def format_of(template: str, tool_format: str | None = None, reasoning_format: str | None = None) -> Format:
    """The format of a template. tool_format, reasoning_format: names of formats that are taken instead.

    Raises:
        KeyError: a name that no format has.

    Example:
        >>> text = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function|tojson }}</call>{% endfor %}{% endfor %}"
        >>> found = format_of(text + "{{ tools }}")
        >>> found.head, found.tail
        ('<call>{"name": "{name}", "arguments": ', '}</call>')
    """
    found = named.FORMATS[tool_format] if tool_format else _found(template)
    found = replace(found, needs_tools=Written(template, None).conversation([ASKED]) is None)
    thoughts = named.FORMATS[reasoning_format] if reasoning_format else None
    if thoughts is not None:
        return replace(
            found,
            thinking=thoughts.thinking,
            channels=thoughts.channels,
            hidden=thoughts.hidden,
            before_text=thoughts.before_text,
        )
    return found


def _found(template: str) -> Format:
    tools = tools_name(template)
    written = Written(template, tools)
    known = named.of_template(template)
    if known is not None:
        thinking = known.thinking or _thinking(written, template)
        knows = FIRST in (written.answer([Call(FIRST, {KEY: VALUE}, IDS[0])]) or "")
        return replace(known, tools=tools, thinking=thinking, knows_calls=knows)
    thinking = _thinking(written, template)
    derived = _calls(written)
    if derived is None:
        return replace(named.HERMES, tools=tools, knows_calls=False, thinking=thinking, origin="default")
    hidden = tuple(dict.fromkeys((*derived.hidden, *_hidden(written, thinking))))
    return replace(derived, tools=tools, thinking=thinking, hidden=hidden, id_length=_id_length(written))


def _id_length(written: Written) -> int | None:
    """Characters of the identifiers that a template takes, None for any."""
    takes_any = written.answer([Call(FIRST, {KEY: VALUE}, "call_of_another_server")]) is not None
    return None if takes_any else len(IDS[0])


def tools_name(template: str) -> str | None:
    """What a template calls the tools; None where it writes nothing of them."""
    for name in named.TOOLS_NAMES:
        text = Written(template, name).conversation([ASKED], add_generation_prompt=True)
        if text is not None and FIRST in text:
            return name
    return None


def _body(written: Written, calls: Sequence[Call]) -> str | None:
    """The text of calls, without what opens and closes an answer."""
    text = written.answer(calls)
    plain = written.answer(content=TEXT)
    if text is None or plain is None or any(call.name not in text for call in calls):
        return None
    opening = _common(plain.partition(TEXT)[0], text)
    behind = plain.partition(TEXT)[2]
    closing = _common(behind, text[opening:], from_end=True)
    return text[opening : len(text) - closing]


def _common(a: str, b: str, *, from_end: bool = False) -> int:
    """Characters with which two texts begin, or end, alike; whole segments."""
    first = SEGMENT.findall(a)
    second = SEGMENT.findall(b)
    if from_end:
        first.reverse()
        second.reverse()
    count = 0
    for x, y in zip(first, second, strict=False):
        if x != y:
            break
        count += len(x)
    return count


def _calls(written: Written) -> Format | None:
    """How calls are written; None where the template writes none, or in a way that is not found out."""
    values = {KEY: VALUE}
    one = _body(written, [Call(FIRST, values, IDS[0])])
    if one is None:
        return None
    dumped = next(
        (text for text in (json.dumps(values), json.dumps(values, separators=(",", ":"))) if text in one),
        None,
    )
    found = _json_call(one, dumped) if dumped is not None else _other_call(written, one)
    return None if found is None else _with_several(written, found, dumped)


def _json_call(one: str, dumped: str) -> Format:
    head, _, tail = one.rpartition(dumped)
    return Format(
        "json", head=_slots(head, FIRST, IDS[0]), tail=_slots(tail, FIRST, IDS[0]), origin="template"
    )


def _slots(text: str, name: str, identifier: str) -> str:
    return text.replace(name, "{name}").replace(identifier, "{id}")


def _other_call(written: Written, one: str) -> Format | None:
    """Of calls whose arguments are not written as JSON."""
    for coding, pattern in (
        ("python", rf"{FIRST}\({KEY}=(.+?){VALUE}"),
        ("keyed", rf"{FIRST}\{{{KEY}:(.+?){VALUE}"),
    ):
        found = re.search(pattern, one, re.DOTALL)
        if found:
            return _bracketed(one, coding, found[1])
    return _tagged_call(written, one)


def _bracketed(one: str, coding: Any, quote: str) -> Format:
    arguments = f"{KEY}={quote}{VALUE}{quote}" if coding == "python" else f"{{{KEY}:{quote}{VALUE}{quote}}}"
    head, _, tail = one.rpartition(arguments)
    form = Format(coding, coding=coding, quote=quote, origin="template")
    return replace(form, head=_slots(head, FIRST, IDS[0]), tail=_slots(tail, FIRST, IDS[0]))


def _tagged_call(written: Written, one: str) -> Format | None:
    """Of calls whose arguments stand each between marks of its own."""
    none = _body(written, [Call(FIRST, {}, IDS[0])])
    two = _body(written, [Call(FIRST, {KEY: VALUE, OTHER: MORE}, IDS[0])])
    number = _body(written, [Call(FIRST, {KEY: 7}, IDS[0])])
    if none is None or two is None or number is None or KEY not in one or VALUE not in one:
        return None
    head, pair, tail = _around_argument(none, one)
    if not pair or f"<{KEY}>" in pair:
        return None
    separator = _between_arguments(pair, two[len(head) : len(two) - len(tail)])
    if separator is None:
        return None
    parameter = _parameter(pair, number[len(head) :])
    true = _body(written, [Call(FIRST, {KEY: True}, IDS[0])]) or ""
    # blanks behind a value are of what follows: the next argument, or the end of the call
    closing = parameter.closing.rstrip()
    blanks = parameter.closing[len(closing) :]
    parameter = parameter._replace(
        closing=closing, separator=blanks + separator, python="True" in true and "true" not in true
    )
    form = Format("tagged", coding="tagged", parameter=parameter, origin="template")
    return replace(form, head=_slots(head, FIRST, IDS[0]), tail=_slots(blanks + tail, FIRST, IDS[0]))


def _around_argument(none: str, one: str) -> tuple[str, str, str]:
    """A call of one argument: what stands before it, the argument from its first mark on, and what stands behind it. none: a call without any."""
    begin = _common(none, one)
    end = len(one) - _common(none[begin:], one[begin:], from_end=True)
    argument = one[begin:end].lstrip()
    return one[: end - len(argument)], argument, one[end:]


def _between_arguments(pair: str, both: str) -> str | None:
    """What separates arguments; None where the second is not written as the first. both: of them."""
    second = pair.replace(KEY, OTHER).replace(VALUE, MORE)
    if not both.startswith(pair) or not both.endswith(second):
        return None
    return both[len(pair) : len(both) - len(second)]


def _parameter(pair: str, number: str) -> Parameter:
    """Marks around a value. pair: an argument that is a text.  number: the same of a number, and what is behind it."""
    opening, _, closing = pair.partition(VALUE)
    if opening.endswith('"') and closing.startswith('"') and '="' not in opening[-3:]:
        return Parameter(opening[:-1].replace(KEY, "{key}"), closing[1:], quoted=True)
    return Parameter(_typed_opening(opening, number), closing)


def _typed_opening(opening: str, of_number: str) -> str:
    """The marks before a value, with a slot where they say whether that is a text."""
    said = 'string="true"'
    if said in opening and 'string="false"' in of_number:
        opening = opening.replace(said, 'string="{string}"')
    if 'type="string"' in opening and 'type="number"' in of_number:
        opening = opening.replace('type="string"', 'type="{type}"')
    return opening.replace(KEY, "{key}")


def _arguments_text(form: Format, dumped: str | None) -> str:
    return dumped if dumped is not None else written_arguments(form, {KEY: VALUE})


def _with_several(written: Written, form: Format, dumped: str | None) -> Format | None:
    """A format of one call with what stands around and between several."""
    arguments = _arguments_text(form, dumped)
    calls = [Call(FIRST, {KEY: VALUE}, IDS[0]), Call(SECOND, {KEY: VALUE}, IDS[1])]
    two = _body(written, calls)
    parts = [] if two is None else two.split(arguments)
    if len(parts) != 3:
        return _trimmed(replace(form, parallel=False))
    between = _slots(_slots(parts[1], SECOND, IDS[1]), FIRST, IDS[0])
    head, between_head = _indexed(form.head, between, _common_end(between, form.head))
    rest = between[: len(between) - len(between_head)]
    tail = form.tail[: _common(rest, form.tail)]
    separator = rest[len(tail) :]
    if (prompt := written.prompt().strip()) and prompt in separator:  # calls are turns of their own
        alone = replace(form, parallel=False)
        return _trimmed(alone) if first_mark(form.head) else replace(named.LLAMA, origin="template")
    if "{name}" not in head:
        return _trimmed(replace(form, parallel=False))
    opening = form.head[: len(form.head) - len(between_head)]
    first_index = re.search(r"\d+", between_head.replace("1", "0")) if "{index}" in head else None
    form = replace(
        form, opening=opening, head=head, separator=separator, tail=tail, closing=form.tail[len(tail) :]
    )
    return _trimmed(replace(form, first_index=0 if first_index is None else _first_index(parts[0])))


def _common_end(one: str, other: str) -> str:
    length = _common(one, other, from_end=True)
    return other[len(other) - length :]


def _first_index(text: str) -> int:
    numbers = re.findall(r"\b\d+\b", text)
    return int(numbers[-1]) if numbers else 0


def _indexed(head: str, between: str, common: str) -> tuple[str, str]:
    """A head whose number goes up with each call, and the second call's text of it; as they are where there is none."""
    before_first = head[: len(head) - len(common)]
    before_second = between[: len(between) - len(common)]
    first = re.search(r"\d+$", before_first)
    second = re.search(r"\d+$", before_second)
    if not (first and second and int(second[0]) == int(first[0]) + 1):
        return common, common
    left_first = before_first[: first.start()]
    left_second = before_second[: second.start()]
    length = _common(left_first, left_second, from_end=True)
    shared = left_first[len(left_first) - length :] if length else ""
    return f"{shared}{{index}}{common}", f"{shared}{second[0]}{common}"


def _trimmed(form: Format) -> Format:
    """A format whose blanks stand between its parts, and in none of the heads."""
    blanks = form.head[: len(form.head) - len(form.head.lstrip())]
    opening = form.opening + blanks
    separator = form.separator + blanks if form.parallel else form.separator
    if not opening.strip():
        opening = ""
    form = replace(form, opening=opening.lstrip(), separator=separator, head=form.head.lstrip())
    name = {"": "json"}.get(first_mark(form.opening + form.head), first_mark(form.opening + form.head))
    closing = ENDS.sub("", form.closing).rstrip()
    tail = form.tail if closing else ENDS.sub("", form.tail).rstrip()
    return replace(form, name=f"{form.coding} {name}".strip(), closing=closing, tail=tail)


def _thinking(written: Written, template: str) -> tuple[str, str] | None:
    """The marks around thoughts."""
    tries: tuple[dict[str, Any], ...] = (
        {},
        {"enable_thinking": True},
        {"thinking": True},
        {"preserve_thinking": True},
    )
    for options in tries:
        for more in ([], [Call(FIRST, {KEY: VALUE}, IDS[0])]):
            with_thoughts = written.answer(more, TEXT if not more else "", THOUGHT, **options)
            if with_thoughts is not None and THOUGHT in with_thoughts:
                found = _marks(with_thoughts, written.answer(more, TEXT if not more else "", **options) or "")
                if found is not None:
                    return found
    return next((marks for marks in named.THINKING if marks[1] in template), None)


def _marks(text: str, plain: str) -> tuple[str, str] | None:
    before, _, behind = text.partition(THOUGHT)
    known = next(
        (
            marks
            for marks in named.THINKING
            if before.rstrip().endswith(marks[0]) and behind.lstrip().startswith(marks[1])
        ),
        None,
    )
    if known is not None:
        return known
    opening = before[_common(before, plain) :].strip()
    closing = behind.split(TEXT)[0].strip()
    first = first_mark(closing)
    return (opening, first) if opening and first else None


def _hidden(written: Written, thinking: tuple[str, str] | None) -> tuple[str, ...]:
    """Marks around what is said that the prompt has not opened."""
    prompt = written.prompt().strip()
    text = written.answer(content=TEXT)
    if text is None:
        return ()
    before, _, behind = text.partition(TEXT)
    before = before.strip()
    lead = before[_common(before, prompt) :].strip()
    marks = [mark for mark in re.findall(r"<[^<>\n]+>", lead) if not thinking or mark not in thinking]
    closers = re.findall(r"^\s*(<[^<>\n]+>)", behind) if marks else []
    return tuple(dict.fromkeys([*marks, *closers]))
