"""Calls of tools: how a model is told of its tools, the grammar that its calls follow, and the calls in what it writes.

Calls are written as Hermes and Qwen models do, each as a JSON object between two marks:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

A template that knows this form is given the tools. For any other the tools stand in the system message, and calls and results in the
messages that the template knows. Arguments follow the schema of their tool at every drafted token, whichever model it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
    elif as_token:
        start = f"start: TEXT | TEXT? {begin} body {more}\nTEXT: /(.|\\n)+/"
    else:
        start = f"start: TEXT | opened body {more}\nTEXT: /(.|\\n)+/\nopened[lazy]: /(.|\\n)*/ {begin}"
    return StructuredOutputs(grammar="\n".join([start, f"body: {body}", *rules]))


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
    """The content and the calls of one answer, from its text in pieces of any length.

    Example:
        >>> parser = CallParser()
        >>> parts = 'Let me see.\\n<tool_', 'call>\\n{"name": "add", "arguments": {"a": ', '1}}\\n</tool_call>'
        >>> [(piece.content, piece.name, piece.arguments) for part in parts for piece in parser.push(part)]
        [('Let me see.', None, ''), ('', 'add', ''), ('', None, '{"a": '), ('', None, '1}')]
        >>> parser.calls[0].complete
        True
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
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
        if mark:
            self._text, self._state = behind, self._head
            return Piece(content="" if self.calls else before.rstrip())
        held = next((n for n in range(min(len(BEGIN) - 1, len(before)), 0, -1) if before.endswith(BEGIN[:n])), 0)
        ready = before[: len(before) - held].rstrip()  # blanks before a call are none of the content
        if not ready or self.calls:
            return None
        self._text = self._text[len(ready) :]
        return Piece(content=ready)

    def _head(self) -> Piece | None:
        head = HEAD.match(self._text)
        if head is None:
            return None
        self.calls.append(ToolCall(json.loads(head[1])))
        self._text, self._state = self._text[head.end() :], self._arguments
        self._depth, self._quoted, self._escaped = 0, False, False
        return Piece(call=len(self.calls) - 1, name=self.calls[-1].name)

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
