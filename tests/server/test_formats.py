"""Formats: the smallest template of each is found out, and its calls come back whole and in pieces of any length."""

import json

import pytest

from polydraft.core.thinking import Thinking
from polydraft.server.formats import named
from polydraft.server.formats.derive import format_of
from polydraft.server.formats.form import Call, written
from polydraft.server.formats.history import prepared, shown
from polydraft.server.formats.parser import AnswerParser

HEAD = "{{ tools or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}"
FOOT = "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
EACH = "{% for c in m.tool_calls %}"
FIELDS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v|tojson }}"
NAME = "{{ c.function.name }}"
OBJECT = "{{ c.function.arguments|tojson }}"
BODIES = {
    "object": f'{EACH}<call>{{"name": "{NAME}", "arguments": {OBJECT}}}</call>{{% endfor %}}',
    "list": f'<calls>[{EACH}{{"name": "{NAME}", "arguments": {OBJECT}, "id": "{{{{ c.id }}}}"}}{{{{ ", " if not loop.last }}}}{{% endfor %}}]</calls>',
    "name and object": f"{EACH}<call>{NAME}<args>{OBJECT}{{% endfor %}}",
    "numbered": f"<calls>{EACH}<call>f.{NAME}:{{{{ loop.index0 }}}}<args>{OBJECT}</call>{{% endfor %}}</calls>",
    "named key": f'<calls>[{EACH}{{"{NAME}": {OBJECT}}}{{{{ ", " if not loop.last }}}}{{% endfor %}}]</calls>',
    "tags": f"{EACH}<call>\n<f={NAME}>\n{FIELDS}<p={{{{ k }}}}>\n{VALUE}\n</p>\n{{% endfor %}}</f>\n</call>\n{{% endfor %}}",
    "keys and values": f"{EACH}<call>{NAME}{FIELDS}<key>{{{{ k }}}}</key><value>{VALUE}</value>{{% endfor %}}</call>{{% endfor %}}",
}
ARGUMENTS = {"text": 'a "b"\n</p>é}', "number": 3, "inner": {"list": [1, None, True], "text": "z"}}
KINDS = {"text": {"type": "string"}, "number": {"type": "integer"}, "inner": {"type": "object"}}
TOOLS = {"add_up": {"properties": KINDS}, "now": {"properties": {}}}
CALLS = [Call("add_up", ARGUMENTS), Call("now", {}, "call00002"), Call("add_up", {"text": ""})]


def read(form, text, size, thinking=None):
    """Content, thoughts and calls of a text in pieces of a size."""
    parser = AnswerParser(TOOLS, form, thinking)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.push("", last=True)
    for number, call in enumerate(parser.calls):
        assert call.arguments == "".join(piece.arguments for piece in pieces if piece.call == number)
    content, thoughts = ("".join(getattr(p, kind) for p in pieces) for kind in ("content", "reasoning"))
    return (
        content,
        thoughts,
        [(call.name, json.loads(call.arguments)) for call in parser.calls if call.complete],
    )


def comes_back(form):
    calls = CALLS if form.parallel else CALLS[:1]
    wanted = [(call.name, call.arguments) for call in calls]
    for size in (1, 3, 1000):
        assert read(form, (form.lead + written(form, calls)).removeprefix(form.preset), size) == (
            "",
            "",
            wanted,
        ), size
        told = f"{form.before_text}Well <b>.\n{form.lead}{written(form, calls[:1])}"
        assert read(form, told, size) == ("Well <b>.", "", wanted[:1]), size


@pytest.mark.parametrize("name", BODIES)
def test_a_format_is_found_from_a_template_and_its_calls_come_back(name):
    form = format_of(HEAD + BODIES[name].replace("\n", "{{ '\\n' }}") + FOOT)
    assert form.origin == "template" and form.parallel and form.tools == "tools"
    comes_back(form)


@pytest.mark.parametrize("name", named.FORMATS)
def test_calls_of_every_named_format_come_back(name):
    comes_back(named.FORMATS[name])
    assert named.FORMATS[name].head.split("{")[0] in shown(named.FORMATS[name])["call"]


@pytest.mark.parametrize("name", BODIES)
def test_a_model_that_answers_in_another_format_is_understood(name):
    form = format_of(HEAD + BODIES[name].replace("\n", "{{ '\\n' }}") + FOOT)
    wanted = [("add_up", ARGUMENTS)]
    for other in (named.HERMES, named.QWEN_XML, named.MISTRAL_ARGS, named.LLAMA):
        for size in (1, 1000):
            assert read(form, "So:\n" + written(other, CALLS[:1]), size) == ("So:", "", wanted), other.name


@pytest.mark.parametrize("text", ["<call>", "a <call>no", "<tool_call>\n{", "<f=x", "[TOOL_CALLS]", "x <end"])
def test_what_is_no_call_is_content(text):
    for body in BODIES.values():
        form = format_of(HEAD + body.replace("\n", "{{ '\\n' }}") + FOOT)
        assert read(form, text, 1) == (text, "", []) == read(form, text, 1000)


def test_channels_of_thoughts_and_answers_are_told_apart():
    form = named.GPT_OSS
    think, call = "<|channel|>analysis<|message|>Hm.<|end|>", written(form, CALLS[:1])
    answer = f"{think}<|start|>assistant<|channel|>final<|message|>Sunny."
    assert form.thinking is not None
    thinking = Thinking(*form.thinking)
    for size in (1, 4, 1000):
        assert read(form, answer, size, thinking) == ("Sunny.", "Hm.", [])
        assert read(form, f"{think}<|start|>assistant{call}", size, thinking) == (
            "",
            "Hm.",
            [("add_up", ARGUMENTS)],
        )


def test_a_template_that_refuses_conversations_without_tools_is_told_that_there_are_none():
    form = format_of("{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}")
    assert (form.needs_tools, prepared([{"role": "user", "content": "x"}], [], form)[1]) == (
        True,
        {"tools": []},
    )
    assert not format_of("{{ tools or '' }}{{ messages[0].content }}").needs_tools


def test_a_format_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match="expected one of hermes"):
        named.check("klingon", "tool_format")


@pytest.mark.parametrize("name", named.FORMATS)
def test_marks_behind_a_call_that_are_cut_are_no_content(name):
    form = named.FORMATS[name]
    text = written(form, CALLS[:1]).removeprefix(form.preset)
    for length in range(1, len((form.tail.rpartition("}")[2] + form.closing).strip())):
        for size in (1, 1000):
            content, _, calls = read(form, text[:-length], size)
            assert content == "" or not calls, (text[:-length], size)
