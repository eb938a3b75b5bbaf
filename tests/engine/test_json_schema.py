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
    grammar, output, rng = (
        GRAMMARS.compiled(StructuredOutputs(json=schema)).constraint(0),
        list[int](),
        np.random.default_rng(seed),
    )
    while 0 not in output:
        output.append(int(rng.choice(np.flatnonzero(grammar.allowed(output, [0], [-1])[0]))))
    return [key for key, _ in json.loads(TOKENIZER.decode(output[:-1]), object_pairs_hook=list)]


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^[ab]$", "^(?:a|b|ab?)$", "^a{1,2}$"])
@pytest.mark.parametrize("named", [{}, {"a": YES}, {"a": YES, "b": YES}])
def test_keys_that_a_pattern_and_a_name_match_come_once(pattern, named):
    for required in ([], ["a"]):
        schema = {"type": "object", "properties": named, "patternProperties": {pattern: YES}, "required": required}
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
