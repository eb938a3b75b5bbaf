"""A conversation as a chat template takes it: what a template writes is found by rendering, and the messages are changed to that.

Templates differ in where system messages may stand, whether a role may speak twice in a row, and what they call an assistant's thoughts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from polydraft.models.tokens.chat_template import render

THOUGHTS = "reasoning_content"
"""As conversations name what an assistant thought."""
NAMES = (THOUGHTS, "reasoning", "thinking", "thought")
"""As templates do."""
CLOSING = "</think>"
"""What templates look for that take thoughts as a part of the content, in marks."""
BLOCKS = "thinking_blocks"
"""Of templates that take thoughts as a block of the content."""
SAID = "\ue0f0"
MORE = "\ue0f1"
"""Texts that no template has."""
CALLS = [
    {"id": name, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for name in ("call00001", "call00002")
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")


class Traits(NamedTuple):
    """What a template writes.

    system: where system messages may stand.  repeats: whether a role may speak twice in a row.  parallel: whether a message may have several calls.
    thoughts: the field of an assistant's thoughts, "content" or BLOCKS where they are part of that, None where none are written.
    """

    system: Literal["anywhere", "first", "nowhere"]
    repeats: bool
    parallel: bool
    thoughts: str | None


@lru_cache(maxsize=8)
def traits_of(template: str) -> Traits:
    """Of a template.

    Example:
        >>> traits_of("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.thinking }}{% endfor %}").thoughts
        'thinking'
    """
    asked = _message("user", "x")
    answered = _message("assistant", "y")
    told = _message("system", SAID)
    again = _message("system", MORE)
    anywhere = _writes(template, told, asked, answered, again, asked) and _writes(
        template, told, again, asked
    )
    first = anywhere or _writes(template, told, asked)
    repeats = _writes(template, _message("user", SAID), _message("user", MORE)) and _writes(
        template, asked, _message("assistant", SAID), _message("assistant", MORE), asked
    )
    results = [
        _message("tool", mark, name="f", tool_call_id=call["id"])
        for mark, call in zip((SAID, MORE), CALLS, strict=True)
    ]
    single = _writes(template, asked, _message("assistant", "", tool_calls=CALLS[:1]), results[0])
    parallel = not single or _writes(template, asked, _message("assistant", "", tool_calls=CALLS), *results)
    return Traits(
        "anywhere" if anywhere else "first" if first else "nowhere", repeats, parallel, _thoughts_of(template)
    )


def _thoughts_of(template: str) -> str | None:
    """Templates that read a field of thoughts may write it only where they are told to think: the first that is read is taken then."""
    fields = [name for name in NAMES if re.search(rf"""[.\[(]\s*['"]?{name}\b""", template)]
    others = ["content"] * (CLOSING in template and not fields) + [BLOCKS] * ("thinking" in template)
    written = next((name for name in (*fields, *others) if _writes_thoughts(template, name)), None)
    return written or next(iter(fields), None)


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _writes(template: str, *messages: Mapping[str, Any]) -> bool:
    """Whether a template takes messages and writes the texts in them that it cannot have; some are for conversations with tools alone."""
    names = {**TOKENS, "add_generation_prompt": messages[-1]["role"] != "assistant"}
    return any(_written(template, messages, {**names, **tools}) for tools in ({}, {"tools": [TOOL]}))


def _written(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> bool:
    try:
        text = render(template, messages, **names)
    except Exception:  # a template is a program, and this is how it refuses
        return False
    given = json.dumps(messages, ensure_ascii=False)
    return all(text.count(mark) == given.count(mark) for mark in (SAID, MORE))


def _writes_thoughts(template: str, name: str) -> bool:
    asked = _message("user", "x")
    result = _message("tool", "1", name="f", tool_call_id=CALLS[0]["id"])
    turn = with_thoughts(_message("assistant", "y"), SAID, name)
    calling = with_thoughts(_message("assistant", "", tool_calls=CALLS[:1]), SAID, name)
    return any(_writes(template, asked, *more) for more in ([turn], [turn, asked], [calling, result]))


def with_thoughts(message: Mapping[str, Any], thoughts: str, name: str) -> dict[str, Any]:
    """An assistant's message with what it thought, in a field of `Traits.thoughts`."""
    if name == "content":
        return {**message, "content": f"<think>\n{thoughts}\n{CLOSING}\n\n{message['content']}"}
    if name == BLOCKS:
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return {**message, "content": [{"type": "thinking", "thinking": thoughts}, *text]}
    return {**message, name: thoughts}


def continued_by(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A message with more at its end."""
    if isinstance(message["content"], str):
        return {**message, "content": message["content"] + text}
    *blocks, last = message["content"]
    return {**message, "content": [*blocks, {**last, "text": last["text"] + text}]}


def fitted(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as a template takes it.

    Example:
        >>> template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
        >>> fitted(template, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
        [{'role': 'user', 'content': 'Be kind.\\n\\nHi'}]
    """
    traits = traits_of(template)
    plain = [_with_named_thoughts(message, traits.thoughts) for message in messages]
    if not traits.parallel:
        plain = _one_call_a_message(plain)
    if traits.system != "anywhere":
        plain = _with_system_first(plain, as_user=traits.system == "nowhere")
    return plain if traits.repeats else _joined(plain)


def _with_named_thoughts(message: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    if name in (None, THOUGHTS) or not message.get(THOUGHTS):
        return dict(message)
    rest = {key: value for key, value in message.items() if key != THOUGHTS}
    return with_thoughts(rest, message[THOUGHTS], name)


def _with_system_first(messages: list[dict[str, Any]], *, as_user: bool) -> list[dict[str, Any]]:
    """With one system message, of the texts of all in order; as_user: in the first message of the user."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not texts:
        return messages
    text = "\n\n".join(text for text in texts if text)
    if not as_user:
        return [_message("system", text), *others]
    at = next((number for number, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return [_message("user", text), *others]
    others[at] = {
        **others[at],
        "content": "\n\n".join(part for part in (text, others[at]["content"]) if part),
    }
    return others


def _one_call_a_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With each of several calls in a message of its own, and its result behind it."""
    single = list[dict[str, Any]]()
    waiting = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool" and waiting:
            names = [call["tool_calls"][0].get("id") for call in waiting]
            wanted = message.get("tool_call_id")
            single += [waiting.pop(names.index(wanted) if wanted in names else 0), message]
            continue
        single += waiting
        first, *others = message.get("tool_calls") or [None]
        waiting = [{"role": message["role"], "content": "", "tool_calls": [call]} for call in others]
        if others:
            waiting.insert(0, {**message, "tool_calls": [first]})
        else:
            single.append(message)
    return [*single, *waiting]


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what one role says in a row as one message."""
    joined = list[dict[str, Any]]()
    for message in messages:
        if (
            not joined
            or joined[-1]["role"] != message["role"]
            or message["role"] not in ("user", "assistant")
        ):
            joined.append(message)
            continue
        last = joined.pop()
        content = _together(last["content"], message["content"])
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        joined.append({**last, **message, "content": content} | ({"tool_calls": calls} if calls else {}))
    return joined


def _together(before: Any, behind: Any) -> Any:
    """Two contents as one, in blocks where one of them is."""
    if isinstance(before, str) and isinstance(behind, str):
        return "\n".join(part for part in (before, behind) if part)
    return [
        block
        for part in (before, behind)
        for block in ([{"type": "text", "text": part}] if isinstance(part, str) else part)
    ]
