"""JSON schemas, rewritten or refused where llguidance compiles them into a grammar of other texts, one that ends nowhere or repeats a key.

multipleOf          of integers: a fraction's multiples that are integers are those of its numerator (1.75 = 7/4: 7, 14, ...)
patternProperties   a pattern that matches a few keys: those keys by name, each at most once
minimum, maximum    llguidance holds them as floats of 64 bits: of integers they are inclusive integers, and what a float would round is refused
const, enum         likewise
minProperties       additional keys may repeat, so they count as one: more that are not `required` are refused
maxItems, ...       more than any output has room for: left out
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any, TypeGuard

from polydraft.errors import InvalidInputError

if sys.version_info >= (3, 11):
    from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
else:
    import sre_parse as _parser


MOST_KEYS = 64
"""That a pattern is written out as."""
VALUES = {"enum", "const", "default", "examples"}
"""What is no schema."""
MOST_EXACT = (1 << 53) - 1
"""Up to which floats of 64 bits hold every integer, and the next one."""
MOST_MULTIPLE = 1 << 16
"""Of `multipleOf`, without its decimal point: each digit that was written leaves one of so many remainders."""
MOST_DECIMALS = 1e-9
"""Of `multipleOf`."""
ENDLESS = 1 << 26
"""Items, keys or characters: no output has so many."""


def exact(schema: Any) -> Any:
    """The same schema in those words.

    Example:
        >>> exact({"type": "integer", "multipleOf": 1.75})
        {'type': 'integer', 'multipleOf': 7}
        >>> exact({"patternProperties": {"^(a|b)$": {"type": "null"}, "^x": {}}, "additionalProperties": False})
        {'patternProperties': {'^x': {}}, 'additionalProperties': False, 'properties': {'a': {'type': 'null'}, 'b': {'type': 'null'}}}
    """
    if isinstance(schema, list):
        return [exact(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    rewritten = {name: value if name in VALUES else exact(value) for name, value in schema.items()}
    step = rewritten.get("multipleOf")
    if rewritten.get("type") == "integer" and _is_number(step) and isinstance(step, float):
        rewritten["multipleOf"] = abs(Fraction(str(step)).numerator)
    for name in ("maxItems", "maxLength", "maxProperties"):
        most = rewritten.get(name)
        if _is_number(most) and most > ENDLESS:
            del rewritten[name]
    _check_keys(rewritten)
    return _named(_bounded(rewritten))


def _is_number(value: object) -> TypeGuard[float]:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _refuse(name: str, given: object, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"a schema has {name}: {str(given)[:60]}; expected {expected}. Change it, or leave it out."
    )


def _check_keys(schema: Mapping[str, Any]) -> None:
    """`minProperties` of an object whose additional keys may repeat."""
    least = schema.get("minProperties")
    required = schema.get("required", ())
    if _is_number(least) and isinstance(required, (list, tuple)):
        num_required = len({name for name in required if isinstance(name, str)})
        if least > num_required + 1:
            raise _refuse(
                "minProperties",
                least,
                f"at most {num_required + 1}, one more than `required` names, as a grammar allows a key again",
            )


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """With numbers that llguidance keeps.

    Raises:
        InvalidInputError: others.
    """
    for name in ("const", "enum"):
        for value in _numbers_in(schema.get(name)):
            if not _keeps(value):
                raise _refuse(name, value, "a number that a float of 64 bits holds")
    step = schema.get("multipleOf")
    if _is_number(step) and not (0 < _without_point(step) <= MOST_MULTIPLE and abs(step) > MOST_DECIMALS):
        raise _refuse(
            "multipleOf",
            step,
            f"more than {MOST_DECIMALS}, and at most {MOST_MULTIPLE} without its decimal point",
        )
    types = schema.get("type")
    if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
        return _of_integers(schema)
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(name)
        if isinstance(value, (int, float)) and not abs(value) <= MOST_EXACT:
            raise _refuse(
                name, value, f"a number between -{MOST_EXACT} and {MOST_EXACT} where the type is not integer"
            )
    return schema


def _of_integers(schema: dict[str, Any]) -> dict[str, Any]:
    """The same with bounds that are integers and inclusive."""
    bounded = dict(schema)
    for sign, name, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        bound = schema.get(name)
        beyond = schema.get(exclusive)
        beyond = bound if beyond is True else beyond
        for key, value in ((name, bound), (exclusive, beyond)):
            if isinstance(value, float) and not math.isfinite(value):
                raise _refuse(key, value, "a number that a float of 64 bits holds")
        bounds = [math.ceil(sign * bound)] if _is_number(bound) else []
        bounds += [math.floor(sign * beyond) + 1] if _is_number(beyond) else []
        if not bounds:
            continue
        bounded.pop(exclusive, None)
        bounded[name] = sign * max(bounds)
        if not _is_kept_integer(bounded[name]) and not (name == "maximum" and bounded[name] == 2**63 - 1):
            raise _refuse(
                name,
                bounded[name],
                f"an integer of 64 bits that a float of 64 bits holds, as all up to {MOST_EXACT}, or {2**63 - 1} as the maximum",
            )
    return bounded


def _numbers_in(value: Any) -> Iterator[int | float]:
    """Of a constant."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, (int, float)) and not isinstance(part, bool):
            yield part
        elif isinstance(part, (Mapping, list)):
            parts += part.values() if isinstance(part, Mapping) else part


def _keeps(value: float) -> bool:
    """Whether llguidance writes a constant as it is: integers of 64 bits as such, others in the fewest digits of a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return (
        _is_kept_integer(value)
        if abs(value) < 2**63
        else abs(value) < 2**1000 and Decimal(repr(float(value))) == value
    )


def _is_kept_integer(value: int) -> bool:
    return abs(value) < 2**63 and int(float(value)) == value


def _without_point(step: float) -> int:
    """The digits of a number as an integer.

    Example:
        >>> _without_point(0.25), _without_point(-30)
        (25, 30)
    """
    number = abs(Decimal(str(step)))
    exponent = number.normalize().as_tuple().exponent
    return int(number.scaleb(-exponent)) if isinstance(exponent, int) and exponent < 0 else int(number)


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """With the keys of patterns that match a few by name."""
    patterns = schema.get("patternProperties")
    properties = schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return schema
    keys = {pattern: texts for pattern in patterns if (texts := _keys(pattern)) is not None}
    if not keys:
        return schema
    named = dict(properties)
    for pattern, texts in keys.items():
        for key in texts:
            named[key] = {"allOf": [named[key], patterns[pattern]]} if key in named else patterns[pattern]
    rest = {pattern: value for pattern, value in patterns.items() if pattern not in keys}
    others = {
        name: value for name, value in schema.items() if name not in ("properties", "patternProperties")
    }
    return ({"patternProperties": rest} if rest else {}) | others | {"properties": named}


def _keys(pattern: str) -> list[str] | None:
    """The texts that a pattern matches whole, in order; None where they are not a few."""
    try:
        parsed = _parser.parse(pattern)
        (_, first), *parts, (_, last) = parsed
    except (ValueError, RecursionError, re.error):
        return None
    if (str(first), str(last)) != ("AT_BEGINNING", "AT_END") or parsed.state.flags & ~re.UNICODE:
        return None
    return _texts(parts)


def _texts(parts: Any) -> list[str] | None:
    texts = [""]
    for kind, value in parts:
        endings = _texts_of(str(kind), value)
        if endings is None or len(texts) * len(endings) > MOST_KEYS:
            return None
        texts = ["".join(pair) for pair in product(texts, endings)]
    return list(dict.fromkeys(texts))


def _texts_of(kind: str, value: Any) -> list[str] | None:
    """The texts of one part of an expression."""
    if kind == "LITERAL":
        return [chr(value)]
    if kind == "RANGE" and value[1] - value[0] < MOST_KEYS:
        return [chr(code) for code in range(value[0], value[1] + 1)]
    if kind == "SUBPATTERN" and not value[1]:
        return _texts(value[-1])
    if kind == "MAX_REPEAT" and value[1] <= MOST_KEYS:
        return _union([list(value[2]) * count for count in range(value[0], value[1] + 1)])
    if kind in ("BRANCH", "IN"):
        return _union(value[1] if kind == "BRANCH" else [[part] for part in value])
    return None


def _union(choices: Any) -> list[str] | None:
    parts = [_texts(choice) for choice in choices]
    return (
        None
        if any(texts is None for texts in parts)
        else list(dict.fromkeys(text for texts in parts for text in texts or ()))
    )
