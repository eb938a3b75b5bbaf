"""Conversations with calls for templates: as a template writes them itself, or in messages that it knows."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from polydraft.server.formats import named
from polydraft.server.formats.form import Call, Format, written

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
OTHER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

Write a function call like this one, of the function "example" with one parameter:
{example}"""
"""Of models that were trained to write calls in another way."""


def prepared(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Format
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation, and what else the template is given, by the format of the template."""
    plain = with_ids(messages, form) if form.knows_calls else [_plain(message, form) for message in messages]
    if not tools:
        needed = form.tools if form.needs_tools else None
        return plain, {} if needed is None else {needed: named.tools_for(needed, [])}
    if form.tools is None:
        return described(plain, tools, form), {}
    return plain, {form.tools: named.tools_for(form.tools, tools)}


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Format
) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: they stand in the system message."""
    conversation = [dict(message) for message in messages]
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if form.head == named.HERMES.head:
        text = DESCRIPTION.format(tools=listed)
    else:
        text = OTHER.format(tools=listed, example=written(form, [Call("example", {"parameter": "value"})]))
    if conversation[0]["role"] == "system":
        conversation[0]["content"] += f"\n\n{text}"
    else:
        conversation.insert(0, {"role": "system", "content": text})
    return conversation


def _plain(message: Mapping[str, Any], form: Format) -> dict[str, Any]:
    """A message without calls and results, which stand in its content."""
    if message["role"] == "tool" and form.origin == "default":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [Call(function["name"], _arguments(function)) for function in functions]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = [message["content"]] if message["content"] else []
    return {**rest, "content": "\n".join([*content, written(form, calls)])}


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that a model wrote and that are no object are one text."""
    arguments = function.get("arguments") or {}
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def with_ids(messages: Sequence[Mapping[str, Any]], form: Format) -> list[dict[str, Any]]:
    """A conversation whose calls have identifiers that the template takes: others are replaced, in calls and results alike.

    Example:
        >>> with_ids([{"role": "tool", "content": "3", "tool_call_id": "call_1"}], named.MISTRAL)[0]["tool_call_id"]
        '74196fe72'
    """
    if form.id_length is None:
        return [dict(message) for message in messages]

    def fitting(name: str | None) -> str | None:
        fits = name is None or (len(name) == form.id_length and name.isalnum())
        return name if fits else sha256(str(name).encode()).hexdigest()[: form.id_length]

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


def shown(form: Format) -> dict[str, Any]:
    """A format in words: where it comes from, one call, and the marks of thinking.

    Example:
        >>> shown(named.MISTRAL_ARGS)["call"]
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}'
    """
    call = written(form, [Call("add", {"a": 1, "b": "x"})])
    return {"name": form.name, "origin": form.origin, "call": call, "thinking": list(form.thinking or ())}
