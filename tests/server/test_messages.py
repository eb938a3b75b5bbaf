"""Anthropic's own client finds what it expects: messages, streams, tools, counts and errors."""

import json

import pytest

from tests.server.conftest import serving, small_engine
from tests.server.test_tools import ADD

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

TOOLS = [
    {"name": "add", "description": "Sum.", "input_schema": ADD["parameters"]},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ASK = {
    "model": "small",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "def f("}],
    "system": "Be brief.",
    "extra_body": {"temperature": 0},
}
CALLED = {**ASK, "max_tokens": 120, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}}


@pytest.fixture(scope="module")
def client(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)


def test_a_message_is_the_chat_of_its_system_prompt_and_turns(served, client):
    found = client.messages.create(**ASK)
    messages = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    chat = served.openai.chat.completions.create(
        model="small", messages=messages, max_tokens=12, temperature=0
    )
    assert [block.text for block in found.content] == [chat.choices[0].message.content]
    assert (found.stop_reason, found.role, found.type) == ("max_tokens", "assistant", "message")
    usage = found.usage
    assert (
        usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
        and usage.output_tokens == 12
    )
    counted = client.messages.count_tokens(
        model="small", messages=ASK["messages"], system=[{"type": "text", "text": "Be brief."}]
    )
    assert counted.input_tokens == chat.usage.prompt_tokens
    text = found.content[0].text
    stopped = client.messages.create(**ASK, stop_sequences=[text[3:6]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:6]) and stopped.content[
        0
    ].text == text[: text.index(text[3:6])]


def test_a_stream_is_the_whole_message_in_its_events(client):
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (events[0], events[-1]) == ("message_start", "message_stop") and {
        "content_block_start",
        "content_block_stop",
        "message_delta",
    } <= set(events)


def test_a_call_that_is_broken_off_has_what_was_written_of_its_input(client):
    begun = 0
    for most in (*range(8, 32, 6), 120):
        found = client.messages.create(**{**CALLED, "max_tokens": most})
        with client.messages.stream(**{**CALLED, "max_tokens": most}) as stream:
            final = stream.get_final_message()
        assert [block.type for block in found.content] == [block.type for block in final.content]
        if found.stop_reason != "max_tokens":
            break
        begun += any(block.type == "tool_use" for block in found.content)
    assert begun > 0 and found.stop_reason == "tool_use"


def test_a_tool_is_called_whole_and_streamed_and_its_result_given_back(served, client):
    (made,) = client.messages.create(**CALLED).content
    with client.messages.stream(**CALLED) as stream:
        final = stream.get_final_message()
    assert (made.type, made.name, final.stop_reason) == ("tool_use", "add", "tool_use")
    assert type(made.input["a"]) is int and final.content[0].input == made.input
    result = {"type": "tool_result", "tool_use_id": made.id, "content": [{"type": "text", "text": "3"}]}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [made.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    counted = client.messages.count_tokens(model="small", messages=turns).input_tokens
    chat = [
        *ASK["messages"],
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "add", "arguments": json.dumps(made.input)}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "So?"},
    ]
    assert counted == served.post("/tokenize", messages=chat).json()["count"]
    assert client.messages.create(**{**ASK, "messages": turns}).content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": -2}, "max_tokens=-2"),
        (
            {"tools": [{"name": "x", "input_schema": {"type": "thing"}}], "tool_choice": {"type": "any"}},
            "tools.0.input_schema",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "expected one of tools: add, now"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "expected a name beside 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    ],
)
def test_wrong_messages_are_refused_in_the_clients_format(client, change, said):
    with pytest.raises(anthropic.BadRequestError, match=said) as told:
        client.messages.create(**{**ASK, **change})
    assert told.value.body["type"] == "error" and told.value.body["error"]["type"] == "invalid_request_error"


def test_a_key_may_come_as_the_client_sends_it():
    with serving(small_engine(), keys=("sk-one",)) as locked:
        for key, opens in (("sk-one", True), ("sk-two", False)):
            client = anthropic.Anthropic(base_url=locked.url, api_key=key, max_retries=0)
            if opens:
                assert client.messages.create(**ASK).content
            else:
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.create(**ASK)
