"""Chat templates are rendered as transformers renders them, and cannot leave the sandbox."""

from copy import deepcopy
from datetime import datetime

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from polydraft.models.tokens.chat_template import render

TALK = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "é "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<é>", "b": [1, None, True]}}}],
    },
    {"role": "tool", "content": "7"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]
TEMPLATES = {
    "blocks are trimmed": "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "tools as JSON": "{%- if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}{{ documents is none }}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.function.name }}{% endfor %}{% endfor %}",
    "namespaces": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ dict(a=1) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ messages[0].content.split('<')[0] }}{{ messages[1]['content'].strip() }}{{ messages[::-1][0].content }}{{ add_generation_prompt }}",
    "macros": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{{ say(messages[0]) }}{{ messages | map(attribute='role') | join(',') }}{{ unknown is defined }}{{ unknown }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_a_template_is_rendered_as_transformers_renders_it(name, tools):
    names = {"tools": tools, "add_generation_prompt": True, "bos_token": "<s>"}
    (theirs,), _ = render_jinja_template([TALK], chat_template=TEMPLATES[name], **names)
    assert render(TEMPLATES[name], TALK, **names) == theirs


def test_a_template_knows_the_date_and_may_refuse_a_conversation():
    assert render("{{ strftime_now('%Y') }}", TALK) == datetime.now().strftime("%Y")
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", TALK)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises((SecurityError, UndefinedError)):
        render(attack, TALK)


@pytest.mark.parametrize("change", ["{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"])
def test_a_template_changes_copies_of_the_messages(change):
    before = deepcopy(TALK)
    render(change, TALK)
    assert before == TALK


def test_a_template_sees_plain_values_only():
    with pytest.raises(TypeError):
        render("{{ messages[0].content }}", [{"role": "user", "content": object()}])
