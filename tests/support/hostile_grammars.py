"""Schemas, regular expressions and grammars as they should not be: deep, wide, cyclic, with huge numbers and lone surrogates, and now and then sound.

Drawn by a seed. Each is a kind (json, regex, lark, gbnf) and a text or a schema.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

NUMBERS = [0, 1, -1, 2, 7, 1.5, -0.25, 1e-9, 1e308, -1e308, 2**31, 2**32, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64]  # fmt: skip
NUMBERS += [10**19, -(10**19), 10**30, 10**400, 1000003, 65537, 0.1, 0.07, 1e-300]
COUNTS = [0, 1, 2, 3, 10, 100, 1000, 9999, 10_001, 10**6, 10**8, 2**31 - 1, 2**32, 2**64, -1, 1.5]
TEXTS = [
    "a",
    "b",
    "ab",
    "",
    " ",
    "x" * 50,
    "é",
    "\u2028",
    "\ud800",
    "\udfff",
    "\U0001f600",
    '"',
    "\\",
    "\n",
    "<|endoftext|>",
    "\0",
    "a/b",
    "a~b",
]
PATTERNS = ["^a$", "a*", "(a|b)+", "^(a|b){2,9}$", "[a-z]{1,40}", r"\d+", ".*", r"^\w+([.-]?\w+)*@\w+([.-]?\w+)*(\.\w{2,})+$", "(a?){60}a{60}", "(", "[", "(?=a)"]  # fmt: skip
FORMATS = ["date-time", "email", "uuid", "ipv4", "nothing"]
DEPTHS = [1, 2, 5, 30, 90, 130, 400, 700, 2500, 6000]
WIDTHS = [1, 3, 10, 60, 400, 1500, 4000]


def hostile(seed: int, count: int) -> Iterator[tuple[str, Any]]:
    """So many of them."""
    rng = random.Random(seed)
    for _ in range(count):
        make = rng.choice(
            [
                schema,
                schema,
                chain,
                wide,
                cyclic,
                regex,
                regex,
                nested_regex,
                lark,
                lark,
                lark_chain,
                gbnf,
                gbnf_chain,
                listed,
                noise,
            ]
        )
        yield make(rng)


def schema(rng: random.Random, levels: int = 3) -> tuple[str, Any]:
    return "json", _schema(rng, levels)


def _schema(rng: random.Random, levels: int) -> Any:
    kind = rng.choice(
        ["integer", "number", "string", "array", "object", "null", "boolean", ["integer", "null"], None]
    )
    made: dict[str, Any] = {} if kind is None else {"type": kind}
    for _ in range(rng.randrange(4)):
        key = rng.choice(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum"]
        )
        made[key] = (
            [rng.choice(NUMBERS + TEXTS) for _ in range(rng.randrange(4))]
            if key == "enum"
            else rng.choice(NUMBERS)
        )
    for _ in range(rng.randrange(3)):
        made[
            rng.choice(["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"])
        ] = rng.choice(COUNTS)
    if rng.random() < 0.3:
        made["pattern"] = rng.choice(PATTERNS)
    if rng.random() < 0.2:
        made["format"] = rng.choice(FORMATS)
    if levels and rng.random() < 0.6:
        inner = [_schema(rng, levels - 1) for _ in range(rng.randrange(1, 4))]
        key = rng.choice(
            [
                "allOf",
                "anyOf",
                "oneOf",
                "items",
                "prefixItems",
                "properties",
                "patternProperties",
                "additionalProperties",
            ]
        )
        names = rng.sample(PATTERNS if key == "patternProperties" else TEXTS, len(inner))
        values = {
            "items": inner[0],
            "additionalProperties": inner[0],
            "properties": dict(zip(names, inner, strict=True)),
        }
        made[key] = values.get(key, values["properties"] if key == "patternProperties" else inner)
        if rng.random() < 0.3:
            made["required"] = rng.sample(TEXTS, 2)
    if rng.random() < 0.1:
        made[rng.choice(["not", "if", "uniqueItems", "$ref", "dependentSchemas", "unevaluatedItems"])] = (
            rng.choice([{}, "#", "#/a", True])
        )
    return made


LINKS = {
    "items": lambda ref: {"type": "array", "items": {"$ref": ref}},
    "properties": lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"type": "integer"}}},
    "allOf": lambda ref: {"allOf": [{"$ref": ref}, {"type": ["object", "null", "array"]}]},
    "anyOf": lambda ref: {"anyOf": [{"type": "null"}, {"$ref": ref}]},
    "oneOf": lambda ref: {"oneOf": [{"type": "string"}, {"$ref": ref}]},
    "patternProperties": lambda ref: {
        "patternProperties": {"^x": {"$ref": ref}},
        "additionalProperties": False,
    },
    "alone": lambda ref: {"$ref": ref},
    "twice": lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}, "required": ["a"]},
}


def chain(rng: random.Random) -> tuple[str, Any]:
    """References that lead to each other, or schemas within schemas."""
    depth = rng.choice(DEPTHS)
    link = LINKS[rng.choice(list(LINKS))]
    if depth < 200 and rng.random() < 0.5:
        nested: Any = {"type": "null"}
        for _ in range(depth):
            nested = rng.choice(
                [
                    {"items": nested},
                    {"anyOf": [nested, {"type": "null"}]},
                    {"properties": {"a": nested}},
                    {"allOf": [nested]},
                ]
            )
        return "json", nested
    names = [f"d{n}" for n in range(depth)]
    places = {name: link(f"#/$defs/{following}") for name, following in pairwise(names)}
    return "json", {"$ref": "#/$defs/d0", "$defs": places | {names[-1]: {"type": "null"}}}


def cyclic(rng: random.Random) -> tuple[str, Any]:
    names = [f"d{n}" for n in range(rng.choice([1, 2, 5, 40, 300]))]
    places = {name: LINKS[rng.choice(list(LINKS))](f"#/$defs/{rng.choice(names)}") for name in names}
    return "json", {"$ref": "#/$defs/d0", "$defs": places}


def wide(rng: random.Random) -> tuple[str, Any]:
    width = rng.choice(WIDTHS)
    leaf = rng.choice([{"type": "integer"}, {"type": "string", "maxLength": 9}, {"enum": [1, "a"]}, {}])
    names = [f"p{n}" for n in range(width)]
    made = rng.choice(
        [
            {"properties": dict.fromkeys(names, leaf), "required": names[: rng.randrange(width + 1)]},
            {"properties": dict.fromkeys(names, leaf), "minProperties": 1, "additionalProperties": False},
            {"enum": names},
            {"anyOf": [{"properties": {name: leaf}, "required": [name]} for name in names]},
            {
                "allOf": [
                    {"anyOf": [{"properties": {name: leaf}}, {"properties": {name: {"type": "null"}}}]}
                    for name in names[:40]
                ]
            },
            {"prefixItems": [leaf] * width, "minItems": rng.randrange(width + 1)},
            {"patternProperties": {f"^{name}": leaf for name in names[:300]}},
            {"type": "array", "items": leaf, "minItems": rng.choice(COUNTS), "maxItems": rng.choice(COUNTS)},
            {"const": {name: [name] * 3 for name in names}},
        ]
    )
    return "json", made


def _regex(rng: random.Random, levels: int) -> str:
    if not levels:
        return rng.choice(
            [
                *rng.choice([["a"], ["b"], ["\ud800", *"abc" * 9]]),
                "b",
                ".",
                r"\w",
                r"\p{L}",
                "[^x]",
                "[a-z0-9]",
                "é",
                r"\x00",
                r"\d",
                "x",
                "(?i)k",
                "$",
                "^",
                r"\b",
                "/",
                '"',
            ]
        )
    parts = "".join(_regex(rng, levels - 1) for _ in range(rng.randrange(1, 4)))
    again = ["", "*", "+", "?", "{3}", "{0,50}", "{2,}", "{1,1000}", "{0,9}"]
    again += [rng.choice(["{1000}", "{100000}", "{4294967295}", "{99999999999}", "{3,1}", "??", "*+"])]
    return rng.choice(
        [parts, f"({parts})", f"(?:{parts}|{_regex(rng, levels - 1)})", f"({parts})"]
    ) + rng.choice(again)


def regex(rng: random.Random) -> tuple[str, str]:
    return "regex", _regex(rng, rng.randrange(5))


def nested_regex(rng: random.Random) -> tuple[str, str]:
    depth = rng.choice([*DEPTHS, 20_000])
    part = _regex(rng, 1)
    opened, closed = rng.choice(
        [
            ("(", ")"),
            ("(", ")*"),
            ("(?:", ")?"),
            ("(a|", ")"),
            ("[", "]"),
            ("(", ""),
            ("", "?"),
            ("a?", "a"),
            ("(a*)*", ""),
        ]
    )
    return "regex", opened * depth + part + closed * depth


def _body(rng: random.Random, names: list[str], levels: int, quoted: bool) -> str:
    if not levels:
        text = rng.choice(
            ['"a"', '"b"', '"ab"', '""', '"\\u00e9"', '"c"', '"d"', '"\ud800"'][: 8 - (rng.random() < 0.95)]
        )
        atom = rng.choice(
            ["/[a-z]{1,9}/", "/(.|\\n)*/", "/(a{100}){100}/"] if quoted else ["[a-z]", "[^\\n]", "."]
        )
        return rng.choice([text, atom, rng.choice(names), rng.choice(names)])
    parts = " ".join(_body(rng, names, levels - 1, quoted) for _ in range(rng.randrange(1, 4)))
    again = ["", "", "*", "+", "?", "{2,5}", "{1000}", "{0,1000000}", "{2000000000}"]
    return rng.choice(
        [parts, f"({parts} | {_body(rng, names, levels - 1, quoted)})", f"({parts})"]
    ) + rng.choice(again)


def lark(rng: random.Random) -> tuple[str, str]:
    names = [rng.choice(["r", "T"]) + str(n) for n in range(rng.choice([1, 3, 12]))]
    rules = [f"{name}: {_body(rng, names, rng.randrange(4), True)}" for name in names]
    start = rng.choice(
        [
            "start: " + names[0],
            "start: " + _body(rng, names, 2, True),
            "start: %json " + str(_schema(rng, 1)).replace("'", '"'),
        ]
    )
    extra = rng.choice(
        ["", "", "%ignore /[ \\t]+/", "%import common.INT", "%llguidance {}", "// x", "%declare A", "%lark {"]
    )
    return "lark", "\n".join([start, *rules, extra])


def lark_chain(rng: random.Random) -> tuple[str, str]:
    depth = rng.choice(DEPTHS)
    name = rng.choice(["r", "T"])
    link = rng.choice(['"a" {}', "{}", '("x" | {} "y")*', "{}?", '(("a" {})?)*', "~{}", '"a" {} {}'])
    places = list(range(depth))
    if rng.random() < 0.5:
        rng.shuffle(places)
    rules = [f"{name}{n}: " + link.replace("{}", f"{name}{n + 1}") for n in places]
    end = rng.choice(['"b"', f"{name}0", '"b"?', "/a{1000}/", "%json " + "[" * depth + "]" * depth])
    nested = "start: " + "(" * depth + '"a"' + ")" * depth
    return "lark", rng.choice(
        ["\n".join([f"start: {name}0", *rules, f"{name}{depth}: {end}"])] * 4 + [nested]
    )


def gbnf(rng: random.Random) -> tuple[str, str]:
    names = [f"r{n}" for n in range(rng.choice([1, 3, 12]))]
    rules = [f"{name} ::= {_body(rng, names, rng.randrange(4), False)}" for name in names]
    return "gbnf", "\n".join(["root ::= " + names[0], *rules, rng.choice(["", "# x", "root", "::=", '"'])])


def gbnf_chain(rng: random.Random) -> tuple[str, str]:
    depth = rng.choice(DEPTHS)
    rules = [f'r{n} ::= "a" r{n + 1}' for n in range(depth)]
    rng.shuffle(rules)
    nested = "root ::= " + "(" * depth + '"a"' + ")" * depth
    return "gbnf", rng.choice(
        ["\n".join(["root ::= r0", *rules, f'r{depth} ::= "b"']), nested, "root ::= " + '"a"? ' * depth]
    )


def listed(rng: random.Random) -> tuple[str, str]:
    """What llguidance takes for several grammars in JSON."""
    inner = rng.choice(
        [
            '{"json_schema": {"type": "integer", "minimum": -9223372036854775810, "maximum": -9223372036854775809}}',
            "{}",
            "7",
        ]
    )
    return "lark", rng.choice(
        [
            f'{{"grammars": [{inner}]}}',
            '{"grammars": 7}',
            "{",
            '{"grammars": [{"lark_grammar": "start: start"}]}',
        ]
    )


def noise(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(["regex", "lark", "gbnf"])
    signs = rng.choice(["()[]{}|*+?\\/", 'start: root ::= "a" /b/ %json {', "\ud800\udfff\0\n\t", "ab\n:%"])
    return kind, "".join(rng.choice(signs) for _ in range(rng.choice([3, 30, 3000, 60_000, 200_000])))
