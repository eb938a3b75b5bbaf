"""What a client requires of calls is held to the end of an answer, or the answer ends with an error that names the tools."""

import json

import numpy as np
import pytest

from polydraft.engine import grammar_bounds
from polydraft.engine.structured import Grammars
from polydraft.server.formats import named
from polydraft.server.formats.form import Call, written
from studies.clients.scripted import TEMPLATE
from tests.server.conftest import serving
from tests.server.constraints import calls_of, is_allowed
from tests.server.test_tools import ADD, NOW
from tests.server.thinker import thinker, tokenizer

MOST_BYTES = 2600
"""Of a grammar: one of these tools has less, both together have more."""


def large(name):
    """A tool whose schema has 1,500 bytes."""
    words = [f"{name}{'x' * 20}{number}" for number in range(50)]
    properties = {"a": {"type": "string"}, "b": {"enum": words}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    return {"name": name, "parameters": schema}


NAMES_BOTH = '<tool_call>\n{"name": "left", "arguments": {"a": "as right does"}}\n</tool_call>'
ASKED = {"role": "user", "content": "Go."}
LARGE = [large("left"), large("right")]
FUNCTIONS = [{"type": "function", "function": tool} for tool in LARGE]
FLAT = [{"type": "function", **tool} for tool in LARGE]
CLAUDE = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in LARGE]
DIALECTS = {
    "/v1/chat/completions": {"messages": [ASKED], "tools": FUNCTIONS, "tool_choice": "required"},
    "/v1/responses": {"input": "Go.", "tools": FLAT, "tool_choice": "required"},
    "/v1/messages": {
        "messages": [ASKED],
        "max_tokens": 100,
        "tools": CLAUDE,
        "tool_choice": {"type": "any"},
    },
}


@pytest.fixture(scope="module")
def wordy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_bounds.check_text, "__defaults__", (MOST_BYTES,))
        with serving(thinker(NAMES_BOTH, TEMPLATE, max_model_len=4096)) as running:
            yield running


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
def test_schemas_that_fail_in_a_required_call_end_the_answer_and_are_named(wordy, path, stream):
    answer = wordy.post(path, model="small", stream=stream, **DIALECTS[path])
    assert "the schemas of the tools left, right cannot be followed" in answer.text
    assert "error" in answer.text and (stream or answer.status_code == 400)


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
@pytest.mark.parametrize("strict", [True, False])
def test_schemas_that_fail_in_a_call_that_may_be_end_it_where_a_tool_is_strict(wordy, strict):
    tools = [{"type": "function", "function": {**tool, "strict": strict}} for tool in LARGE]
    answer = wordy.post("/v1/chat/completions", messages=[ASKED], tools=tools)
    assert ("left, right cannot be followed" in answer.text) is strict
    if not strict:  # and it is what the model wrote
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": "as right does"}


def test_ollama_names_them_too(wordy):
    tools = [{"type": "function", "function": {**tool, "strict": True}} for tool in LARGE]
    for stream in (False, True):
        answer = wordy.post("/api/chat", model="small", messages=[ASKED], tools=tools, stream=stream)
        assert "left, right cannot be followed" in answer.text and "error" in answer.text


def test_a_strict_tool_that_cannot_be_held_is_refused_before_the_answer(served):
    tool = {"name": "find", "parameters": {"type": "object", "not": {}}, "strict": True}
    answer = served.post(
        "/v1/chat/completions", messages=[ASKED], tools=[{"type": "function", "function": tool}]
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.function.parameters")


@pytest.fixture(scope="module")
def grammars():
    words = tokenizer()
    return words, Grammars(words, len(words), [words.eos_token_id])


TYPES = {
    "integer": ({"type": "integer"}, 3, ["x", True, 1.5]),
    "number": ({"type": "number"}, 1.5, ["x", None]),
    "boolean": ({"type": "boolean"}, True, ["x", 1]),
    "text": ({"type": "string"}, "so", []),
    "one of some": ({"type": "string", "enum": ["up", "down"]}, "up", ["so"]),
    "list": ({"type": "array", "items": {"type": "integer"}}, [1, 2], ["x", ["x"]]),
}


def chosen(grammars, form, schema):
    """What an answer is held to where one tool is named in its request."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"name": "add", "parameters": {**parameters, "additionalProperties": False}, "strict": True}
    return calls_of(*grammars, [tool], required=True, parallel=False, calls=form)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", named.FORMATS)
def test_a_named_tool_alone_is_called_with_arguments_of_its_types(grammars, name, kind):
    form = named.FORMATS[name]
    schema, right, wrong = TYPES[kind]
    made = chosen(grammars, form, schema)

    def holds(name, arguments):
        text = written(form, [Call(name, arguments)]).removeprefix(form.preset)
        return is_allowed(grammars[0], made, text)

    assert holds("add", {"a": right})
    assert not any(holds("add", {"a": value}) for value in wrong)
    assert not holds("now", {"a": right}) and not holds("add", {"a": right, "c": right})
    assert not is_allowed(grammars[0], made, "So be it.")


@pytest.mark.parametrize("name", named.FORMATS)
def test_a_token_that_ends_a_name_goes_no_further_than_the_head_of_its_call(grammars, name):
    """Else what it begins might be no arguments of the tool that it names, and the answer would be held to nothing."""
    words, compiled = grammars
    form = named.FORMATS[name]
    source = calls_of(words, compiled, [ADD, NOW], required=True, calls=form)
    head = form.call_head("add", "call00001", 0)
    named_alone = source.writing.first(()).grammar
    assert named_alone.count(f"<[{words.eos_token_id}]>") >= 2
    text = (form.opening + head).removeprefix(form.preset)
    grammar = compiled.compiled(source.writing.first(())).constraint(1)
    brace = "{" if form.coding in ("json", "keyed") else ""
    ids = [0, *words(text + brace, add_special_tokens=False)["input_ids"]]
    for length in range(1, len(ids) + 1):
        row = grammar.allowed(ids[:length], [ids[length - 1]], [-1])[0]
        assert length == len(ids) or row[ids[length]]
    assert np.flatnonzero(row).tolist() == [words.eos_token_id]
