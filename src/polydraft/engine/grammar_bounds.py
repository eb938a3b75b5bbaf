"""Bounds of grammars, counted in loops before llguidance reads them: its compiler recurses, and one that goes too deep ends the process.

A level of a schema takes 4.5 KB of stack there, a rule or a group of a grammar in Lark's notation 2 to 3 KB.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from math import prod
from typing import Any

from polydraft.errors import InvalidInputError

MOST_BYTES = 1 << 17
"""Of a grammar's text."""
MOST_LEVELS = 512
"""Of schemas within schemas and references, or of rules, terminals and groups that lead to each other: some 2.3 MB of stack."""
MOST_NESTED = 100
"""Brackets of JSON within each other; serde, which reads it, has 128."""
MOST_GROUPS = 200
"""Groups of a regular expression within each other; Rust's crate `regex` has 250."""
MOST_REPEATS = 100_000
"""That a match of a regular expression needs, nested ones multiplied: (a{100}){1000} takes 0.3 s and 40 MB."""
MOST_ITEMS = 10_000
"""That arrays are written out as, one by one."""
MOST_GBNF_BYTES = 1 << 15
"""Of a grammar in llama.cpp's notation, which Python rewrites, 3 µs a byte."""
MOST_GBNF_WORK = 4_000_000
"""Of its bytes times the rules that lead to each other, each of which is a pass over the grammar: 0.1 s."""
HOLD_SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"}
)
HOLD_NAMED_SCHEMAS = frozenset({"properties", "patternProperties"})
LARK = re.compile(
    r"""(?P<blank>(?:\#|//)[^\n]*|[ \t\r]+)|(?P<line>\n+)|(?P<text>"(?:\\.|[^"\\\n])*(?:"i?|\\?\Z|(?=\n)))|(?P<token><[^<>\s]+>)"""
    r"""|/(?P<regex>(?:\\.|[^/\\])+)(?:/[imslux]*|\\?\Z)|(?P<json>%(?:json|llguidance|regex)\b)|(?P<inner>%lark\s*\{)"""
    r"""|(?P<name>[A-Za-z_][\w-]*)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<other>[^\s"/%A-Za-z_()\[\]{}\#<?!]+|.)""",
    re.DOTALL,
)
GBNF = re.compile(
    r"""(?P<blank>\#[^\n\r]*|\s+)|(?P<text>"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z))"""
    r"""|(?P<rule>[\w-]+(?=[ \t]*::=))|(?P<name>[\w-]+)|(?P<open>\()|(?P<close>\))|(?P<other>[^\s"\[\w()\#-]+|.)""",
    re.DOTALL,
)
REGEX = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|(?P<open>\()|(?P<close>\))|\{(?P<least>\d{1,12})\d*(?:,\d*)?\}|(?P<again>[*+?])|[^\\\[(){*+?]+|.",
    re.DOTALL,
)
"""Each of the three reads a text once: what is left open goes to its end."""
END = object()
Edges = dict[str, list[tuple[str, int]]]
"""From rules to those that they name, each with the levels of groups that lead there; a group that names none leads to ""."""


def _refuse(given: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"a grammar was given {given}; expected {expected}. Make it simpler.")


def check_text(text: str, most_bytes: int = MOST_BYTES) -> None:
    """Of any grammar.

    Raises:
        InvalidInputError: too many bytes, or half of a pair of surrogates.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise _refuse(
            f"with the lone surrogate U+{ord(text[error.start]):X} at {error.start}", "text in Unicode"
        ) from error
    if num_bytes > most_bytes:
        raise _refuse(f"of {num_bytes} bytes", f"at most {most_bytes}")


def check_nesting(value: Any, where: str = "") -> None:
    """Of JSON.

    Raises:
        InvalidInputError: brackets within brackets, too deep.
    """
    parts = [value]
    num_levels = 0
    while parts := [part for part in parts if isinstance(part, (Mapping, list))]:
        num_levels += 1
        parts = [inner for part in parts for inner in (part.values() if isinstance(part, Mapping) else part)]
    if num_levels > MOST_NESTED:
        raise _refuse(f"whose JSON {where}is nested {num_levels} levels deep", f"at most {MOST_NESTED}")


def check_json(schema: Any) -> None:
    """Of a schema, no deeper than `check_nesting` allows.

    Raises:
        InvalidInputError: schemas and references within each other, too deep; arrays of too many items; expressions as of `check_regex`.

    Example:
        >>> schema = {"$ref": "#/$defs/0", "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(300)}}
        >>> check_json(schema)
        Traceback (most recent call last):
        ...
        polydraft.errors.InvalidInputError: a grammar was given whose schemas lead to each other 601 levels deep; expected at most 512. Make it simpler.
    """
    open_ = [iter([schema])]
    seen = set[str]()
    deepest = 0
    steps = set[Decimal]()
    while open_:
        below = next(open_[-1], END)
        if below is END:
            open_.pop()
        elif isinstance(below, Mapping):
            _check_sizes(below)
            steps |= {
                abs(Decimal(str(step)))
                for step in [below.get("multipleOf")]
                if isinstance(step, (int, float)) and step
            }
            open_.append(_schemas_below(below, schema, seen))
            deepest = max(deepest, len(open_) - 1)
    if deepest > MOST_LEVELS:
        raise _refuse(f"whose schemas lead to each other {deepest} levels deep", f"at most {MOST_LEVELS}")
    _check_steps(steps)


def _check_steps(steps: Collection[Decimal]) -> None:
    """Of `multipleOf`: llguidance multiplies those that meet in 32 bits."""
    decimals = max((-int(step.normalize().as_tuple().exponent) for step in steps), default=0)
    product = prod(step.scaleb(max(decimals, 0)) for step in steps)
    if len(steps) > 1 and product >= 1 << 32:
        raise _refuse(
            f"whose {len(steps)} numbers of multipleOf have the product {product:.3g}",
            "one number, or a product below 2 ** 32",
        )


def _schemas_below(schema: Mapping[str, Any], whole: Any, seen: set[str]) -> Iterator[Any]:
    """Schemas in a schema, and what it refers to where nothing has before."""
    for key, value in schema.items():
        if key in HOLD_NAMED_SCHEMAS and isinstance(value, Mapping):
            yield from value.values()
        elif key in HOLD_SCHEMAS:
            yield from value if isinstance(value, list) else [value]
        elif key == "$ref" and isinstance(value, str) and value not in seen:
            seen.add(value)
            yield _referred(whole, value)


def _referred(whole: Any, reference: str) -> Any:
    for name in filter(None, reference.removeprefix("#").split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(whole, list):
            whole = (
                whole[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(whole) else None
            )
        else:
            whole = whole.get(name) if isinstance(whole, Mapping) else None
    return whole


def _check_sizes(schema: Mapping[str, Any]) -> None:
    for name in ("minItems", "maxItems"):
        count = schema.get(name)
        if isinstance(count, int) and count > MOST_ITEMS:
            raise _refuse(f"with {name}: {count}", f"at most {MOST_ITEMS}")
    named = schema.get("patternProperties")
    for pattern in [schema.get("pattern"), *(named if isinstance(named, Mapping) else ())]:
        if isinstance(pattern, str):
            check_regex(pattern)


def check_regex(pattern: str) -> None:
    """Of a regular expression.

    Raises:
        InvalidInputError: groups within groups, too deep; a repetition of a repetition that needs too much.

    Example:
        >>> check_regex("((a{1000}){1000}|b)*")
        Traceback (most recent call last):
        ...
        polydraft.errors.InvalidInputError: a grammar was given with an expression that repeats 1000000 times; expected at most 100000. Make it simpler.
    """
    repeats = [1]
    last = 1
    deepest = 0
    for part in REGEX.finditer(pattern):
        if part["open"]:
            repeats.append(1)
            deepest = max(deepest, len(repeats) - 1)
            continue
        if part["close"] and len(repeats) > 1:
            last = repeats.pop()
        elif part["least"]:
            last *= max(1, int(part["least"]))
        elif not part["again"]:
            last = 1
        repeats[-1] = max(repeats[-1], last)
    if deepest > MOST_GROUPS:
        raise _refuse(f"with an expression of groups nested {deepest} levels deep", f"at most {MOST_GROUPS}")
    if max(repeats) > MOST_REPEATS:
        raise _refuse(f"with an expression that repeats {max(repeats)} times", f"at most {MOST_REPEATS}")


def check_lark(text: str, schema_of: Callable[[Any], Any]) -> str:
    """Of a grammar in Lark's notation. schema_of: what stands for a schema in it, or raises.

    Returns it with these schemas.

    Raises:
        InvalidInputError: rules, terminals and groups that lead to each other, too deep; schemas and expressions as above.
    """
    pieces = list[str]()
    place = 0
    copied = 0
    tokens = list[re.Match[str]]()
    while token := LARK.match(text, place):
        place = token.end()
        if token["json"]:
            start = len(text) - len(text[place:].lstrip())
            try:
                value, place = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                break  # which llguidance refuses, with the place
            check_nesting(value, f"behind {token['json']} ")
            if token["json"] == "%json":
                pieces += [text[copied:start], json.dumps(schema_of(value))]
                copied = place
        elif token["regex"]:
            check_regex(token["regex"])
        tokens.append(token)
    _check_depth(_edges(tokens, by_line=True))
    return "".join([*pieces, text[copied:]])


def check_gbnf(text: str) -> None:
    """Of a grammar in llama.cpp's notation.

    Raises:
        InvalidInputError: as of `check_text` and `check_lark`; so many bytes and rules that lead to each other that it would take long.
    """
    check_text(text, MOST_GBNF_BYTES)
    depth = _check_depth(_edges(GBNF.finditer(text), by_line=False))
    if depth * len(text) > MOST_GBNF_WORK:
        raise _refuse(
            f"of {len(text)} characters whose rules lead to each other {depth} levels deep", "a smaller one"
        )


def _edges(tokens: Iterable[re.Match[str]], *, by_line: bool) -> Edges:
    """Of a grammar's rules. by_line: one begins with any name at the beginning of a line, in no group."""
    rule = ""
    edges = Edges({"": []})
    depth = 0
    scopes = [0]
    begins = by_line
    for token in tokens:
        kind = token.lastgroup
        if kind == "line":
            begins = by_line
        if kind in ("blank", "line"):
            continue
        if kind == "rule" or (kind == "name" and begins and depth == scopes[-1]):
            rule = token[0]
            edges.setdefault(rule, [])
        elif kind == "name":
            edges[rule].append((token[0], 1 + depth - scopes[-1]))
        elif kind in ("open", "inner"):
            depth += 1
            scopes += [depth] if kind == "inner" else []  # where rules of its own begin
            edges[rule].append(("", 1 + depth - scopes[-1]))
        elif kind == "close" and depth:
            scopes = scopes[:-1] if scopes[-1] == depth else scopes
            depth -= 1
        begins = by_line and (kind == "inner" or (begins and token[0] in ("?", "!")))
    return edges


def _check_depth(edges: Edges) -> int:
    """The most levels of rules and groups that lead to each other; those of a cycle count once."""
    depths = dict[str, int]()
    for first in edges:
        open_ = [] if first in depths else [(first, 0, iter(edges[first]))]
        depths.setdefault(first, 0)
        while open_:
            rule, levels_above, below = open_[-1]
            name, levels = next(below, (None, 0))
            if name is not None:
                depths[rule] = max(depths[rule], levels + depths.get(name, 0))
                if name in edges and name not in depths:
                    depths[name] = 0
                    open_.append((name, levels, iter(edges[name])))
                continue
            open_.pop()
            if open_:
                above = open_[-1][0]
                depths[above] = max(depths[above], levels_above + depths[rule])
    deepest = max(depths.values())
    if deepest > MOST_LEVELS:
        raise _refuse(
            f"whose rules and groups lead to each other {deepest} levels deep", f"at most {MOST_LEVELS}"
        )
    return deepest
