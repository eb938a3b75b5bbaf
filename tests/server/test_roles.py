"""Conversations of every format reach templates that take fewer roles than clients send; nothing of them is lost, and none is refused."""

import logging

import pytest

from polydraft.server.responses import _tell
from tests.models.test_fitting import ALTERNATES, SYSTEM_FIRST
from tests.server.conftest import serving, small_engine
from tests.server.test_tools import FLAT, TOOLS

HELLO = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def prompt_of(served, path, **body):
    """The text of a prompt, from its tokens as the path counts them."""
    engine = served.engine
    seen = []
    encode, engine.encode_chat = (
        engine.encode_chat,
        lambda *given, **more: seen.append(encode(*given, **more)) or seen[-1],
    )
    try:
        found = served.post(path, model="small", **body)
        assert found.status_code == 200, found.text
    finally:
        del engine.encode_chat
    return engine.tokenizer.decode(seen[-1])


@pytest.fixture(scope="module", params=[SYSTEM_FIRST, ALTERNATES], ids=["first", "alternating"])
def strict(request):
    engine = small_engine()
    engine.tokenizer.chat_template = request.param
    with serving(engine) as served:
        yield (
            served,
            "system: A\n\nB\nuser: hi\n" if request.param is SYSTEM_FIRST else "user: A\n\nB\n\nhi\n",
        )


def test_system_messages_of_every_format_are_one(strict):
    served, expected = strict
    a = {"role": "system", "content": "A"}
    b = {"role": "developer", "content": "B"}
    for messages in ([a, b, HELLO], [a, HELLO, b]):
        assert prompt_of(served, "/v1/chat/completions", messages=messages, max_tokens=1) == expected
    for given in ([b, HELLO], [HELLO, {"type": "message", **b}]):
        assert (
            prompt_of(served, "/v1/responses", input=given, instructions="A", max_output_tokens=1) == expected
        )
    turns = [HELLO, {"role": "system", "content": "B"}]
    assert prompt_of(served, "/v1/messages/count_tokens", messages=turns, system="A") == expected


def test_tools_and_parallel_results_reach_a_template_without_roles_for_them(strict):
    served, _ = strict
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "ab"]
    calls = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "b"}]}
    messages = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "Noon?"},
        calls,
        *results,
        {"role": "user", "content": "So?"},
    ]
    text = prompt_of(served, "/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=1)
    places = [text.index(part) for part in ("A", '"name": "add"', "Noon?", "of a", "of b", "So?")]
    assert places == sorted(places) and text.count('{"name": "now", "arguments": {}}') == 2


def test_parts_of_text_and_items_of_other_tools_are_read_or_left_out_and_the_log_says_so(served, caplog):
    _tell.cache_clear()
    caplog.set_level(logging.INFO, "polydraft.server")
    given = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        {"type": "item_reference", "id": "i"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "patched"},
        {
            "type": "local_shell_call",
            "call_id": "s",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "s", "output": "note.txt"},
        {
            "type": "web_search_call",
            "id": "w",
            "status": "completed",
            "action": {"type": "search", "query": "plums"},
        },
        {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "sums"}},
        {"type": "tool_search_output", "call_id": "t", "tools": [{"name": "sum"}]},
        {"type": "function_call", "call_id": "f", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "f", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    text = prompt_of(served, "/v1/responses", input=given, tools=FLAT, max_output_tokens=1)
    parts = [
        "hi",
        "[apply_patch] *** Begin",
        "patched",
        '"ls"',
        "note.txt",
        "plums",
        "sums",
        '"name": "sum"',
        '"now"',
        "noon",
    ]
    places = [text.rindex(part) for part in parts]
    assert places == sorted(places)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert (
        "'compaction' in the input of responses are left out" in said
        and "'custom_tool_call' in the input of responses are read as text" in said
    )
