"""Calls of tools: how a model is told of its tools, and the calls in what it writes; their grammar is in `call_grammar`.

    hermes         <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>      Qwen 2.5, Qwen 3, Hermes
    mistral        [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, ...]
    mistral_args   [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]...
    llama3_json    {"name": "add", "parameters": {"a": 1}}

A template that knows one of these formats is given the tools. For any other the tools stand in the system message, and calls and results in
the messages that the template knows, as Hermes has them. Models that were not trained on the marks write the object alone or in a block of code:
where that names one of the tools, it is a call, and the last one of an answer. Arguments follow the schema of their tool at every drafted token.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any
from uuid import uuid4

import regex

from polydraft.models.tokens.encoding import special_tokens

BEGIN = "<tool_call>"
END = "</tool_call>"
NAME = r'("(?:[^"\\]|\\.)*")'


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls: `opening`, calls with `separator` between them, `closing`; a call is `head`, arguments, `tail`.

    begin: the mark that says a call begins.  marks: those that are tokens where the vocabulary has them.  head: with {name}, as JSON or bare.
    written_head: what stands between the mark and the arguments; None: a call without marks follows.
    written_end: what ends a call after its arguments.  lists: another call's head follows, and no mark.
    id_length: of the identifiers of calls that templates take, None for any.
    """

    name: str
    begin: str
    opening: str
    separator: str
    closing: str
    head: str
    tail: str
    marks: tuple[str, ...]
    written_head: re.Pattern[str] | None
    written_end: re.Pattern[str]
    lists: bool = False
    id_length: int | None = None

    def call_head(self, name: str) -> str:
        """A call up to its arguments."""
        return self.head.replace("{name}", json.dumps(name, ensure_ascii=False) if self.tail else name)


HERMES = CallFormat(
    "hermes",
    BEGIN,
    f"{BEGIN}\n",
    f"\n{END}\n{BEGIN}\n",
    f"\n{END}",
    '{"name": {name}, "arguments": ',
    "}",
    (BEGIN, END),
    re.compile(rf'\s*\{{"name": {NAME}, "arguments": '),
    re.compile(rf"(?s:.*?){END}"),
)
MISTRAL = CallFormat(
    "mistral",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][",
    ", ",
    "]",
    '{"name": {name}, "arguments": ',
    "}",
    ("[TOOL_CALLS]",),
    re.compile(rf'\s*\[?\s*\{{\s*"name"\s*:\s*{NAME}\s*,\s*"arguments"\s*:\s*(?=\{{)'),
    re.compile(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}\s*,'),
    lists=True,
    id_length=9,
)
MISTRAL_ARGS = CallFormat(
    "mistral_args",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    "",
    "{name}[ARGS]",
    "",
    ("[TOOL_CALLS]", "[ARGS]"),
    re.compile(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][a-zA-Z0-9]*)?\[ARGS\]\s*(?=\{)"),
    re.compile(""),
    id_length=9,
)
LLAMA = CallFormat(
    "llama3_json",
    "<|python_tag|>",
    "",
    "; ",
    "",
    '{"name": {name}, "parameters": ',
    "}",
    ("<|python_tag|>",),
    None,
    re.compile(r"\s*\}\s*;"),
)
FORMATS = {calls.name: calls for calls in (HERMES, MISTRAL, MISTRAL_ARGS, LLAMA)}
BARE = regex.compile(
    r'(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""What stands before the arguments of a call without marks."""
NAMED = re.compile(rf'(?:```(?:json)?\s*)?\{{\s*"name"\s*:\s*{NAME}')
"""What of it names the tool."""
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


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template writes calls and results in; None where it knows no tools, or another format.

    Example:
        >>> format_of("{% if tools %}<tool_call>{% endif %}").name, format_of("{{ messages[0].content }}")
        ('hermes', None)
    """
    if "tools" not in template or "<function=" in template:
        return None
    if BEGIN in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        opening = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]["
        return MISTRAL_ARGS if "[ARGS]" in template else replace(MISTRAL, opening=opening)
    return LLAMA if "python_tag" in template or '"parameters": dictionary' in template else None


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools."""
    conversation = [_plain(message) for message in messages]
    if tools:
        text = DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if conversation[0]["role"] == "system":
            conversation[0]["content"] += f"\n\n{text}"
        else:
            conversation.insert(0, {"role": "system", "content": text})
    return conversation


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}"
        for call in message.get("tool_calls", ())
    ]
    thoughts = {name: message[name] for name in ("reasoning_content",) if name in message}
    return {
        "role": message["role"],
        "content": "\n".join([*([message["content"]] if message["content"] else []), *calls]),
        **thoughts,
    }


def has_special_marks(tokenizer: Any, calls: CallFormat) -> bool:
    """Whether the marks are control tokens, which texts are given without."""
    return not special_tokens(tokenizer).isdisjoint(calls.marks)


def _last_opening(text: str) -> int:
    """Where a call without marks may have begun, of which the text has only a part; else the text's end.

    Example:
        >>> _last_opening('so: {"name": "ad'), _last_opening('{"names": 1} end'), _last_opening("x = {1}\\n``")
        (4, 16, 8)
    """
    candidates = (m.start() for m in re.finditer(r"`+|\{", text))
    return next((at for at in candidates if BARE.fullmatch(text, at, partial=True)), len(text))


@dataclass
class ToolCall:
    """One call. arguments: its JSON as far as it was written.  complete: whether that is all of it."""

    name: str
    arguments: str = ""
    complete: bool = False
    id: str = field(default_factory=lambda: _call_id(HERMES))


@dataclass
class Piece:
    """What a piece of an answer adds: content, reasoning, or to the call of this number."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""
    reasoning: str = ""


class CallParser:
    """The content and the calls of one answer, from its text in pieces of any length. names: of the tools, which calls without marks have.
    form: how the model was trained to write them.

    Example:
        >>> parser = CallParser(["add"])
        >>> parts = 'Let me see.\\n<tool_', 'call>\\n{"name": "add", "arguments": {"a": ', '1}}\\n</tool_call>'
        >>> [(piece.content, piece.name, piece.arguments) for part in parts for piece in parser.push(part)]
        [('Let me see.', None, ''), ('', 'add', ''), ('', None, '{"a": '), ('', None, '1}')]
        >>> parser.calls[0].complete
        True
    """

    def __init__(self, names: Collection[str] = (), form: CallFormat = HERMES) -> None:
        self._names = names
        self._format = form
        self.calls = list[ToolCall]()
        self._text = ""
        self._state = self._content
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> list[Piece]:
        """What more text adds. last: nothing follows, and what might have been the beginning of a mark is content.
        cut: the text was broken off, and what is plainly the beginning of a call is none of it.
        """
        self._text += text
        pieces = list[Piece]()
        while (piece := self._state()) is not None:
            if piece.content or piece.call is not None:
                pieces.append(piece)
        if cut and self._state == self._content and self._begins_call():
            self._text = ""
        if last and self._state == self._content and self._text and not self.calls:
            pieces.append(Piece(content=self._text))
            self._text = ""
        return pieces

    def _begins_call(self) -> bool:
        """Whether what is held back is half a mark, or names a tool."""
        begin = self._format.begin
        held = self._text.strip()
        named = NAMED.match(held)
        return (begin.startswith(held) and 2 * len(held) >= len(begin)) or (
            named is not None and json.loads(named[1]) in self._names
        )

    def _content(self) -> Piece | None:
        begin = self._format.begin
        before, mark, behind = self._text.partition(begin)
        bare = next((m for m in BARE.finditer(before) if json.loads(m[1]) in self._names), None)
        if bare is not None:
            content = "" if self.calls else before[: bare.start()].rstrip()
            self._text = self._text[bare.end() :]
            self._open(json.loads(bare[1]))
            return Piece(content, len(self.calls) - 1, self.calls[-1].name)
        if mark:
            self._text = behind
            self._state = self._head if self._format.written_head else self._content
            return Piece(content="" if self.calls else before.rstrip())
        ready = before[: len(before) - self._num_held(before)].rstrip()  # blanks before a call are no content
        if not ready or self.calls:
            return None
        self._text = self._text[len(ready) :]
        return Piece(content=ready)

    def _num_held(self, text: str) -> int:
        """Characters at the end of a text that may be the beginning of a call."""
        begin = self._format.begin
        marks = range(min(len(begin) - 1, len(text)), 0, -1)
        held = next((n for n in marks if text.endswith(begin[:n])), 0)
        return max(held, len(text) - _last_opening(text)) if self._names else held

    def _head(self) -> Piece | None:
        head = self._format.written_head and self._format.written_head.match(self._text)
        if not head:
            return None
        self._text = self._text[head.end() :]
        self._open(json.loads(head[1]) if head[1].startswith('"') else head[1])
        return Piece(call=len(self.calls) - 1, name=self.calls[-1].name)

    def _open(self, name: str) -> None:
        self.calls.append(ToolCall(name, id=_call_id(self._format)))
        self._state = self._arguments
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def _arguments(self) -> Piece | None:
        if not self._text or self.calls[-1].complete:
            self._state = self._tail if self.calls[-1].complete else self._state
            return Piece() if self.calls[-1].complete else None
        end = next((at for at, character in enumerate(self._text, 1) if self._closes(character)), None)
        arguments = self._text[:end]
        self._text = "" if end is None else self._text[end:]
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
        end = self._format.written_end.match(self._text)
        if end is None:
            return None
        self._text = self._text[end.end() :]
        self._state = self._head if self._format.lists else self._content
        return Piece()


def _call_id(calls: CallFormat) -> str:
    return f"call_{uuid4().hex[:24]}" if calls.id_length is None else uuid4().hex[: calls.id_length]


def with_ids(messages: Sequence[Mapping[str, Any]], calls: CallFormat) -> list[dict[str, Any]]:
    """A conversation whose calls have identifiers that the template takes: others are replaced, in calls and results alike.

    Example:
        >>> with_ids([{"role": "tool", "content": "3", "tool_call_id": "call_1"}], MISTRAL)[0]["tool_call_id"]
        '74196fe72'
    """
    if calls.id_length is None:
        return [dict(message) for message in messages]

    def fitting(name: str | None) -> str | None:
        fits = name is None or (len(name) == calls.id_length and name.isalnum())
        return name if fits else sha256(str(name).encode()).hexdigest()[: calls.id_length]

    return [
        {
            **message,
            **({"tool_call_id": fitting(message["tool_call_id"])} if "tool_call_id" in message else {}),
            **(
                {
                    "tool_calls": [
                        {**c, **({"id": fitting(c["id"])} if "id" in c else {})}
                        for c in message["tool_calls"]
                    ]
                }
                if "tool_calls" in message
                else {}
            ),
        }
        for message in messages
    ]
