"""Histories of agents: what is no text in them stands there as text or is left out, and the conversation goes on."""

import logging
from typing import Any, get_args, get_type_hints

import pytest

from polydraft.server import conversation
from polydraft.server.messages import MessagesRequest
from polydraft.server.ollama import OllamaChat
from polydraft.server.responses import ResponsesRequest

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
LEFT_OUT = "[a part of the type {!r} was left out: it cannot be read here]\n"
NOTES = {
    "type": "document",
    "title": "Notes",
    "source": {"type": "text", "media_type": "text/plain", "data": "Buy plums."},
}
FOUND = {
    "type": "search_result",
    "source": "x",
    "title": "Plums",
    "content": [{"type": "text", "text": "They are blue."}],
}


@pytest.fixture(autouse=True)
def log(caplog):
    conversation._tell.cache_clear()
    caplog.set_level(logging.WARNING, "polydraft.server")
    return caplog


def turns(*blocks, role: Any = "user"):
    """A conversation with a turn of these blocks."""
    talk = [
        {"role": "user", "content": "x"},
        {"role": role, "content": list(blocks)},
        {"role": "user", "content": "and?"},
    ]
    return MessagesRequest.model_validate({"max_tokens": 4, "messages": talk}).conversation()


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NOTES, "Notes\nBuy plums.\n"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "One."}, PICTURE]}}, f"One.{LEFT_OUT.format('image')}\n"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}, LEFT_OUT.format("document")),
        (FOUND, "Plums\nThey are blue.\n"),
        ({"type": "compaction", "content": "So far."}, "So far.\n"),
    ],
)  # fmt: skip
def test_documents_of_a_history_are_text(block, text):
    assert turns(block, {"type": "text", "text": "Which?"})[1].content == f"{text}Which?"


def test_what_a_host_ran_is_left_out_of_a_history_and_told_once(log):
    use = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {"query": "plums"}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "a",
        "content": [{"type": "web_search_result", "url": "x"}],
    }
    for _ in range(2):
        said = turns(
            {"type": "text", "text": "Let me look."},
            use,
            found,
            {"type": "text", "text": " Blue."},
            role="assistant",
        )
        assert (said[1].content, said[1].tool_calls) == ("Let me look. Blue.", None)
    assert [record.getMessage().partition("'")[2].partition("'")[0] for record in log.records] == [
        use["type"],
        found["type"],
    ]


def test_a_result_of_a_tool_may_hold_pictures_and_references(served, log):
    content = [
        {"type": "text", "text": "shot:\n"},
        PICTURE,
        {"type": "tool_reference", "tool_name": "grep"},
        NOTES,
    ]
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]},
    ]
    result = MessagesRequest.model_validate({"max_tokens": 4, "messages": talk}).conversation()[2]
    assert (result.role, result.plain()["content"]) == (
        "tool",
        f"shot:\n{LEFT_OUT.format('image')}grep\nNotes\nBuy plums.\n",
    )
    assert (
        served.post("/v1/messages", max_tokens=2, messages=talk).status_code == 200 and len(log.records) == 1
    )


def test_results_of_chats_and_responses_may_hold_pictures(served):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    shown = [{"type": "text", "text": "shot:"}, {"type": "image_url", "image_url": {"url": "x"}}]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "a", "content": shown}]
    assert served.post("/v1/chat/completions", messages=talk, max_tokens=2).status_code == 200
    seen: list[Any] = [{"role": "tool", "content": "shot:", "images": ["aGk="]}]
    assert (
        OllamaChat.model_validate({"messages": seen}).messages[0].content
        == f"shot:{LEFT_OUT.format('image')}"
    )
    output: list[Any] = [{"type": "input_text", "text": "shot:"}, {"type": "input_image", "image_url": "x"}]
    items: list[Any] = [{"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "a", "output": output}]
    last = ResponsesRequest.model_validate({"input": items}).messages()[-1]
    assert last.plain()["content"] == f"shot:{LEFT_OUT.format('input_image')}"


def test_every_block_of_anthropics_client_is_read_or_left_out():
    types = pytest.importorskip("anthropic.types", reason="pip install anthropic")
    beta = pytest.importorskip("anthropic.types.beta", reason="pip install anthropic")
    blocks = [
        kind for union in (types.ContentBlockParam, beta.BetaContentBlockParam) for kind in get_args(union)
    ]
    names = {get_args(get_type_hints(kind)["type"])[0] for kind in blocks if isinstance(kind, type)}
    read = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", *conversation.WRITTEN}
    assert {"server_tool_use", "document", "compaction"} <= names
    for name in names - read - {"image"}:  # a user's picture is refused: the answer would be about it
        assert turns({"type": name})[1].content == "", name
