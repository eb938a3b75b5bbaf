"""What clients send beside what is read: it changes nothing, or it is refused by name."""

import logging

import pytest
from pydantic import BaseModel

from polydraft.cli.files import read_lines
from polydraft.server.answers import in_one_line
from tests.server.test_tools import ADD

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

HELLO = [{"role": "user", "content": "def f("}]
BODIES = {
    "completions": {"model": "small", "prompt": "def f(", "max_tokens": 6, "temperature": 0},
    "chat/completions": {"model": "small", "messages": HELLO, "max_tokens": 6, "temperature": 0},
    "responses": {"model": "small", "input": HELLO, "max_output_tokens": 6, "temperature": 0},
    "messages": {"model": "small", "messages": HELLO, "max_tokens": 6, "temperature": 0},
}
THOUGHT = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": "{"},
    "extra_content": {"x": 1},
}


def text_of(path, found):
    assert found.status_code == 200, found.text
    body = found.json()
    if path == "messages":
        return body["content"][0]["text"]
    if path == "responses":
        return body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if path == "completions" else choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"suffix": "", "stop": "", "best_of": 1, "cache_prompt": True, "keep_alive": "5m"}),
        ("completions", {"stop": ["", "never to be seen"], "repeat_penalty": 1.0, "mirostat": 0}),
        (
            "chat/completions",
            {
                "prompt_cache_retention": "24h",
                "modalities": ["text"],
                "provider": {"only": ["x"]},
                "best_of": 1,
            },
        ),
        (
            "chat/completions",
            {"enable_thinking": False, "cache_prompt": True, "keep_alive": -1, "functions": []},
        ),
        ("chat/completions", {"tools": [{"type": "web_search"}], "add_generation_prompt": True}),
        ("chat/completions", {"messages": [HELLO[0] | {"id": "1", "cache_control": {"type": "ephemeral"}}]}),
        (
            "responses",
            {
                "client_metadata": {"a": "b"},
                "text": {"verbosity": "low"},
                "background": False,
                "max_tool_calls": 3,
            },
        ),
        (
            "responses",
            {
                "top_logprobs": 0,
                "include": ["reasoning.encrypted_content"],
                "text": {"format": {"type": "text"}},
            },
        ),
        (
            "responses",
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, *HELLO]},
        ),
        (
            "responses",
            {"tools": [{"type": "namespace", "name": "n", "tools": []}, {"type": "custom", "name": "patch"}]},
        ),
        (
            "messages",
            {"context_management": {"edits": []}, "betas": ["x"], "output_config": {"effort": "low"}},
        ),
        (
            "messages",
            {
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "metadata": {"user_id": "x"},
                "speed": "fast",
            },
        ),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "def f(", "cache_control": {}}]}
                ]
            },
        ),
    ],
    ids=lambda x: "-".join(x)[:50] if isinstance(x, dict) else x,
)
def test_fields_that_cannot_change_the_answer_change_nothing(served, path, more):
    plain = served.post(f"/v1/{path}", **BODIES[path])
    body = BODIES[path] | more
    assert text_of(path, served.post(f"/v1/{path}", **body)) == text_of(path, plain)


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"typical_p": 0.5}, "typical_p"),
        ("completions", {"xtc_probability": 1}, "xtc_probability"),
        ("completions", {"max_token": 5}, "max_token"),
        ("chat/completions", {"functions": [{"name": "x"}]}, "functions"),
        ("chat/completions", {"modalities": ["text", "audio"]}, "modalities.1"),
        ("chat/completions", {"web_search_options": {"x": 1}}, "web_search_options"),
        ("responses", {"background": True}, "background"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("messages", {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ],
    ids=lambda x: "-".join(x)[:50] if isinstance(x, dict) else x,
)
def test_what_would_change_the_answer_and_is_not_there_is_refused_by_name(served, path, more, param):
    found = served.post(f"/v1/{path}", **BODIES[path] | more)
    assert found.status_code == 400 and found.json()["error"]["param"] == param
    assert found.json()["error"]["message"].startswith(param) or param == "best_of"


def test_a_field_that_is_not_used_is_noted_once_at_debug_level(served, caplog):
    with caplog.at_level(logging.DEBUG, "polydraft.server"):
        for _ in range(2):
            assert (
                served.post("/v1/completions", **BODIES["completions"], never_heard_of=1).status_code == 200
            )
    notes = [r for r in caplog.records if "never_heard_of" in r.getMessage()]
    assert [(r.levelno, "CompletionRequest" in r.getMessage()) for r in notes] == [(logging.DEBUG, True)]


@pytest.mark.parametrize(("given", "meant"), [(1.0, 1), (2**63 + 5, 5)])
def test_a_seed_is_any_whole_number(served, given, meant):
    ask = BODIES["completions"] | {"temperature": 1, "max_tokens": 12}
    texts = [
        text_of("completions", served.post("/v1/completions", **ask, seed=seed)) for seed in (given, meant)
    ]
    assert texts[0] == texts[1]
    drawn = {text_of("completions", served.post("/v1/completions", **ask, seed=-1)) for _ in range(3)}
    assert len(drawn) > 1


def test_top_p_zero_is_greedy(served):
    ask = BODIES["completions"]
    free = served.post("/v1/completions", **ask | {"temperature": 1, "top_p": 0})
    assert text_of("completions", free) == text_of("completions", served.post("/v1/completions", **ask))


def test_past_turns_are_taken_as_clients_give_them_back(served):
    turns = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [],
            "reasoning": "x",
            "reasoning_details": [],
            "thinking_blocks": [],
        },
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "provider_specific_fields": {},
        },
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1"},
    ]
    found = served.post("/tokenize", messages=[*HELLO, *turns, *HELLO])
    text = served.post("/detokenize", tokens=found.json()["tokens"]).json()["prompt"]
    assert "# assistant: \n" in text and "# assistant: no" in text and '"arguments": "{"' in text


def test_messages_in_anthropics_format_take_what_its_clients_send(served):
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    tool = {
        "name": "mcp__" + "x" * 90,
        "input_schema": ADD["parameters"],
        "defer_loading": True,
        "input_examples": [],
        "strict": True,
    }
    turns = [
        *HELLO,
        {"role": "assistant", "content": [*THOUGHT, {"type": "text", "text": "x"}]},
        {"role": "system", "content": "Be brief."},
        *HELLO,
    ]
    counted = client.messages.count_tokens(
        model="small", messages=turns, tools=[tool | {"eager_input_streaming": True}]
    )
    chat = [*HELLO, {"role": "assistant", "content": "x"}, {"role": "system", "content": "Be brief."}, *HELLO]
    assert counted.input_tokens > served.post("/tokenize", messages=chat).json()["count"]
    plain = client.messages.count_tokens(model="small", messages=turns).input_tokens
    assert plain == served.post("/tokenize", messages=chat).json()["count"]


class Point(BaseModel):
    x: bool
    y: bool


def test_official_clients_parse_what_they_asked_for(served):
    limits = {"model": "small", "temperature": 0}
    answer = served.openai.responses.parse(
        **limits, input="A point.", text_format=Point, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, Point) and answer.text.format.type == "json_schema"
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    schema = Point.model_json_schema() | {"additionalProperties": False}
    wanted = {"temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    made = client.messages.create(model="small", max_tokens=60, messages=HELLO, extra_body=wanted)
    assert Point.model_validate_json(made.content[0].text)
    free = served.openai.responses.create(
        **limits, input="A point.", max_output_tokens=60, text={"format": {"type": "json_object"}}
    )
    assert free.output_text.lstrip().startswith("{")


def test_input_tokens_of_a_response_are_counted(served):
    counted = served.openai.responses.input_tokens.count(model="small", input=HELLO)
    whole = served.openai.responses.create(model="small", input=HELLO, max_output_tokens=2)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", whole.usage.input_tokens)


def test_a_last_turn_of_the_assistant_is_continued(served):
    turns = [*HELLO, {"role": "assistant", "content": "x):\n    return"}]
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    answer = client.messages.create(
        model="small", max_tokens=6, messages=turns, extra_body={"temperature": 0}
    )
    prompt = served.openai.completions.create(
        model="small", prompt="# user: def f(\n# assistant: x):\n    return", max_tokens=6, temperature=0
    )
    assert answer.content[0].text == prompt.choices[0].text
    more = {"add_generation_prompt": False, "continue_final_message": True}
    chat = served.openai.chat.completions.create(
        model="small", messages=turns, max_tokens=6, temperature=0, extra_body=more
    )
    assert chat.choices[0].message.content == answer.content[0].text


def test_max_tokens_beyond_the_context_ends_with_length(served):
    long = served.post(
        "/v1/completions",
        prompt=["def f(", "import os\nimport"],
        max_tokens=32_000,
        temperature=0,
        ignore_eos=True,
    )
    choices = long.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    prompts = [
        served.post("/tokenize", prompt=prompt).json()["count"] for prompt in ("def f(", "import os\nimport")
    ]
    assert long.json()["usage"]["completion_tokens"] == 2 * 512 - sum(prompts)


def test_line_ends_of_unicode_are_escaped_in_streams():
    assert in_one_line({"x": "a\u2028b\u2029c\u0085d"}) == '{"x":"a\\u2028b\\u2029c\\u0085d"}'


def test_lines_of_prompt_files_end_at_line_feeds_only(tmp_path):
    (tmp_path / "p.txt").write_bytes("a\u2028b\x0cc\r\nd\n".encode())
    assert read_lines("--prompts", tmp_path / "p.txt") == ["a\u2028b\x0cc", "d"]
