"""The grammar of calls grows with what an answer names, refuses what the whole grammar refuses, and has no tool that it cannot hold."""

import json
import logging

import numpy as np
import pytest

from polydraft.engine.structured import Grammars
from polydraft.models import load, pair
from polydraft.server.formats import named
from polydraft.server.formats.calls import Schemas
from polydraft.server.formats.form import Call, written
from tests.server.constraints import calls_of, is_allowed
from tests.server.test_tools import (
    ADD,
    ASK,
    BARE,
    BEGIN,
    FORMATS,
    GOOD,
    IN_EVERY_FORMAT,
    NOW,
    UNKNOWN,
    WRITTEN,
    WRONG,
    call,
)

LOOK_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=x)x+$"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return load.load_tokenizer(str(pair.target_folder()))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def source(tokenizer, grammars, functions=(ADD, NOW), early=(), **options):
    return calls_of(tokenizer, grammars, functions, early=early, **options)


@pytest.mark.parametrize("early", [(), (0,)])
def test_an_answer_is_free_until_it_calls_and_then_follows_the_schema_of_what_it_calls(
    tokenizer, grammars, early
):
    auto = source(tokenizer, grammars, early=early)
    for text in (
        "",
        "a < b <tool",
        GOOD,
        f"text {GOOD}\n{call('now', {})}",
        BARE,
        'the "add" of {"name": "add"}',
        f"{GOOD}\nDone.",
    ):
        assert is_allowed(tokenizer, auto, text), text
    for text in (
        BARE.replace("3", '"3"'),
        f"text {WRONG}",
        UNKNOWN,
        f"a {BEGIN} b",
        f"{GOOD}\n{WRONG}",
        f"{GOOD} so {WRONG}",
    ):
        assert not is_allowed(tokenizer, auto, text), text


@IN_EVERY_FORMAT
def test_every_format_holds_the_arguments_of_every_call(tokenizer, grammars, name):
    for required in (True, False):
        made = source(tokenizer, grammars, required=required, calls=FORMATS[name])
        calls = [("add", {"a": 3}), ("now", {})][: 1 if name == "llama3_json" and not required else 2]
        assert is_allowed(tokenizer, made, WRITTEN[name](calls))
        assert not is_allowed(tokenizer, made, WRITTEN[name]([("add", {"a": "3"})]))
        assert not is_allowed(tokenizer, made, WRITTEN[name]([("add", {"a": 3}), ("now", {"x": 1})]))


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", named.FORMATS)
def test_calls_of_every_named_format_are_held_to_their_tools(tokenizer, grammars, name, required):
    form = named.FORMATS[name]
    made = source(tokenizer, grammars, required=required, calls=form)
    several = 2 if form.parallel and (required or made.writing.goes_on) else 1

    def is_right(*calls):
        lead = "" if required else form.lead
        return is_allowed(tokenizer, made, (lead + written(form, calls)).removeprefix(form.preset))

    assert is_right(*[Call("add", {"a": 3})] * several)
    if required or (made.writing.goes_on and not form.preset):  # else nothing tells a call from a text
        assert not is_right(Call("add", {"a": "x"})) and not is_right(Call("sub", {"a": 3}))


def test_a_required_call_may_be_followed_by_text_and_a_single_one_ends(tokenizer, grammars):
    several, one = (
        source(tokenizer, grammars, required=True, parallel=parallel) for parallel in (True, False)
    )
    for text, ends in (
        (GOOD, True),
        (f"{GOOD}\n", False),
        (f"{GOOD}\nThat is all.", False),
        (f"{GOOD}\n{GOOD}", False),
    ):
        assert is_allowed(tokenizer, several, text) and is_allowed(tokenizer, one, text) is ends, text
    assert not is_allowed(tokenizer, several, "") and not is_allowed(tokenizer, several, f"text {GOOD}")


def test_nodes_of_a_tree_may_go_on_as_their_own_paths_would(tokenizer, grammars):
    auto = source(tokenizer, grammars)
    a, b = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (GOOD, WRONG))
    shared = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    tokens = [0, *a, *b[shared:]]
    parents = [-1, *range(len(a)), shared, *range(len(a) + 1, len(a) + len(b) - shared)]
    rows = auto.constraint(1).allowed([0], tokens, parents)
    chain = auto.constraint(1)
    context = [0]
    for node, token in enumerate(a):
        assert np.array_equal(rows[node], chain.allowed(context, [context[-1]], [-1])[0]), node
        context.append(token)
    assert rows[shared, a[shared]] and not rows[shared, b[shared]]


def trie(texts):
    """The tree of token sequences behind one root, and the path of each node."""
    tokens = [0]
    parents = [-1]
    paths = {(): 0}
    for ids in texts:
        for length, token in enumerate(ids):
            if (*ids[:length], token) not in paths:
                tokens.append(token)
                parents.append(paths[tuple(ids[:length])])
                paths[(*ids[:length], token)] = len(paths)
    return tokens, parents, list(paths)


@IN_EVERY_FORMAT
def test_calls_that_begin_and_end_inside_a_tree_are_held_as_on_their_own_paths(tokenizer, grammars, name):
    good, wrong = (WRITTEN[name]([("add", {"a": value})]) for value in (3, "3"))
    texts = [f"I add. {good}\nSo be it. {wrong}", f"I {good}\n{good}", f"I {wrong}", f"I {BARE} and", "I do."]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    made = source(tokenizer, grammars, calls=FORMATS[name])
    for committed in (0, 3, 11, 30):
        before = ids[0][:committed]
        growing = made.constraint(1)
        tokens, parents, paths = trie([x[committed:] for x in ids if x[:committed] == before])
        tokens[0] = [0, *before][-1]
        rows = growing.allowed([0, *before], tokens, parents)
        for node in range(0, len(paths), 5):
            context = [0, *before, *paths[node]]
            alone = made.constraint(1)
            assert np.array_equal(rows[node], alone.allowed(context, context[-1:], [-1])[0]), (
                committed,
                node,
            )


def test_hundreds_of_tools_are_held_to_the_schemas_of_those_that_are_called(tokenizer, grammars):
    def function(number):
        fields = {
            f"field_{i}": {"type": "integer" if i % 2 else "string", "description": "what it is " * 4}
            for i in range(20)
        }
        return {
            "name": f"tool_{number}",
            "parameters": {"type": "object", "properties": fields, "required": ["field_1"]},
        }

    functions = [function(number) for number in range(500)]
    assert len(json.dumps(functions)) > 400_000
    made = source(tokenizer, grammars, functions)
    good, wrong = (call("tool_321", {"field_0": "x", "field_1": value}) for value in (7, "7"))
    assert is_allowed(tokenizer, made, f"I look.\n{good}") and not is_allowed(
        tokenizer, made, f"I look.\n{wrong}"
    )
    assert is_allowed(tokenizer, made, f"{good}\n{call('tool_32', {'field_1': 1})}")


def test_a_schema_is_compiled_once_and_refused_by_what_it_asks_for(grammars):
    asked = []
    schemas = Schemas(lambda wanted: (asked.append(wanted), grammars.compiled(wanted))[1])
    wrong = [
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"if": {}, "then": {}},
        {"dependentRequired": {"a": ["b"]}},
    ]
    first = schemas.verdicts([ADD["parameters"], LOOK_AHEAD, None, *wrong])
    assert [verdict.refusal is None for verdict in first] == [True, False, True, *[False] * 4]
    assert schemas.verdicts([LOOK_AHEAD, *wrong]) == [first[1], *first[3:]] and len(asked) == 7


TOOL = {"type": "function", "function": {"name": "find", "parameters": LOOK_AHEAD}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_cannot_be_held_is_served_and_named_unless_it_has_to_be_called(served, caplog, stream):
    caplog.set_level(logging.WARNING, "polydraft.server")
    asked = {**ASK, "tools": [{"type": "function", "function": NOW}, TOOL], "max_tokens": 4, "stream": stream}
    found = served.post("/v1/chat/completions", **asked)
    assert (found.status_code, found.headers["x-polydraft-unconstrained-tools"]) == (200, "find")
    assert (
        "x-polydraft-unconstrained-tools"
        not in served.post("/v1/chat/completions", **{**asked, "tools": [asked["tools"][0]]}).headers
    )
    must = served.post("/v1/chat/completions", **asked, tool_choice="required")
    assert (must.status_code, must.json()["error"]["param"]) == (400, "tools.1.function.parameters")
    assert sum("'find'" in record.getMessage() for record in caplog.records) == (
        0 if stream else 1
    )  # once in all
