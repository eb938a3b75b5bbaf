"""Schemas whose grammar llguidance would compile into a dead end, or with keys that repeat: refused when compiled, or right."""

import json

import numpy as np
import pytest

from polydraft import StructuredOutputs
from polydraft.engine.structured import Grammars
from polydraft.errors import InvalidInputError
from polydraft.models import load, pair

TOKENIZER = load.load_tokenizer(str(pair.target_folder()))
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), [0])
YES = {"type": "boolean"}


def keys(schema, seed):
    """Keys of an output, of which any token that may come next is as likely, the end too."""
    grammar = GRAMMARS.compiled(StructuredOutputs(json=schema)).constraint(0)
    output = list[int]()
    rng = np.random.default_rng(seed)
    while 0 not in output:
        output.append(int(rng.choice(np.flatnonzero(grammar.allowed(output, [0], [-1])[0]))))
    return [key for key, _ in json.loads(TOKENIZER.decode(output[:-1]), object_pairs_hook=list)]


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^[ab]$", "^(?:a|b|ab?)$", "^a{1,2}$"])
@pytest.mark.parametrize("named", [{}, {"a": YES}, {"a": YES, "b": YES}])
def test_keys_that_a_pattern_and_a_name_match_come_once(pattern, named):
    for required in ([], ["a"]):
        schema = {
            "type": "object",
            "properties": named,
            "patternProperties": {pattern: YES},
            "required": required,
        }
        for seed in range(12):
            found = keys(schema | {"additionalProperties": False}, seed)
            assert len(set(found)) == len(found) and set(required) <= set(found) <= {"a", "b", "ab", "aa"}


def test_open_patterns_stay():
    schema = {"type": "object", "patternProperties": {"^x[0-9]+$": YES}, "additionalProperties": False}
    grammar = GRAMMARS.compiled(StructuredOutputs(json=schema)).constraint(0)
    ids = TOKENIZER('{"x12": true, "x7": false}')["input_ids"]
    assert grammar.allowed(ids, [0], [-1])[0, 0]


@pytest.mark.parametrize("bounds", [(1.75, 1, 6), (0.7, 1, 6), (0.4, 1, 1)])
def test_integers_without_a_multiple_in_their_range_are_refused_or_left_out(bounds):
    step, least, most = bounds
    number = {"type": "integer", "multipleOf": step, "minimum": least, "maximum": most}
    schema = {"type": "object", "properties": {"n": number, "y": YES}, "additionalProperties": False}
    with pytest.raises(InvalidInputError, match="required property 'n' is unsatisfiable"):
        GRAMMARS.compiled(StructuredOutputs(json=schema | {"required": ["n"]}))
    assert all(keys(schema, seed) in ([], ["y"]) for seed in range(8))
    number["maximum"] = 14
    assert any("n" in keys(schema, seed) for seed in range(20))


def allows(schema, text):
    """Whether a text and then its end are allowed."""
    grammar = GRAMMARS.compiled(StructuredOutputs(json=schema)).constraint(0)
    output = list[int]()
    for token in [*TOKENIZER(text)["input_ids"], 0]:
        if not grammar.allowed(output, [0], [-1])[0, token]:
            return False
        output.append(token)
    return True


WHOLE = {"type": "integer"}
SAFE = 2**53 - 1


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (WHOLE | {"minimum": -SAFE, "maximum": SAFE}, [-SAFE, 0, SAFE], [-SAFE - 1, SAFE + 1]),
        (WHOLE | {"exclusiveMinimum": SAFE}, [SAFE + 1], [SAFE, 0]),
        (WHOLE | {"exclusiveMaximum": 2**53}, [SAFE], [2**53]),
        (WHOLE | {"minimum": 2, "exclusiveMinimum": True, "maximum": 7.5}, [3, 7], [2, 8]),
        (WHOLE | {"minimum": 0, "maximum": 2**63 - 1}, [0, 2**63 - 1], [2**63, -1]),
        (WHOLE | {"minimum": -(2**62), "maximum": 2**62}, [-(2**62), 2**62], [-(2**62) - 1, 2**62 + 1]),
        ({"type": ["integer", "null"], "exclusiveMinimum": 9}, [10], [9]),
        ({"const": 2**62}, [2**62], [2**62 + 1, 2**62 - 1]),
        ({"enum": [2**53, -(2**53), 10**20]}, [2**53, -(2**53), 10**20], [2**53 + 1, 10**20 + 1]),
        (
            WHOLE | {"allOf": [{"minimum": SAFE - 1}, {"exclusiveMaximum": SAFE}]},
            [SAFE - 1],
            [SAFE, SAFE - 2],
        ),
    ],
    ids=str,
)
def test_large_integers_are_kept_to_the_last_digit(schema, inside, outside):
    assert all(allows(schema, str(number)) for number in inside)
    assert not any(allows(schema, str(number)) for number in outside)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (WHOLE | {"minimum": -(2**63) - 2, "maximum": -(2**63) - 1}, "minimum: -9223372036854775810"),
        (WHOLE | {"minimum": -(2**63)}, "minimum: -9223372036854775808"),
        (WHOLE | {"minimum": 99999999999999999999}, "minimum: 99999999999999999999"),
        (WHOLE | {"minimum": 2**53 + 1}, "minimum: 9007199254740993"),
        (WHOLE | {"exclusiveMinimum": 2**53}, "minimum: 9007199254740993"),
        (WHOLE | {"maximum": 2**64 - 1}, "maximum: 18446744073709551615"),
        ({"items": {"type": "number", "maximum": 1e300}}, r"maximum: 1e\+300"),
        ({"minimum": 2**53 + 1}, "minimum: 9007199254740993"),
        ({"const": 2**53 + 1}, "const: 9007199254740993"),
        ({"enum": ["a", [{"a": -(2**63)}]]}, "enum: -9223372036854775808"),
        ('{"const": 1e400}', "const: inf"),
        ({"const": 10**400}, "const: 10{59}"),
        (WHOLE | {"multipleOf": 1000003}, "multipleOf: 1000003"),
        ({"multipleOf": 0}, "multipleOf: 0"),
        ({"multipleOf": 1e-300}, "multipleOf: 1e-300"),
    ],
    ids=str,
)
def test_numbers_that_a_float_would_change_are_refused_by_name(schema, said):
    with pytest.raises(
        InvalidInputError, match=rf"structured_outputs\.json: a schema has {said}; expected"
    ) as told:
        GRAMMARS.compiled(StructuredOutputs(json=schema))
    assert len(str(told.value)) < 300


def test_additional_keys_may_repeat_and_count_as_one():
    for schema in ({"minProperties": 2}, {"minProperties": 4, "required": ["a", "b"]}):
        with pytest.raises(InvalidInputError, match=r"minProperties: \d; expected at most"):
            GRAMMARS.compiled(
                StructuredOutputs(json={"type": "object", "additionalProperties": YES} | schema)
            )
    properties = {
        "properties": {"a": YES},
        "required": ["a"],
        "additionalProperties": YES,
        "minProperties": 2,
    }
    assert allows(properties, '{"a": true, "b": true}') and not allows(properties, '{"a": true}')
    assert allows({"type": "object", "minProperties": 1, "additionalProperties": YES}, '{"b": true}')


def test_a_bound_that_no_output_reaches_is_none():
    arrays = {"type": "array", "items": YES, "maxItems": 2**31 - 1}
    assert allows(arrays, json.dumps([True] * 9)) and allows({"type": "string", "maxLength": 2**40}, '"abc"')
