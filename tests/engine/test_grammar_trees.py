"""What a grammar allows at a node is a function of the node's path alone: not of siblings that were visited, nor of what was asked before."""

import json
from functools import cache

import numpy as np

from polydraft import StructuredOutputs
from polydraft.engine.structured import Grammars
from polydraft.models import load, pair

LEAVES = [
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "string"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^(a|b)+c?$"},
    {"type": "string", "format": "date"},
    {"enum": ["a", "ab", "b c", 1, None]},
    {"const": {"a": [1, "b"]}},
    {"type": "null"},
]
ANY = [
    {},
    {"type": "object"},
    {"type": ["array", "object"]},
    {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]},
]
OTHERS = [
    {"regex": r"(a|b)*c{2,3}|[0-9]+ (x|y)"},
    {"regex": r"[a-z ]*(foo|bar)+[0-9]{2,5}.*"},
    {"regex": r"(\[a*\]|\{a*\})+"},
    {"choice": ["yes", "yes, sir", "no", "no way", "not at all"]},
    {"choice": [f"number {i}" for i in range(40)]},
    {"grammar": 'start: "(" start ")" | "[" start "]" | WORD\nWORD: /[a-c]+/'},
    {"grammar": 'start: (left | right)+\nleft: "<" TEXT ">"\nright: "{" TEXT "}"\nTEXT: /[a-z ]*/'},
    {
        "grammar": 'start: sum\nsum: term (("+" | "-") term)*\nterm: N | "(" sum ")"\nN: /[0-9]+/\n%ignore / +/'
    },
    {"grammar": 'start: o | /(.|\\n)*/\no: "call " %json {"type": "object"} "!" | %json {"type": "array"}'},
]


def schema(rng, depth=0, kind=None):
    """Random: objects, arrays, unions, and what they hold."""
    kind = rng.integers(4 if depth < 3 else 1) if kind is None else kind
    if kind == 1:
        names = [f"{'ab'[rng.integers(2)]}{i}" for i in range(rng.integers(3))]
        inner = {name: schema(rng, depth + 1) for name in names}
        more = [False, True, schema(rng, depth + 1)][rng.integers(3)]
        required = [name for name in names if rng.random() < 0.6]
        return {"type": "object", "properties": inner, "required": required, "additionalProperties": more}
    if kind == 2:
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": int(rng.integers(2))}
    if kind == 3:
        return {"anyOf": [schema(rng, depth + 1, kind) for kind in rng.permutation(3)]}
    return LEAVES[rng.integers(len(LEAVES))] if rng.random() < 0.6 else ANY[rng.integers(len(ANY))]


def form(number):
    """One of two hundred; of every fourth schema blanks are free."""
    if number < len(OTHERS):
        return StructuredOutputs(**OTHERS[number])
    made = schema(np.random.default_rng(number), kind=3)
    if number % 4:
        return StructuredOutputs(json=made)
    return StructuredOutputs(
        grammar=f"start: %json {json.dumps(made | {'x-guidance': {'whitespace_flexible': True}})}"
    )


@cache
def parts():
    tokenizer = load.load_tokenizer(str(pair.target_folder()))
    stop = tokenizer.get_vocab()["<|endoftext|>"]
    return tokenizer, Grammars(tokenizer, len(tokenizer), [stop]), stop


class Fresh:
    """What may follow a path, by a matcher that has read nothing but that path."""

    def __init__(self, source):
        self.source = source
        self.matcher = source.make()

    def allowed(self, path):
        matcher = self.matcher.deep_copy()
        bits = np.zeros(-(-self.source.vocab_size // 32), np.uint32)
        assert matcher.consume_tokens(list(path))
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


@cache
def signs():
    """Which tokens are signs alone, and which of those begin with a quotation mark."""
    tokenizer, *_ = parts()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    only_signs = np.array([bool(text.strip()) and set(text) <= set('[]{}",: ') for text in texts])
    return only_signs, only_signs & np.array([text.startswith('"') for text in texts])


def drawn(rng, fresh, path, stop):
    """One that may follow: of signs sooner, and strings are short; what follows the end is the end."""
    allowed = np.array([stop]) if stop in path else fresh.allowed(path)
    in_string = len(allowed) > len(signs()[0]) / 2
    likely = allowed[signs()[in_string][allowed]]
    return int(rng.choice(likely if len(likely) and rng.random() < (0.5 if in_string else 0.9) else allowed))


def tree(rng, fresh, output, stop):
    """Tokens, parents and paths of a random tree behind an output."""
    tokens = [0]
    parents = [-1]
    paths = list[tuple[int, ...]]([()])
    for _ in range(int(rng.integers(1, 5))):
        parents.append(int(rng.integers(max(0, len(tokens) - 4), len(tokens))))
        tokens.append(drawn(rng, fresh, [*output, *paths[parents[-1]]], stop))
        paths.append((*paths[parents[-1]], tokens[-1]))
    return tokens, parents, paths


def differing(number, steps=12):
    """Masks of random trees behind a growing output that are not those of their own paths."""
    _, grammars, stop = parts()
    rng = np.random.default_rng(number)
    source = grammars.compiled(form(number))
    grammar = source.constraint(1)
    fresh = Fresh(source)
    output = list[int]()
    wrong = 0
    for _ in range(steps):
        tokens, parents, paths = tree(rng, fresh, output, stop)
        rows = grammar.allowed([0, *output], tokens, parents)
        for row, path in zip(rows, paths, strict=True):
            expected = [stop] if stop in (*output, *path) else fresh.allowed([*output, *path]).tolist()
            wrong += np.flatnonzero(row).tolist() != expected
        for _ in range(int(rng.integers(1, 5))):
            output.append(drawn(rng, fresh, output, stop))
        output = [] if stop in output else output
    return wrong


def test_masks_of_random_trees_over_two_hundred_forms_are_those_of_their_paths():
    assert {number: wrong for number in range(200) if (wrong := differing(number))} == {}


def test_a_rejected_draft_leaves_no_mask_behind_for_its_siblings():
    tokenizer, grammars, _ = parts()
    asked, fresh = (
        grammars.compiled(StructuredOutputs(json={"type": "object"})).constraint(1) for _ in range(2)
    )
    before, draft, output = (tokenizer(text)["input_ids"] for text in ('{"x":', ' ["', '{"x": {"'))
    asked.allowed([0, *before], [before[-1], *draft], range(-1, len(draft)))
    masks = [grammar.allowed([0, *output], [output[-1]], [-1])[0] for grammar in (asked, fresh)]
    assert (masks[0] == masks[1]).all()
