"""JSON schemas, rewritten where llguidance compiles them into a grammar that ends nowhere or repeats a key.

multipleOf          of integers: a fraction's multiples that are integers are those of its numerator (1.75 = 7/4: 7, 14, ...)
patternProperties   a pattern that matches a few keys: those keys by name, each at most once
"""

import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
else:
    import sre_parse as _parser

__all__ = ["exact"]

MOST_KEYS = 64
"""That a pattern is written out as."""
VALUES = {"enum", "const", "default", "examples"}
"""What is no schema."""


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
    if rewritten.get("type") == "integer" and isinstance(step, float):
        rewritten["multipleOf"] = abs(Fraction(str(step)).numerator)
    return _named(rewritten)


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """With the keys of patterns that match a few by name."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
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
    others = {name: value for name, value in schema.items() if name not in ("properties", "patternProperties")}
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
    return None if any(texts is None for texts in parts) else list(dict.fromkeys(text for texts in parts for text in texts or ()))
