"""What the files that are read must hold, as data, and the one check of it.

Nothing computes with what a file says before `fault` has looked at it: names, formats, shapes and ranges; it tells the first
thing that does not fit, and the reader raises its own error with it. A schema is one of

    Number, Text, Array    a value        ListOf, Record    several        (a, b)    one of these        None    null        ANYTHING

Bounds and sizes may have names, alone or less a number ("T - 1"): the reader gives some, and the first array that has a size gives others.
It is neither msgspec nor pydantic, which add 9 and 86 ms to a start where this module adds 2 (the schema of config.json, an AMD EPYC): arrays and bounds
that a reader gives would need a check of their own beside them, and errors of msgspec do not say what was given.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Bound = int | float | str
Schema = Any
"""A class below, a tuple of schemas, or None."""


@dataclass(frozen=True)
class Number:
    """A finite number; whole: an integer."""

    low: Bound = 0
    high: Bound = sys.float_info.max
    whole: bool = True


@dataclass(frozen=True)
class String:
    """A string that can be written as UTF-8 and that a pattern matches as a whole."""

    pattern: str = ".*"


@dataclass(frozen=True)
class ListOf:
    """A list of so many of one kind."""

    of: Schema
    fewest: Bound = 0
    most: Bound = 1 << 20


@dataclass(frozen=True)
class Record:
    """An object. more: names that are not listed may be there.  partial: listed ones may be missing."""

    fields: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    more: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Array:
    """A numpy array: its format is one of these, its values are within the bounds."""

    formats: tuple[str, ...]
    shape: tuple[int | str, ...]
    low: Bound = -sys.float_info.max
    high: Bound = sys.float_info.max


ANYTHING = object()


def read_json(text: bytes | str) -> Any:
    """What JSON says.

    Raises:
        ValueError: text that is none, or lists in lists beyond what Python follows.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged where JSON was expected ({error})") from error


def fault(value: Any, schema: Schema, names: dict[str, int] | None = None, at: str = "it") -> str | None:
    """The first thing that does not fit, or None. names: of bounds and sizes; those of arrays are added.

    Example:
        >>> fault({"rate": 2}, Record({"rate": Number(0, 1, whole=False)}))
        'rate is 2; expected a number from 0 to 1'
        >>> fault(np.array([0, 3]), Array(("int64",), ("T",), 0, "T"), at="order")
        'order holds numbers from 0 to 3; expected them from 0 to 2'
    """
    bounds: dict[str, int] = {} if names is None else names
    if isinstance(schema, Array):
        return _array_fault(value, schema, bounds, at)
    if isinstance(schema, tuple):
        return _option_fault(value, schema, bounds, at)
    if not _fits(value, schema, bounds):
        return f"{at} is {_shown(value)}; expected {_expected(schema, bounds)}"
    inside: list[tuple[Any, Schema, str]] = []
    if isinstance(schema, ListOf):
        inside = [(item, schema.of, f"{at}[{i}]") for i, item in enumerate(value)]
    elif isinstance(schema, Record):
        unknown = value.keys() - schema.fields.keys()
        missing = schema.fields.keys() - value.keys()
        if (unknown and not schema.more) or (missing and not schema.partial):
            return f"{at} has the names {_shown(sorted(value))}; expected {sorted(schema.fields)}"
        prefix = "" if at == "it" else f"{at}."
        inside = [(value[name], of, f"{prefix}{name}") for name, of in schema.fields.items() if name in value]
    return next((problem for item, of, place in inside if (problem := fault(item, of, bounds, place))), None)


def _option_fault(value: Any, options: tuple[Any, ...], bounds: dict[str, int], at: str) -> str | None:
    """Of a value that may be any of some."""
    faults = [fault(value, option, bounds, at) for option in options]
    if None in faults:
        return None
    inner = next((problem for problem in faults if problem and not problem.startswith(f"{at} is ")), None)
    expected = " or ".join(_expected(option, bounds) for option in options)
    return inner or f"{at} is {_shown(value)}; expected {expected}"


def _fits(value: Any, schema: Schema, bounds: dict[str, int]) -> bool:
    """Whether a value is right, apart from what it holds."""
    match schema:
        case Number(low, high, whole):
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            return number and _at(low, bounds) <= value <= _at(high, bounds)
        case String(pattern):
            return (
                isinstance(value, str)
                and _is_utf8(value)
                and re.fullmatch(pattern, value, re.DOTALL) is not None
            )
        case ListOf(_, fewest, most):
            return isinstance(value, list) and _at(fewest, bounds) <= len(value) <= _at(most, bounds)
        case Record():
            return isinstance(value, dict)
        case _:
            return schema is ANYTHING or value is schema


def _array_fault(value: np.ndarray, schema: Array, bounds: dict[str, int], at: str) -> str | None:
    if str(value.dtype) not in schema.formats or value.ndim != len(schema.shape):
        return f"{at} holds {value.dtype} of {value.ndim} dimensions; expected {' or '.join(schema.formats)} of {len(schema.shape)}"
    expected_shape = tuple(
        bounds.setdefault(size, length) if isinstance(size, str) else size
        for size, length in zip(schema.shape, value.shape, strict=True)
    )
    if expected_shape != value.shape:
        return f"{at} has the shape {value.shape}; expected {expected_shape}"
    low = _at(schema.low, bounds)
    high = _at(schema.high, bounds)
    lowest, highest = (value.min().item(), value.max().item()) if value.size else (low, high)
    if not (low <= lowest and highest <= high):  # NaN is neither
        return f"{at} holds numbers from {lowest} to {highest}; expected them from {low} to {high}"
    return None


def _at(bound: Bound, bounds: Mapping[str, int]) -> int | float:
    if not isinstance(bound, str):
        return bound
    name, _, less = bound.partition(" - ")
    return bounds[name] - int(less or 0)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or value.bit_length() < 256
        else f"an integer of {value.bit_length()} bits"
    )
    return text if len(text) <= 60 else f"{text[:60]} ..."


def _expected(schema: Schema, bounds: Mapping[str, int]) -> str:
    match schema:
        case Number(low, high, whole):
            most = _at(high, bounds)
            reach = (
                f">= {_at(low, bounds)}"
                if most == sys.float_info.max
                else f"from {_at(low, bounds)} to {most}"
            )
            return f"{'an integer' if whole else 'a number'} {reach}"
        case ListOf(_, fewest, most):
            return f"a list of {_at(fewest, bounds)} to {_at(most, bounds)}"
        case String(pattern):
            return f"text that matches {pattern!r}"
        case _:
            return "an object" if isinstance(schema, Record) else "null"


# What the files hold

MOST_IDS = 1 << 21
"""Most ids of a vocabulary, far beyond the largest there is; tables of a number an id stay below 32 MB."""


@dataclass(frozen=True)
class Index:
    """Version and contents of an index file. remedy: how to get a whole one.

    The bound `vocab_size` is the file's own; others that `Record` and `Array` name are the reader's.
    """

    version: int
    arrays: Record
    remedy: str


INDEXES = {
    "text": Index(
        4,
        Record(
            {
                "tokens": Array(
                    ("uint16", "int32"), ("T",), 0, "vocab_size"
                ),  # vocab_size itself ends a document
                "order": Array(("uint32",), ("T",), 0, "T - 1"),
            }
        ),
        "Build one with `polydraft index build CORPUS --out FILE`, or save the store again.",
    ),
    "trigram-store": Index(
        4,
        Record(
            {
                "key": Array(("int64",), ("P",), 0),
                "size": Array(("int32",), ("P",), 0, "width"),
                "token": Array(("int32",), ("P", "width"), 0, "vocab_size - 1"),
                "weight": Array(("float32",), ("P", "width"), 0),
            }
        ),
        "Save the store again with `TrigramStore.save`.",
    ),
}
"""By kind: every array is listed, and no other may be there."""

_SECONDS = Number(0, 1e6, whole=False)
PROFILE = Record(
    {
        "polydraft_profile": Number(8, 8),
        "about": Record(more=True),
        "costs": Record(
            {
                "knots": ListOf(_SECONDS, "knots", "knots"),
                **dict.fromkeys(("draft_start", "draft_step", "overhead"), _SECONDS),
                **dict.fromkeys(("first_row_token", "row_token", "draft_token"), _SECONDS),
            }
        ),
        **dict.fromkeys(
            ("sampled", "greedy"),
            Record(
                {
                    "rates": ListOf(Number(0, 1, whole=False), "lanes", "lanes"),
                    "expected": ListOf(_SECONDS, 3, 3),
                }
            ),
        ),
    }
)
"""What `Profile.to_dict` gives."""

_WIDTH = (None, Number(1, 1 << 24))
_THETA = {"rope_theta": (None, Number(1, 1e15, whole=False))}
CONFIG = Record(
    {
        "vocab_size": (None, Number(1, MOST_IDS)),
        "num_hidden_layers": (None, Number(1, 1024)),
        **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), _WIDTH),
        "intermediate_size": (
            *_WIDTH,
            ListOf(Number(1, 1 << 24), 1, 1024),
        ),  # one for each layer, in Gemma 3n
        "max_position_embeddings": (None, Number(1, 1 << 40)),
        "rms_norm_eps": (None, Number(0, 1, whole=False)),
        **dict.fromkeys(
            ("eos_token_id", "bos_token_id"), (None, Number(-1, 1 << 31), ListOf(Number(-1, 1 << 31)))
        ),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), (None, Record(_THETA, more=True, partial=True))),
        **_THETA,
    },
    more=True,
    partial=True,
)
"""What a model's config.json and generation_config.json may say of what is allocated and computed with; the rest is for transformers to refuse."""

HEAD = Record(
    {
        **CONFIG.fields,
        **dict.fromkeys(
            ("eagle_aux_hidden_state_layer_ids", "diffusion_layers", "transfer_layers", "exit_layers"),
            (None, ListOf(Number(-1024, 1024), 0, 1024)),
        ),
        **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "block_size"), Number(1, 1024)),
        "slots": Number(1, 1025),
        "in_place": (True, False),
        "sees": ListOf(String("all|causal|apart"), "layers", "layers"),
        "windows": ListOf((None, Number(1, 1 << 40)), "layers", "layers"),
        "markov_head_type": (None, String("none|vanilla|gated|rnn")),
        "markov_rank": (None, Number(0, 1 << 24)),
    },
    more=True,
    partial=True,
)
"""What a draft head's config.json may say of the same, and of the head. layers: of the head."""

PROMPT = Record({"prompt": String(".+")}, more=True)
"""A line of a .jsonl file."""
