"""Calls of tools: the grammar allows what fits the schemas alone, and the parser finds in any pieces what was written."""

import json
import random

import openai
import pytest

from polydraft import StructuredOutputs
from polydraft.engine.structured import Grammars
from polydraft.models import load, pair
from polydraft.server.formats import named
from polydraft.server.formats.derive import format_of
from polydraft.server.formats.history import prepared, with_ids
from polydraft.server.formats.parser import AnswerParser
from tests.server.conftest import serving, small_engine
from tests.server.constraints import calls_of, is_allowed

FORMATS = {form.name: form for form in (named.HERMES, named.MISTRAL, named.MISTRAL_ARGS, named.LLAMA)}
NAMES = {"add": None, "now": None}
BEGIN = "<tool_call>"
END = "</tool_call>"
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now"}


def call(name, arguments):
    return f'{BEGIN}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n{END}'


def parsed(parts):
    parser = AnswerParser(NAMES)
    pieces = [piece for i, part in enumerate(parts) for piece in parser.push(part, last=i == len(parts) - 1)]
    streamed = {}
    for piece in pieces:
        if piece.call is not None:
            name, arguments = streamed.get(piece.call, (None, ""))
            streamed[piece.call] = (piece.name or name, arguments + piece.arguments)
    assert [streamed[i] for i in range(len(streamed))] == [(c.name, c.arguments) for c in parser.calls]
    return "".join(piece.content for piece in pieces), parser.calls


AWKWARD = {"a": 'x"}]{', "b": [{"c": "\\"}, []], "d": "</tool_call>"}


def pieces(text, number):
    """A text in so many pieces and one."""
    cuts = sorted(random.Random(number).sample(range(len(text)), number))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("text", ["", "Let me see.", "a < b <tool\n\nof "])
def test_calls_are_found_whatever_pieces_they_come_in(text):
    whole = text + "\n" * bool(text) + call("add", AWKWARD) + "\n" + call("now", {})
    for number in range(1, 21):
        content, calls = parsed(pieces(whole, number))
        assert content == text.rstrip() and [
            (c.name, json.loads(c.arguments), c.complete) for c in calls
        ] == [
            ("add", AWKWARD, True),
            ("now", {}, True),
        ]


BARE = '{\n  "name": "add",\n  "arguments": {\n    "a": 3\n  }\n}'


@pytest.mark.parametrize(
    "whole", [BARE, f"```json\n{BARE}\n```", BARE.replace("arguments", "parameters"), f"```\n{BARE}\n```\n"]
)
@pytest.mark.parametrize("text", ["", 'Like {"name": "Bob", "x": 1}, or `{`:'])
def test_a_call_without_marks_is_found_where_it_names_a_tool(whole, text):
    said = f"{text}\n{whole}" if text else whole
    for number in range(1, 21):
        content, (made,) = parsed(pieces(said, number))
        assert content == text and (made.name, json.loads(made.arguments), made.complete) == (
            "add",
            {"a": 3},
            True,
        )
    other = said.replace('"add"', '"bob"')
    assert parsed(list(other)) == (other, [])


@pytest.mark.parametrize("text", ["", "plain", "a <tool", "ends in blanks \n", "<<tool_call", "{}"])
def test_a_text_without_calls_is_content_and_nothing_of_it_is_lost(text):
    assert parsed(list(text) or [""]) == (text, []) and parsed([text]) == (text, [])


def test_a_call_that_is_broken_off_is_not_complete():
    whole = call("add", {"a": 12, "b": "x"})
    for length in range(len(whole)):
        _, calls = parsed([whole[:length]])
        assert not any(c.complete for c in calls) or whole[:length].count("}") >= 1
    _, (cut,) = parsed([whole[: whole.index("12") + 1]])
    assert (cut.name, cut.arguments, cut.complete) == ("add", '{"a": 1', False)


WRITTEN = {
    "hermes": lambda calls: "\n".join(call(name, arguments) for name, arguments in calls),
    "mistral": lambda calls: (
        "[TOOL_CALLS][" + ", ".join(json.dumps({"name": n, "arguments": a}) for n, a in calls) + "]"
    ),
    "mistral_args": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "llama3_json": lambda calls: "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls),
}
CALLS = [("add", AWKWARD), ("now", {}), ("add", {"a": 2})]
IN_EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def read(name, parts):
    """Content and calls of an answer in a format, in pieces."""
    parser = AnswerParser(NAMES, FORMATS[name])
    pieces = [piece for i, part in enumerate(parts) for piece in parser.push(part, last=i == len(parts) - 1)]
    assert [(c.name, c.arguments) for c in parser.calls] == [
        (c.name, "".join(p.arguments for p in pieces if p.call == i)) for i, c in enumerate(parser.calls)
    ]
    return "".join(piece.content for piece in pieces), parser.calls


@IN_EVERY_FORMAT
@pytest.mark.parametrize("text", ["", "Let me see.", "a < b [TOOL <tool"])
def test_calls_of_every_format_are_found_whatever_pieces_they_come_in(name, text):
    whole = text + "\n" * bool(text) + WRITTEN[name](CALLS)
    for seed in range(30):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(whole)), 1 + seed))
        content, calls = read(
            name, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        )
        assert content == text and [(c.name, json.loads(c.arguments), c.complete) for c in calls] == [
            (*c, True) for c in CALLS
        ]
    for length in range(len(whole)):
        _, calls = read(name, [whole[:length]])
        assert [(c.name, json.loads(c.arguments)) for c in calls if c.complete] == CALLS[
            : sum(c.complete for c in calls)
        ]


@IN_EVERY_FORMAT
@pytest.mark.parametrize(
    "text", ["", "plain", "a [TOOL_CALL", "{}", "<|python_ta", "[1]; {2}", "ends in blanks \n"]
)
def test_a_text_without_calls_is_content_in_every_format(name, text):
    assert read(name, list(text) or [""]) == (text, []) == read(name, [text])


def test_calls_as_models_write_them_beside_the_form_of_the_grammar():
    said = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name":"now","arguments":{}}]'
    assert [c.name for c in read("mistral", list(said))[1]] == ["add", "now"]
    assert len(read("mistral", list(said))[1][0].id) == 9
    assert [
        c.arguments for c in read("mistral_args", list('[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}'))[1]
    ] == ['{"a": 1}']
    tagged = read("llama3_json", list('<|python_tag|>{"name": "add", "parameters": {"a": 1}}'))
    assert tagged[0] == "" and [c.arguments for c in tagged[1]] == ['{"a": 1}']


def test_identifiers_that_a_template_does_not_take_are_replaced_in_calls_and_results_alike():
    said = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "function": NOW}, {"id": "abcdefghi", "function": NOW}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        {"role": "tool", "content": "4", "tool_call_id": "abcdefghi"},
    ]
    assistant, first, second = with_ids(said, FORMATS["mistral"])
    names = [c["id"] for c in assistant["tool_calls"]]
    assert names == [first["tool_call_id"], second["tool_call_id"]] and names[1] == "abcdefghi"
    assert len(names[0]) == 9 and names[0].isalnum() and with_ids(said, FORMATS["hermes"]) == said


@pytest.fixture(scope="module")
def grammars():
    tokenizer = load.load_tokenizer(str(pair.target_folder()))
    return tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def allowed(grammars, source, text):
    """Whether a text and then its end are allowed."""
    return is_allowed(grammars[0], source, text)


GOOD = call("add", {"a": 3})
WRONG = call("add", {"a": "3"})
UNKNOWN = call("sub", {"a": 3})


def test_required_calls_are_calls_of_the_tools_and_nothing_else(grammars):
    one, several = (calls_of(*grammars, [ADD, NOW], required=True, parallel=p) for p in (False, True))
    for text in (GOOD, call("now", {}), call("add", {"a": -1, "b": "x"})):
        assert (
            allowed(grammars, one, text)
            and allowed(grammars, several, f"{text}\n{GOOD}")
            and not allowed(grammars, one, f"{text}\n{GOOD}")
        )
    for text in (WRONG, UNKNOWN, "", "text", f"text\n{GOOD}", call("now", {"x": 1}), GOOD[:-1]):
        assert not allowed(grammars, one, text) and not allowed(grammars, several, text)


def test_an_answer_is_free_until_it_opens_a_call(grammars):
    auto = calls_of(*grammars, [ADD, NOW], required=False, parallel=True)
    for text in ("text", "a < b <tool", GOOD, f"text\n{GOOD}", f"text {GOOD}\n{call('now', {})}"):
        assert allowed(grammars, auto, text), text
    for text in (
        BARE,
        f"```json\n{BARE}\n```",
        f"```json\n{BARE}\n``` more",
        f"So:\n{BARE}",
        BARE.replace('"add"', '"bob"'),
        '{"name": "Bob"}',
        "```python\nx = {}\n```\nDone.",
    ):
        assert allowed(grammars, auto, text), text
    for text in (
        BARE.replace("3", '"3"'),
        f"text {WRONG}",
        UNKNOWN,
        f"a {BEGIN} b",
        f"{GOOD}\n{WRONG}",
    ):
        assert not allowed(grammars, auto, text), text


@IN_EVERY_FORMAT
def test_the_grammar_of_every_format_allows_what_its_parser_reads(grammars, name):
    good = [("add", {"a": 3}), ("now", {})]
    wrong = [("add", {"a": "3"})]
    written = WRITTEN[name]
    form = FORMATS[name]
    must = calls_of(*grammars, [ADD, NOW], required=True, parallel=True, calls=form)
    one = calls_of(*grammars, [ADD, NOW], required=True, parallel=False, calls=form)
    auto = calls_of(*grammars, [ADD, NOW], required=False, parallel=True, calls=form)
    assert (
        allowed(grammars, must, written(good))
        and allowed(grammars, one, written(good[:1]))
        and allowed(grammars, auto, written(good[:1]))
    )
    assert not allowed(grammars, one, written(good)) and not allowed(grammars, must, "text")
    for grammar in (must, one, auto):
        assert not allowed(grammars, grammar, written(wrong))
    for text in ("", "text", "a [TOOL <tool", "Hello {x}"):
        assert allowed(grammars, auto, text), text
    if name != "llama3_json":
        assert allowed(grammars, auto, f"text {written(good)}")


def test_marks_that_are_tokens_are_those_tokens_in_the_grammar(grammars):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair.target_folder()))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]}
    )
    own = tokenizer, Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    for name, calls in FORMATS.items():
        must, auto = (
            calls_of(*own, [ADD, NOW], required=r, parallel=True, calls=calls) for r in (True, False)
        )
        text = WRITTEN[name]([("add", {"a": 3}), ("now", {})][: 1 if name == "llama3_json" else 2])
        assert allowed(own, must, text) and allowed(own, auto, text) and not allowed(own, must, "text"), name
    tagged = '<|python_tag|>{"name": "add", "parameters": {"a": 3}}'
    assert allowed(own, calls_of(*own, [ADD], parallel=False, calls=FORMATS["llama3_json"]), tagged)


def test_an_answer_is_json_of_a_schema_or_calls(grammars):
    form = StructuredOutputs(
        json={
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    )
    both = calls_of(*grammars, [ADD], required=False, parallel=False, text=form)
    assert allowed(grammars, both, '{"x": true}') and allowed(grammars, both, GOOD)
    assert not allowed(grammars, both, "text") and not allowed(grammars, both, '{"x": 1}')


def test_a_template_without_tools_is_told_of_them_in_its_own_messages():
    form = format_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert form.origin == "default" and not form.knows_calls
    said = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3"},
    ]
    (system, user, assistant, result), more = prepared(said, [{"type": "function", "function": ADD}], form)
    assert more == {}
    assert json.dumps(ADD) in system["content"] and user == said[0]
    assert assistant["content"] == call("add", {"a": 1}) and result == {
        "role": "user",
        "content": "<tool_response>\n3\n</tool_response>",
    }
    assert (
        prepared([{"role": "system", "content": "Be kind."}, said[0]], [], form)[0][0]["content"]
        == "Be kind."
    )
    assert prepared([{**said[1], "reasoning_content": "Hm."}], [], form)[0][0]["reasoning_content"] == "Hm."


TOOLS = [
    {"type": "function", "function": {**ADD, "description": "Sum."}},
    {"type": "function", "function": NOW},
]
ASK = {
    "model": "small",
    "messages": [{"role": "user", "content": "1 + 2?"}],
    "tools": TOOLS,
    "max_tokens": 120,
    "seed": 4,
}


def streamed(served, **asked):
    """Content, calls and end of a stream, put together as a client does."""
    content = ""
    calls = {}
    end = None
    for chunk in served.openai.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        content = content + (choice.delta.content or "")
        end = choice.finish_reason or end
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": None, "name": None, "arguments": ""})
            call["id"], call["name"] = part.id or call["id"], part.function.name or call["name"]
            call["arguments"] += part.function.arguments or ""
    return content, calls, end


def test_of_all_tools_those_are_called_that_are_allowed(served):
    add = {"type": "function", "function": {"name": "add"}}
    asked = {**ASK, "parallel_tool_calls": False}
    for mode, seed in (("required", 1), ("required", 2), ("auto", 1)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}}
        found = served.openai.chat.completions.create(**{**asked, "seed": seed}, tool_choice=choice)
        calls = found.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= {"add"} and (calls or mode == "auto")
        told = served.openai.chat.completions.create(**{**asked, "max_tokens": 1}, tool_choice="auto").usage
        assert (
            found.usage.prompt_tokens == told.prompt_tokens
        )  # the model is told of all, so that its prefix is kept
    flat = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "add"}, {"type": "web_search"}],
    }
    response = served.openai.responses.create(**TALK, tool_choice=flat, parallel_tool_calls=False)
    assert response.output[0].name == "add" and response.tool_choice.mode == "required"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_calls_that_are_asked_for_fit_their_schemas_whole_and_streamed(served, choice):
    for seed in range(4):
        asked = {**ASK, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        (found,) = served.openai.chat.completions.create(**asked).choices
        (made,) = found.message.tool_calls
        content, (part,), end = (lambda c, p, e: (c, list(p.values()), e))(*streamed(served, **asked))
        arguments = json.loads(made.function.arguments)
        assert found.finish_reason == end == "tool_calls" and not found.message.content and not content
        assert (part["name"], part["arguments"]) == (made.function.name, made.function.arguments) and part[
            "id"
        ].startswith("call_")
        assert (made.function.name == "add" and type(arguments["a"]) is int) or (
            choice == "required" and arguments == {}
        )


def test_a_conversation_goes_on_with_calls_and_results(served):
    (first,) = served.openai.chat.completions.create(
        **ASK, tool_choice="required", parallel_tool_calls=False
    ).choices
    made = first.message.tool_calls[0]
    messages = [
        *ASK["messages"],
        first.message.model_dump(),
        {"role": "tool", "tool_call_id": made.id, "content": "3"},
    ]
    prompts = [served.post("/tokenize", messages=m).json()["tokens"] for m in (ASK["messages"], messages)]
    texts = [served.post("/detokenize", tokens=p).json()["prompt"] for p in prompts]
    assert (
        f'<tool_call>\n{{"name": "{made.function.name}"' in texts[1]
        and "<tool_response>\n3\n</tool_response>" in texts[1]
    )
    answered = served.openai.chat.completions.create(**{**ASK, "messages": messages, "tool_choice": "none"})
    assert answered.choices[0].message.tool_calls is None and answered.usage.prompt_tokens == len(prompts[1])


def test_names_that_a_message_lacks_are_absent_for_its_template():
    engine = small_engine()
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.name is defined }}{{ m.tool_call_id is defined }}{% for c in m.tool_calls or [] %}{{ c.id is defined }}{{ c.function.name ~ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
        "{{ tools or '' }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    with serving(engine) as native:
        talk = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4", "name": "f"},
        ]
        prompt = native.post("/apply-template", messages=talk).json()["prompt"]
    assert prompt == "FalseFalseFalsef{}" + "FalseFalse" + "TrueFalse"


def test_a_call_that_max_tokens_breaks_off_is_told_and_marked(served):
    begun = 0
    for most in range(8, 30):
        asked = {**ASK, "max_tokens": most, "tool_choice": "required"}
        (found,) = served.openai.chat.completions.create(**asked).choices
        content, calls, reason = streamed(served, **asked)
        told = [(call.function.name, call.function.arguments) for call in found.message.tool_calls or []]
        assert found.finish_reason == reason and (found.message.content or "") == content
        assert told == [(call["name"], call["arguments"]) for call in calls.values()]
        if reason != "length":
            break
        begun += bool(told)
    assert begun > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice names 'sub'; expected one of tools: add, now",
        ),
        ({"tools": [], "tool_choice": "required"}, "'required' without tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
            "'required' without tools",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "expected each once"),
        (
            {
                "tools": [
                    TOOLS[1],
                    {"type": "function", "function": {"name": "x", "parameters": {"type": "thing"}}},
                ],
                "tool_choice": "required",
            },
            "tools.1.function.parameters: .*Invalid type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"extra_body": {"guided_regex": "x"}}, "beside a form of the text"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "'tools', which is not for it"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_wrong_tools_are_refused_with_their_place(served, change, said, stream):
    with pytest.raises(openai.BadRequestError, match=said):
        served.openai.chat.completions.create(**{**ASK, **change}, stream=stream)


def test_fields_that_clients_send_and_that_change_nothing_are_taken(served):
    plain = {name: value for name, value in ASK.items() if name != "tools"}
    text = served.openai.chat.completions.create(**plain).choices[0].message.content
    nothing = dict.fromkeys(
        [
            "tools",
            "tool_choice",
            "functions",
            "stop",
            "response_format",
            "stream_options",
            "audio",
            "n",
            "top_p",
            "min_tokens",
        ]
    )
    for more in (
        nothing,
        {"tools": []},
        {"tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"store": False, "metadata": {"a": "b"}},
        {
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
            "prediction": {"type": "content", "content": "x"},
        },
    ):
        found = served.post("/v1/chat/completions", **plain, **more)
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["message"]["content"] == text


def test_what_the_template_is_given_reaches_it(served):
    engine = small_engine()
    engine.tokenizer.chat_template = "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{{ mood }}{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(engine) as native:
        asked = {**ASK, "max_tokens": 1, "reasoning_effort": "low", "chat_template_kwargs": {"mood": "calm "}}
        found = native.post("/v1/chat/completions", **asked).json()
    assert found["usage"]["prompt_tokens"] == len(
        engine.tokenizer("<tool_call>addcalm low1 + 2?")["input_ids"]
    )


FLAT = [{"type": "function", **ADD, "description": "Sum."}, {"type": "function", **NOW}]
TALK = {"model": "small", "input": "1 + 2?", "tools": FLAT, "max_output_tokens": 120, "temperature": 0}


def test_a_response_calls_tools_whole_and_in_events(served):
    asked = {**TALK, "tool_choice": {"type": "function", "name": "add"}}
    whole = served.openai.responses.create(**asked)
    (made,) = whole.output
    assert (made.type, made.name, made.status, whole.status) == (
        "function_call",
        "add",
        "completed",
        "completed",
    )
    assert type(json.loads(made.arguments)["a"]) is int and whole.output_text == ""
    with served.openai.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == made.arguments == events[-1].response.output[0].arguments
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_a_response_goes_on_with_calls_and_their_outputs(served):
    first = served.openai.responses.create(**TALK, tool_choice="required", parallel_tool_calls=False)
    (made,) = first.output
    said = [
        {"role": "user", "content": "1 + 2?"},
        *first.output,
        {"type": "function_call_output", "call_id": made.call_id, "output": "3"},
    ]
    again = served.openai.responses.create(**{**TALK, "input": said, "tool_choice": "none"})
    chat = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": made.call_id, "function": {"name": made.name, "arguments": made.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": made.call_id, "content": "3"},
    ]
    assert again.usage.input_tokens == served.post("/tokenize", messages=chat).json()["count"]
    assert [item.type for item in again.output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tool_choice": {"type": "function", "name": "sub"}}, "expected one of tools: add, now"),
        (
            {
                "tools": [{"type": "function", "name": "x", "parameters": {"type": "thing"}}],
                "tool_choice": "required",
            },
            "tools.0.parameters: ",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "'required' without tools"),
    ],
)
def test_wrong_tools_of_a_response_are_refused_with_their_place(served, change, said, stream):
    with pytest.raises(openai.BadRequestError, match=said):
        served.openai.responses.create(**{**TALK, **change}, stream=stream)


def test_a_call_of_a_response_that_is_broken_off_is_incomplete(served):
    begun = 0
    for most in range(12, 60):
        asked = {**TALK, "max_output_tokens": most, "tool_choice": {"type": "function", "name": "add"}}
        events = list(served.openai.responses.create(**asked, stream=True))
        whole = served.openai.responses.create(**asked)
        if events[-1].type == "response.completed":
            break
        assert whole.status == "incomplete"
        last = events[-2].item
        assert (whole.output[-1].type, whole.output[-1].status) == (last.type, last.status)
        if last.type == "function_call" and last.status == "incomplete":
            assert whole.output[-1].arguments == last.arguments
            begun += 1
    assert begun > 0


def test_tools_that_may_be_called_change_no_answer_that_calls_none():
    """The grammar of `auto` leaves every token of a text as it was: what the model does not say, it is not made to say."""
    engine = small_engine()
    engine.tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name if tool.function.name not in ('add', 'now') }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with serving(engine) as silent:  # its prompt says nothing of tools
        for text in ("Hello", "Hi!", "What is 2 + 2?", "def add(a, b):", "{", "import"):
            asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
            free, called = (
                silent.post("/v1/chat/completions", **asked, **more).json() for more in ({}, {"tools": TOOLS})
            )
            message = called["choices"][0]["message"]
            assert (
                called["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]
                and "tool_calls" not in message
            )
            assert message["content"] == free["choices"][0]["message"]["content"] != ""


def test_every_token_of_a_text_is_allowed_where_tools_may_be_called(grammars):
    tokenizer, compiled = grammars
    for text in ("", "Hello, ", f"{GOOD}\nAnd "):
        constraint = calls_of(tokenizer, compiled, [ADD, NOW]).constraint(1)
        ids = [0, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for length in range(1, len(ids) + 1):
            mask = constraint.allowed(ids[:length], [ids[length - 1]], [-1])[0]
        assert mask.all(), text


MISTRAL_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools|length }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id|length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}, "id": "{{ c.id }}"}{% endfor %}]'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}: {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
LLAMA_TEMPLATE = (
    '{% if tools %}{{ tools|length }} functions, "parameters": dictionary of argument name and its value{% endif %}'
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function|tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [MISTRAL_TEMPLATE, LLAMA_TEMPLATE], ids=["mistral", "llama3_json"])
def test_a_model_of_another_format_calls_tools_and_reads_results(template):
    engine = small_engine()
    engine.tokenizer.chat_template = template
    with serving(engine) as other:
        asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False}
        (first,) = other.openai.chat.completions.create(**asked).choices
        (made,) = first.message.tool_calls
        content, (part,), end = (lambda c, p, e: (c, list(p.values()), e))(*streamed(other, **asked))
        assert first.finish_reason == end == "tool_calls" and not first.message.content and not content
        assert (part["name"], part["arguments"]) == (made.function.name, made.function.arguments)
        result = {"role": "tool", "tool_call_id": made.id, "content": "3"}
        strange = {
            "id": "call_of_another_server",
            "type": "function",
            "function": {"name": "now", "arguments": "{}"},
        }
        before = [{"role": "assistant", "tool_calls": [strange]}, {**result, "tool_call_id": strange["id"]}]
        messages = [
            *ASK["messages"],
            *before,
            first.message.model_dump(),
            result,
            {"role": "user", "content": "And?"},
        ]
        again = other.openai.chat.completions.create(**{**ASK, "messages": messages, "tool_choice": "none"})
        assert again.choices[0].message.tool_calls is None
        response = other.openai.responses.create(**TALK, tool_choice="required", parallel_tool_calls=False)
        assert [item.type for item in response.output] == ["function_call"]
