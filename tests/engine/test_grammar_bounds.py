"""What would take the compiler of grammars too deep, or too long, is counted first, and the count is in the refusal."""

import json
from typing import Any

import pytest

from polydraft.engine import grammar_bounds as bounds
from polydraft.engine.grammar_compile import written
from polydraft.engine.structured import lark_of
from polydraft.errors import InvalidInputError


def references(depth, link):
    """A chain of so many."""
    places = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(depth - 1)}
    return {"$ref": "#/$defs/d0", "$defs": places | {f"d{depth - 1}": {"type": "null"}}}


def rules(depth, name="r", link='"a" {}', order=1):
    """A chain of so many, the last first where the order is -1."""
    chain = [f"{name}{n}: " + link.format(f"{name}{n + 1}") for n in range(depth)]
    return "\n".join([f"start: {name}0", *chain[::order], f'{name}{depth}: "b"'])


def gbnf(depth):
    return "\n".join(["root ::= r0", *(f'r{n} ::= "a" r{n + 1}' for n in range(depth)), f'r{depth} ::= "b"'])


def nested(depth):
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema


DEEP = [
    (
        "json",
        references(3000, lambda ref: {"items": ref}),
        "lead to each other 6000 levels deep; expected at most 512",
    ),
    ("json", references(2000, lambda ref: {"allOf": [ref]}), "4000 levels"),
    ("json", references(900, lambda ref: {"properties": {"a": ref}}), "1800 levels"),
    ("json", references(900, lambda ref: {"anyOf": [{"type": "null"}, ref]}), "1800 levels"),
    ("json", nested(200), "JSON is nested 401 levels deep; expected at most 100"),
    ("grammar", rules(3000), "rules and groups lead to each other 3001 levels deep; expected at most 512"),
    ("grammar", rules(3000, order=-1), "3001 levels"),
    ("grammar", rules(5000, "T"), "5001 levels"),
    ("grammar", rules(300, link='(("x" | {} "y")? "z")*'), "901 levels"),
    ("grammar", f"start: {'(' * 1000}{')' * 1000}", "1001 levels"),
    ("grammar", f"start: %lark {{\n{rules(600)}\n}}", "601 levels"),
    ("grammar", f"start: %json {json.dumps(nested(90))}", "JSON behind %json is nested 181 levels deep"),
    ("grammar", f"start: %json {json.dumps(references(2500, lambda ref: {'items': ref}))}", "5000 levels"),
    (
        "grammar",
        json.dumps({"grammars": [{"json_schema": references(800, lambda ref: {"items": ref})}]}),
        "1600 levels",
    ),
    ("grammar", json.dumps({"grammars": [{"lark_grammar": rules(3000)}]}), "3001 levels"),
    ("regex", "(" * 5000 + "a" + ")" * 5000, "groups nested 5000 levels deep; expected at most 200"),
    ("regex", "b(a{1000}){1000}", "repeats 1000000 times; expected at most 100000"),
    ("json", {"pattern": "(a{1000}){1000}"}, "repeats 1000000 times"),
    ("grammar", "start: /x(a{1000}){1000}/", "repeats 1000000 times"),
    ("json", {"minItems": 100_000_000}, "minItems: 100000000; expected at most 10000"),
    (
        "json",
        {"allOf": [{"multipleOf": 65521}, {"multipleOf": 65519}, {"multipleOf": 7}]},
        "3 numbers of multipleOf",
    ),
    ("regex", "a\ud800", r"lone surrogate U\+D800 at 1"),
    ("regex", "a" * 200_000, "200000 bytes; expected at most 131072"),
]


@pytest.mark.parametrize(
    ("kind", "value", "said"), DEEP, ids=[f"{kind} {said[:40]}" for kind, _, said in DEEP]
)
def test_what_is_too_deep_is_refused_with_its_count(kind, value, said):
    with pytest.raises(InvalidInputError, match=said) as told:
        written(kind, value)
    assert str(told.value).startswith(f"structured_outputs.{kind}: ") and "Make it simpler" in str(told.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", references(200, lambda ref: {"items": ref})),
        ("json", nested(45)),
        ("json", references(3, lambda ref: {"properties": dict.fromkeys(map(str, range(500)), ref)})),
        ("json", {"properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#/properties/a"}}}}),
        ("grammar", rules(400)),
        ("grammar", "start: a*\na: b | c\nb: \"(\" a \")\" // ((((\nc: /[(]+\\//"),
        ("regex", r"(\w{1,30}[ ,]){1,1000}(a|[)(]|\(){0,9}"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_too_deep_stays_as_it_is(kind, value):
    text = written(kind, value)
    assert text == value if kind == "grammar" else json.loads(text)["grammars"]


def test_schemas_in_a_grammar_are_those_that_llguidance_keeps():
    text = written("grammar", 'start: "x" %json {"type": "integer", "exclusiveMinimum": 2.5} "%json {}"')
    assert text == 'start: "x" %json {"type": "integer", "minimum": 3} "%json {}"'


@pytest.mark.parametrize("unclosed", ["[", "[a\\", "a{", "(", "/a\\", '"a', "<a", '"\\', "a\n: "])
def test_texts_are_read_once_whatever_they_leave_open(unclosed):
    text = (unclosed * 60_000)[:120_000]
    for check in (
        bounds.check_regex,
        lambda text: bounds.check_lark("start: " + text, dict),
        bounds.check_gbnf,
    ):
        try:
            check(text[: 32_000 if check is bounds.check_gbnf else None])
        except InvalidInputError as error:
            assert "levels deep" in str(error)  # noqa: PT017


def test_a_gbnf_grammar_is_counted_before_it_is_read():
    with pytest.raises(InvalidInputError, match="1001 levels deep"):
        lark_of(gbnf(1000))
    with pytest.raises(InvalidInputError, match="401 levels deep; expected a smaller one"):
        lark_of(gbnf(400) + "\nwide ::= " + '"x" ' * 3000)
    with pytest.raises(InvalidInputError, match="of 40011 bytes; expected at most 32768"):
        lark_of("root ::= " + '"x"  ' * 8000 + '"x')
    assert "start: R0" in lark_of(gbnf(300))
