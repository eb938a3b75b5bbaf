"""A model that thinks first: its thoughts are told apart in every format, tools do not hinder them, and forms and stops begin behind them."""

import json

import pytest

from tests.server.conftest import serving
from tests.server.test_messages import TOOLS as ANTHROPIC_TOOLS
from tests.server.test_tools import FLAT, TOOLS, call
from tests.server.thinker import OFFERS, OPENS, thinker

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

THOUGHTS = "Two, and two more. A <tool_call>?"
SAID = "It is 4."
CALLED = call("add", {"a": 4})
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sum"],
    "additionalProperties": False,
}
ASK = {
    "model": "small",
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "temperature": 0,
    "max_tokens": 160,
}


def answer(template, *parts):
    """What a model says that thinks first: its prompt has the first mark, or it writes that itself."""
    return ("" if template is OPENS else "<think>\n") + THOUGHTS + "\n</think>\n\n" + "".join(parts)


def asked(served, **more):
    """Thoughts, content, names of calls and reason of a chat, which are the same in a stream."""
    choice = served.post("/v1/chat/completions", **ASK, **more).json()["choices"][0]
    message = choice["message"]
    thoughts = ""
    content = ""
    names = []
    for chunk in served.openai.chat.completions.create(**ASK, stream=True, extra_body=more):
        delta = chunk.choices[0].delta
        thoughts = thoughts + ((delta.model_extra or {}).get("reasoning_content") or "")
        content = content + (delta.content or "")
        names += [made.function.name for made in delta.tool_calls or () if made.function.name]
    whole = [made["function"]["name"] for made in message.get("tool_calls", ())]
    assert (message.get("reasoning_content", ""), message["content"] or "", whole) == (
        thoughts,
        content,
        names,
    )
    return thoughts, content, names, choice["finish_reason"]


BOTH = pytest.mark.parametrize("template", [OPENS, OFFERS], ids=["opened", "offered"])


@pytest.mark.parametrize("special", [False, True], ids=["added", "control"])
@BOTH
def test_thoughts_are_told_apart_with_tools_and_without(template, special):
    with serving(thinker(answer(template, SAID), template, special=special)) as served:
        assert asked(served) == asked(served, tools=TOOLS) == (THOUGHTS, SAID, [], "stop")


@BOTH
def test_a_call_behind_thoughts_is_one(template):
    for drafts in (True, False):
        with serving(thinker(answer(template, CALLED), template, drafts=drafts)) as served:
            assert asked(served, tools=TOOLS) == (THOUGHTS, "", ["add"], "tool_calls")


@BOTH
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["required", "named"]
)
def test_a_call_that_has_to_be_made_comes_behind_the_thoughts(template, choice):
    for said in (CALLED, SAID):
        with serving(thinker(answer(template, said), template)) as served:
            thoughts, _, names, reason = asked(
                served, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
            )
            assert thoughts == THOUGHTS and len(names) == 1 and reason in ("tool_calls", "length")


@BOTH
def test_a_form_begins_behind_the_thoughts_with_drafts_and_without(template):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for said in ('{"sum": 4}', SAID):
        found = set()
        for drafts in (True, False):
            with serving(thinker(answer(template, said), template, drafts=drafts)) as served:
                found.add(str(asked(served, response_format=form)))
                thoughts, content, _, reason = asked(served, response_format=form)
                assert (thoughts, reason) == (THOUGHTS, "stop") and set(json.loads(content)) == {"sum"}
        assert len(found) == 1


def test_a_form_of_a_model_that_does_not_think_begins_at_once():
    with serving(thinker(SAID, OFFERS)) as served:
        thoughts, content, *_ = asked(served, response_format={"type": "json_object", "schema": SCHEMA})
        assert thoughts == "" and set(json.loads(content)) == {"sum"}
        assert asked(served, guided_regex="It is [0-9]\\.", chat_template_kwargs={"enable_thinking": False})[
            :2
        ] == ("", SAID)


@BOTH
def test_a_stop_inside_the_thoughts_ends_nothing(template):
    with serving(thinker(answer(template, SAID), template)) as served:
        assert asked(served, stop=["and two", "<think>", "\n"]) == (THOUGHTS, SAID, [], "stop")
        assert asked(served, stop=[" is"])[:2] == (THOUGHTS, "It")
        ids = (
            served.post("/tokenize", content=" and").json()["tokens"]
            + served.post("/tokenize", content=" is").json()["tokens"][:1]
        )
        assert asked(served, stop_token_ids=ids)[:2] == (THOUGHTS, "It")


def test_thoughts_stay_in_the_text_where_that_is_asked_for_and_a_form_then_holds_it_all():
    with serving(thinker(answer(OPENS, SAID), OPENS), reasoning=False) as served:
        assert asked(served)[:2] == ("", f"{THOUGHTS}\n</think>\n\n{SAID}")
        assert asked(served, guided_regex="Two[a-z]{3}")[1][:3] == "Two"


def test_a_message_has_thinking_blocks_whole_and_in_events():
    turns = {
        "messages": ASK["messages"],
        "model": "small",
        "max_tokens": 160,
        "extra_body": {"temperature": 0},
    }
    with serving(thinker(answer(OPENS, CALLED), OPENS)) as served:
        client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)
        whole = client.messages.create(**turns, tools=ANTHROPIC_TOOLS)
        with client.messages.stream(**turns, tools=ANTHROPIC_TOOLS) as stream:
            events = list(stream)
            final = stream.get_final_message()
        for message in (whole, final):
            thought, made = message.content
            assert (thought.type, thought.thinking, made.type, made.input) == (
                "thinking",
                THOUGHTS,
                "tool_use",
                {"a": 4},
            )
            assert thought.signature and message.stop_reason == "tool_use"
        kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "input_json_delta"]
        given = [
            *turns["messages"],
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        ]
        given.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "4"}],
            }
        )
        counted = client.messages.count_tokens(model="small", messages=given).input_tokens
        made = whole.content[1]
        call = {"id": made.id, "function": {"name": made.name, "arguments": json.dumps(made.input)}}
        chat = [
            ASK["messages"][0],
            {"role": "assistant", "reasoning_content": THOUGHTS, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
        ]
        assert counted == served.post("/tokenize", messages=chat).json()["count"]


def test_a_response_has_reasoning_items_whole_and_in_events():
    talk = {"model": "small", "input": "2 + 2?", "temperature": 0, "max_output_tokens": 160, "tools": FLAT}
    with serving(thinker(answer(OPENS, SAID), OPENS)) as served:
        whole = served.openai.responses.create(**talk)
        with served.openai.responses.stream(**talk) as stream:
            events = list(stream)
        for response in (whole, events[-1].response):
            thought, message = response.output
            assert [part.text for part in thought.content] == [THOUGHTS] and response.output_text == SAID
            assert (thought.type, thought.status, message.type) == ("reasoning", "completed", "message")
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        added = "output_item.added content_part.added"
        done = "content_part.done output_item.done"
        assert " ".join(kinds).startswith(
            f"created in_progress {added} reasoning_text.delta reasoning_text.done {done}"
        )
        assert (
            "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
            == THOUGHTS
        )
        ids = served.post("/tokenize", content=f"{THOUGHTS}\n</think>").json()["tokens"]
        assert whole.usage.output_tokens_details.reasoning_tokens == len(ids)
        history = [
            {"role": "user", "content": "2 + 2?"},
            *whole.output,
            {"role": "user", "content": "And 3?"},
        ]
        encrypted = [
            item if item["type"] != "reasoning" else {**item, "content": None}
            for item in map(dict, map(_plain, history))
        ]
        chat = [
            *ASK["messages"],
            {"role": "assistant", "reasoning_content": THOUGHTS, "content": SAID},
            {"role": "user", "content": "And 3?"},
        ]
        expected = served.post("/tokenize", messages=chat).json()["count"]
        for given in (history, encrypted):
            counted = served.post(
                "/v1/responses/input_tokens",
                **talk | {"input": [_plain(item) for item in given], "tools": []},
            )
            assert counted.json()["input_tokens"] == expected


def _plain(item):
    return {"type": "message", **(item if isinstance(item, dict) else item.model_dump())}


def test_ollamas_format_begins_behind_the_thoughts():
    with serving(thinker(answer(OPENS, '{"sum": 4}'), OPENS)) as served:
        options = {"temperature": 0, "num_predict": 160}
        asked = {"model": "small", "stream": False, "format": SCHEMA, "options": options}
        chat = served.post("/api/chat", **asked, messages=ASK["messages"]).json()["message"]
        made = served.post("/api/generate", **asked, prompt="2 + 2?").json()
        assert (chat["thinking"], json.loads(chat["content"])) == (THOUGHTS, {"sum": 4})
        assert (made["thinking"], json.loads(made["response"])) == (THOUGHTS, {"sum": 4})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_earlier_turns_reach_the_template_by_any_name(name):
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": SAID, name: THOUGHTS},
        {"role": "user", "content": "And 3?"},
    ]
    with serving(thinker(answer(OPENS, SAID), OPENS)) as served:
        ids = served.post("/tokenize", messages=turns).json()["tokens"]
        text = served.post("/detokenize", tokens=ids).json()["prompt"]
        assert f"<think>\n{THOUGHTS}\n</think>\n{SAID}" in text


def test_every_token_is_counted_once_in_usage():
    with serving(thinker(answer(OPENS, SAID), OPENS)) as served:
        usage = served.openai.chat.completions.create(**ASK).usage
        ids = served.post("/tokenize", content=f"{THOUGHTS}\n</think>").json()["tokens"]
        assert usage.completion_tokens_details.reasoning_tokens == len(ids) < usage.completion_tokens
