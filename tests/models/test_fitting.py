"""Conversations are changed to what a chat template writes, which is found by rendering: roles, calls, and the name of thoughts."""

import pytest

from polydraft.models.tokens.chat_template import render
from polydraft.models.tokens.fitting import fitted, traits_of

RAISE = "{{ raise_exception('refused') }}"
SAID = "{{ m.role }}: {{ m.content }}\n"
PLAIN = "{% for m in messages %}" + SAID + "{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + RAISE
    + "{% endif %}"
    + SAID
    + "{% endfor %}"
)
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + SAID + "{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}" + RAISE + "{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + RAISE + "{% endif %}" + SAID + "{% endfor %}"
)
SINGLE = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}" + RAISE + "{% endif %}"
    "call {{ m.tool_calls[0].id }}\n{% else %}" + SAID + "{% endif %}{% endfor %}"
)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


TALK = [
    message("system", "A"),
    message("system", "B"),
    message("user", "hi"),
    message("assistant", "ho"),
    message("system", "C"),
    message("user", "x"),
    message("user", "y"),
]


def written(template, messages):
    return render(template, fitted(template, messages))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, "system: A\nsystem: B\nuser: hi\nassistant: ho\nsystem: C\nuser: x\nuser: y\n"),
        (SYSTEM_FIRST, "system: A\n\nB\n\nC\nuser: hi\nassistant: ho\nuser: x\nuser: y\n"),
        (FIRST_ALONE, "system: A\n\nB\n\nC\nuser: hi\nassistant: ho\nuser: x\nuser: y\n"),
        (ALTERNATES, "user: A\n\nB\n\nC\n\nhi\nassistant: ho\nuser: x\ny\n"),
    ],
    ids=["anywhere", "first", "first alone", "alternating"],
)
def test_every_system_message_is_written_where_the_template_takes_it(template, expected):
    assert written(template, TALK) == expected
    assert written(template, [message("system", "A")]) == (
        "user: A\n" if template is ALTERNATES else "system: A\n"
    )


def test_what_a_template_takes_is_left_as_it_is():
    for template in (PLAIN, SYSTEM_FIRST, FIRST_ALONE, ALTERNATES):
        talk = [message("user", "x"), message("assistant", "", tool_calls=[]), message("user", "y")]
        assert fitted(template, talk) == talk


def test_calls_come_one_by_one_with_their_results_where_a_message_may_have_one():
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": {}}} for name in "abc"]
    results = [message("tool", f"of {name}", tool_call_id=name) for name in "ba"]
    talk = [message("user", "x"), message("assistant", "", tool_calls=calls), *results, message("user", "y")]
    expected = "user: x\ncall b\ntool: of b\ncall a\ntool: of a\ncall c\nuser: y\n"
    assert written(SINGLE, talk) == expected and fitted(PLAIN, talk) == talk


THOUGHT = message("assistant", "ho", reasoning_content="hm")
OTHERS = "{% elif m.role != 'assistant' %}" + SAID + "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("of_assistant", "name", "expected"),
    [
        ("({{ m.reasoning_content }}) {{ m.content }}", "reasoning_content", "(hm) ho"),
        ("({{ m['reasoning'] }}) {{ m.content }}", "reasoning", "(hm) ho"),
        ("{% if m.thinking %}({{ m.thinking }}) {% endif %}{{ m.content }}", "thinking", "(hm) ho"),
        ("{{ m.get('thought') or '' }}{{ m.content }}", "thought", "hmho"),
        ("{{ '</think>' if false else '' }}{{ m.content }}", "content", "<think>\nhm\n</think>\n\nho"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{{ b.thinking or b.text }};{% endfor %}{% endif %}",
            "thinking_blocks",
            "hm;ho;",
        ),
        ("{{ m.content.split('</think>')[-1] }}", None, "ho"),
        ("{{ m.content }}", None, "ho"),
    ],
)
def test_thoughts_are_given_by_the_name_that_the_template_writes(of_assistant, name, expected):
    template = "{% for m in messages %}{% if m.role == 'assistant' %}" + of_assistant + OTHERS
    assert traits_of(template).thoughts == name
    assert written(template, [message("user", "x"), THOUGHT]) == f"user: x\n{expected}"


def test_thoughts_that_are_only_written_before_results_reach_a_template_too():
    template = "{% for m in messages %}{% if m.tool_calls %}({{ m.thinking }}){% else %}{{ m.content }}{% endif %}{% endfor %}"
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
    calling = message("assistant", "", reasoning_content="hm", tool_calls=calls)
    assert (
        written(template, [message("user", "x"), calling, message("tool", "1", tool_call_id="a")]) == "x(hm)1"
    )
