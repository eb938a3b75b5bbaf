"""Calls of tools: how a model is told of its tools, the grammar that its calls follow, and the calls in what it writes.

Calls are written as Hermes and Qwen models do, each as a JSON object between two marks:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A template that knows this form is given the tools. For any other the tools stand in the system message, and calls and results in the
messages that the template knows. Models that were not trained on the marks write the object alone or in a block of code: where that names
one of the tools, it is a call, and the last one of an answer. Arguments follow the schema of their tool at every drafted token.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from polydraft.engine.structured import WRITTEN
from polydraft.models.encoding import special_tokens
from polydraft.params import StructuredOutputs

__all__ = ["BEGIN", "END", "CallParser", "ToolCall", "call_grammar", "described", "knows_tools", "marks_are_special"]

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
"""What stands between the first mark and the arguments."""
BARE = re.compile(r'(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""What stands before the arguments of a call without marks."""
BLANKS = {"whitespace_pattern": r"[ \n]{0,40}"}
"""How JSON is written in a call without marks: as the model likes."""
DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""As the templates of Qwen 2.5 say it."""


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools, their calls and results in this form.

    Example:
        >>> knows_tools("{% if tools %}<tool_call>{% endif %}"), knows_tools("{{ messages[0].content }}")
        (True, False)
    """
    return "tools" in template and BEGIN in template and "<function=" not in template


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools."""
    said = [_plain(message) for message in messages]
    if tools:
        text = DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if said[0]["role"] == "system":
            said[0]["content"] += f"\n\n{text}"
        else:
            said.insert(0, {"role": "system", "content": text})
    return said


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}


def marks_are_special(tokenizer: Any) -> bool:
    """Whether the marks are control tokens, which texts are given without."""
    return BEGIN in special_tokens(tokenizer)


def call_grammar(
    functions: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    required: bool,
    parallel: bool,
    text: StructuredOutputs | None = None,
) -> StructuredOutputs:
    """What an answer with tools may be: text or calls, whose arguments follow the schemas; required: calls alone.

    functions: those that may be called, each with "name" and "parameters".  parallel: several calls are allowed.
    text: the form of an answer that is none of calls, a JSON schema.
    """
    as_token = BEGIN in tokenizer.get_added_vocab()
    begin, end = (BEGIN, END) if as_token else (json.dumps(BEGIN), json.dumps(END))
    rules = [
        f"f{number}: {json.dumps(_head(function['name']))} %json {json.dumps(_schema(function.get('parameters')))} {json.dumps('}')}"
        for number, function in enumerate(functions)
    ]
    body = f'"\\n" ({" | ".join(f"f{number}" for number in range(len(functions)))}) "\\n" {end}'
    more = f'("\\n" {begin} body)*' if parallel else ""
    if required:
        start = f"start: {begin} body {more}"
    elif text is not None:
        start = f"start: {begin} body {more} | %json {json.dumps(_schema({'type': 'object'} if text.json_object else text.json))}"
    else:
        bare = [_bare(number, function) for number, function in enumerate(functions)]
        start = f"start: TEXT | {f'TEXT? {begin}' if as_token else 'opened'} body {more} | " + " | ".join(
            f"b{number}" for number in range(len(bare))
        )
        rules += [*bare, r"TEXT: /(.|\n)+/", "" if as_token else rf"opened[lazy]: /(.|\n)*/ {begin}"]
    return StructuredOutputs(grammar="\n".join([start, f"body: {body}", *rules]))


def _bare(number: int, function: Mapping[str, Any]) -> str:
    """Rules of a call without marks, behind any text."""
    name = re.escape(function["name"])
    opening = rf'/(.|\n)*\{{\s*"name"\s*:\s*"{name}"\s*,\s*"(arguments|parameters)"\s*:/'
    schema = json.dumps(_schema(function.get("parameters")) | {"x-guidance": BLANKS})
    closing = r"/[ \n]{0,40}\}([ \n]{0,4}```)?\n?/"
    return f"o{number}[lazy]: {opening}\nb{number}: o{number} /[ \\n]{{0,40}}/ %json {schema} {closing}"


STEPS = ("```", "json", "{", '"name"', ":", None, ",", ('"arguments"', '"parameters"'), ":", "{")
"""Of `BARE`, between blanks; None is a name."""


def _last_opening(text: str) -> int:
    """Where a call without marks may have begun, of which the text has only a part; else the text's end.

    Example:
        >>> _last_opening('so: {"name": "ad'), _last_opening('{"names": 1} end'), _last_opening("x = {1}\\n``")
        (4, 16, 8)
    """
    candidates = (m.start() for m in re.finditer(r"`+|\{", text))
    return next((at for at in candidates if _may_open(text[at:])), len(text))


def _may_open(text: str) -> bool:
    """Whether a call without marks begins as this text does."""
    for step in STEPS:
        text = text.lstrip()
        if not text:
            return True
        if step is None:
            name = re.match(r'"(?:[^"\\]|\\.)*("|$)', text)
            if name is None:
                return False
            text = text[name.end() :]
            continue
        choices = (step,) if isinstance(step, str) else step
        whole = next((choice for choice in choices if text.startswith(choice)), None)
        if whole is not None:
            text = text[len(whole) :]
        elif any(choice.startswith(text) for choice in choices):
            return True
        elif step not in ("```", "json"):
            return False
    return False


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def _schema(schema: Any) -> dict[str, Any]:
    parsed = json.loads(schema) if isinstance(schema, str) else schema or {"properties": {}, "additionalProperties": False}
    return {**({"type": "object"} if "properties" in parsed or not parsed else {}), **parsed, "x-guidance": WRITTEN}


@dataclass
class ToolCall:
    """One call. arguments: its JSON as far as it was written.  complete: whether that is all of it."""

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")


@dataclass
class Piece:
    """What a piece of an answer adds: content, or to the call of this number."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class CallParser:
    """The content and the calls of one answer, from its text in pieces of any length. names: of the tools, which calls without marks have.

    Example:
        >>> parser = CallParser(["add"])
        >>> parts = 'Let me see.\\n<tool_', 'call>\\n{"name": "add", "arguments": {"a": ', '1}}\\n</tool_call>'
        >>> [(piece.content, piece.name, piece.arguments) for part in parts for piece in parser.push(part)]
        [('Let me see.', None, ''), ('', 'add', ''), ('', None, '{"a": '), ('', None, '1}')]
        >>> parser.calls[0].complete
        True
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names, self.calls = names, list[ToolCall]()
        self._text, self._state = "", self._content
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What more text adds. last: nothing follows, and what might have been the beginning of a mark is content."""
        self._text += text
        pieces = list[Piece]()
        while (piece := self._state()) is not None:
            if piece.content or piece.call is not None:
                pieces.append(piece)
        if last and self._state == self._content and self._text and not self.calls:
            pieces.append(Piece(content=self._text))
            self._text = ""
        return pieces

    def _content(self) -> Piece | None:
        before, mark, behind = self._text.partition(BEGIN)
        bare = next((m for m in BARE.finditer(before) if json.loads(m[1]) in self._names), None)
        if bare is not None:
            content, self._text = "" if self.calls else before[: bare.start()].rstrip(), self._text[bare.end() :]
            self._open(json.loads(bare[1]))
            return Piece(content, len(self.calls) - 1, self.calls[-1].name)
        if mark:
            self._text, self._state = behind, self._head
            return Piece(content="" if self.calls else before.rstrip())
        held = next((n for n in range(min(len(BEGIN) - 1, len(before)), 0, -1) if before.endswith(BEGIN[:n])), 0)
        held = max(held, len(before) - _last_opening(before)) if self._names else held
        ready = before[: len(before) - held].rstrip()  # blanks before a call are none of the content
        if not ready or self.calls:
            return None
        self._text = self._text[len(ready) :]
        return Piece(content=ready)

    def _head(self) -> Piece | None:
        head = HEAD.match(self._text)
        if head is None:
            return None
        self._text = self._text[head.end() :]
        self._open(json.loads(head[1]))
        return Piece(call=len(self.calls) - 1, name=self.calls[-1].name)

    def _open(self, name: str) -> None:
        self.calls.append(ToolCall(name))
        self._state, self._depth, self._quoted, self._escaped = self._arguments, 0, False, False

    def _arguments(self) -> Piece | None:
        if not self._text or self.calls[-1].complete:
            self._state = self._tail if self.calls[-1].complete else self._state
            return Piece() if self.calls[-1].complete else None
        end = next((at for at, character in enumerate(self._text, 1) if self._closes(character)), None)
        arguments, self._text = self._text[:end], "" if end is None else self._text[end:]
        self.calls[-1].arguments += arguments
        self.calls[-1].complete = end is not None
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

    def _tail(self) -> Piece | None:
        _, mark, behind = self._text.partition(END)
        if not mark:
            return None
        self._text, self._state = behind, self._content
        return Piece()
