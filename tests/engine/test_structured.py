"""Outputs follow a grammar and the target's distribution over what it allows: by enumeration, by frequency, and by parsing what was sampled."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache, reduce

import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polydraft import Engine, SamplingParams, StructuredOutputs
from polydraft.core import DraftSampling, TreeShape
from polydraft.drafters.model.kinds import KINDS
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine import drafting, structured
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.testing import Tables, enumerate_drafts, measure
from tests.engine.tables import TableModel
from tests.exactness.harness import by_depth

WORDS = ["a", "b", "ab", "c", "aa", "", "<end>"]
END = len(WORDS) - 1
FORM = StructuredOutputs(regex="(a|b|ab)(c|aa)?")
TEXTS = frozenset(x + y for x in ("a", "b", "ab") for y in ("", "c", "aa"))
SHARED = StructuredOutputs(grammar='start: "b" X "b" | "c" X "a"\nX: /a|c/')
"""Behind "b" and behind "c" the lexer is in one state, and other tokens may follow."""
SHARED_TEXTS = frozenset({"bab", "bcb", "caa", "cca"})
PROMPT = [5, 5]


def tokenizer(end: str | None = "<end>") -> PreTrainedTokenizerFast:
    vocab = {word or "Z": i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("a", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


@cache
def outputs(texts=TEXTS) -> list[tuple[int, ...]]:
    """All token sequences that spell one of the texts, each with the end behind it, found by trying every token."""
    found = list[tuple[int, ...]]()
    open_ = [()]
    while open_:
        ids = open_.pop()
        text = "".join(WORDS[t] for t in ids)
        found += [(*ids, END)] if text in texts else []
        open_ += [(*ids, t) for t in range(5) if any(whole.startswith(text + WORDS[t]) for whole in texts)]
    return found


def next_tokens(path, texts=TEXTS) -> set[int]:
    """What may follow, by those outputs alone; behind the end, the end."""
    if END in path:
        return {END}
    return {o[len(path)] for o in outputs(texts) if o[: len(path)] == tuple(path) and len(o) > len(path)}


def distribution(target: TableModel, texts=TEXTS) -> dict[tuple[int, ...], float]:
    """Probability of every output: the product of the table's rows over what may follow."""
    chances = {}
    for ids in outputs(texts):
        text = [*PROMPT]
        chance = 1.0
        for i, token in enumerate(ids):
            row = np.exp(target.logits[text[-2], text[-1]].astype(np.float64))
            chance *= float(row[token] / row[sorted(next_tokens(ids[:i], texts))].sum())
            text.append(token)
        chances[ids] = chance
    return chances


def engine(kind="paths", **options):
    target = TableModel(7, max_num_seqs=64, dtype=np.float32)
    small = TableModel(7, 1, 1.0, max_num_seqs=64, dtype=np.float32)
    return Engine.of(
        target,
        tokenizer=tokenizer(),
        eos_token_ids=[END],
        draft_model=small,
        **{"drafter": f"model:{kind}", "depth": 3, "num_paths": 2, **options},
    )


def test_a_node_allows_what_its_own_path_does():
    grammar = structured.Grammars(tokenizer(), 7, [END]).compiled(FORM).constraint(2)
    tokens = [5, 0, 3, 1, 6, 4, 6]
    parents = [-1, 0, 1, 1, 2, 3, 4]
    rows = [set(np.flatnonzero(row)) for row in grammar.allowed(PROMPT, tokens, parents)]
    assert rows[:3] == [next_tokens(()), next_tokens((0,)), next_tokens((0, 3))]
    assert rows[3] == next_tokens((0, 1)) == next_tokens((2,)) and rows[4] == rows[6] == {END}
    assert rows[5] == next_tokens((0, 1, 4)) == {END}
    assert set(np.flatnonzero(grammar.allowed([*PROMPT, 2], [2], [-1])[0])) == next_tokens((2,))
    assert set(np.flatnonzero(grammar.allowed(PROMPT, [5], [-1])[0])) == next_tokens(())


class Constrained(Tables):
    """The harness's tables, with the grammar's mask on p, and on q where it is drawn so."""

    def __init__(self, seed, masked):
        super().__init__(7, seed)
        self.masked = masked
        self.grammar = structured.Grammars(tokenizer(), 7, [END]).compiled(FORM).constraint(2)

    def _row(self, which, path):
        row = super()._row(which, path) + 0.01
        fits = all(t in next_tokens(path[:i]) for i, t in enumerate(path))
        if fits and (which == "p" or self.masked):
            row = row * self.grammar.allowed([*PROMPT, *path], [0], [-1])[0]
        return row / row.sum()


RULES = [
    ("block", "IID", "CHAIN"),
    ("greedy_traversal", "IID", "PATHS"),
    ("traversal", "WITHOUT_REPLACEMENT", "PATHS"),
    ("match", "POINT_MASS", "PATHS"),
]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("rule", "drawn", "shape"), RULES)
def test_every_draft_enumerated_gives_the_masked_distribution(rule, drawn, shape, masked):
    tables = Constrained(4, masked)
    counts = by_depth(*([1, 1] if shape == "CHAIN" else [2, 1]))
    drafts = enumerate_drafts(tables, DraftSampling[drawn], counts, 2)
    assert (
        measure(registry.verifier(rule), tables, DraftSampling[drawn], TreeShape[shape], counts, 2, drafts).tv
        < 1e-9
    )


def test_to_prune_a_sampled_token_that_does_not_fit_is_found():
    tables = Constrained(4, False)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(1), 1)
    for d in drafts:
        if d.tokens[1] not in next_tokens(()):
            d.tokens = d.tokens[:1]
            d.parents = d.parents[:1]
            d.paths = d.paths[:1]
    assert (
        measure(
            registry.verifier("block"), tables, DraftSampling.IID, TreeShape.CHAIN, by_depth(1), 1, drafts
        ).tv
        > 0.01
    )


CHAINS = [
    (name, drawn)
    for drawn in ("IID", "WITHOUT_REPLACEMENT", "GREEDY_PLUS_ONE", "COUPLED", "SYSTEMATIC")
    for name in registry.names("verifier")
    if (info := registry.verifier(name).info).lossless
    and DraftSampling[drawn] in info.draft_sampling
    and TreeShape.CHAIN in info.shapes
]


def ends(d, n):
    """Chains that end behind some tokens."""
    return int(n == 0 or d.tokens[n] in (1, 2))


@pytest.mark.parametrize(
    ("rule", "drawn"), [case for case in CHAINS if not registry.verifier(case[0]).info.shared_noise]
)
def test_chains_that_end_by_their_own_path_keep_the_distribution(rule, drawn):
    for seed in (0, 4):
        assert (
            measure(
                registry.verifier(rule), Tables(3, seed), DraftSampling[drawn], TreeShape.CHAIN, ends, 3
            ).tv
            < 1e-9
        )


class Unmasked(ModelDrafter):
    """Draws from distributions that know nothing of the form."""

    def start(self, requests):
        return super().start([replace(r, params=r.params.with_(structured_outputs=None)) for r in requests])


def p_value(made, samples=512, form=FORM, texts=TEXTS, wanted=None) -> float:
    """wanted: the distribution, where it is not the one that is masked at each token."""
    given = [
        s
        for i in range(samples // 256)
        for s in made.generate(
            [PROMPT], SamplingParams(n=256, seed=i, max_tokens=9, structured_outputs=form)
        )[0].samples
    ]
    assert all(s.finish_reason == "stop" for s in given)
    seen = Counter(tuple(s.token_ids) for s in given)
    expected = wanted or distribution(made.target, texts)
    assert sum(expected.values()) == pytest.approx(1) and set(seen) <= set(expected)
    big = [ids for ids, chance in expected.items() if chance * samples >= 5]
    rest = samples - sum(seen[ids] for ids in big), samples * (1 - sum(expected[ids] for ids in big))
    pairs = [(seen[ids], samples * expected[ids]) for ids in big] + ([rest] if rest[1] > 1 else [])
    observed, wanted = np.array(pairs).T
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("kind", ["paths", "coupled", "top_k"])
def test_what_an_engine_writes_has_the_distribution_over_several_rounds(kind):
    assert p_value(engine(kind)) > 1e-3


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
def test_branches_with_a_shared_terminal_keep_the_distribution_and_greedy_texts():
    assert p_value(engine(), form=SHARED, texts=SHARED_TEXTS) > 1e-3
    params = SamplingParams(temperature=0, max_tokens=9, structured_outputs=SHARED)
    prompts = [[x, y] for x in range(5) for y in range(5)]
    drafted, plain = (
        [r.text for r in made.generate(prompts, params)] for made in (engine(), engine(drafter=None))
    )
    assert drafted == plain


def test_drafts_that_know_nothing_of_the_form_keep_the_distribution():
    assert p_value(engine(drafter=Unmasked(engine().drafter.model), depth=2)) > 1e-3


@pytest.mark.filterwarnings("error::polydraft.errors.DrafterWarning")
@pytest.mark.parametrize(
    ("kind", "num_paths"), [*((kind, 2) for kind in KINDS if kind != "chain"), ("coupled", 1), ("listed", 1)]
)
def test_a_draft_model_of_some_tokens_drafts_what_it_may_and_nothing_where_it_may_not(kind, num_paths):
    made = engine(kind, num_paths=num_paths)
    made.drafter.model.logits[
        ..., [1, 3, END]
    ] = -np.inf  # "a", "ab" and "aa" are left, so that behind "aa" there is nothing
    sizes = []
    propose = made.drafter.propose
    made.drafter.propose = lambda *given: (
        sizes.append((draft := propose(*given)).tree.is_node.sum(1) - 1) or draft
    )
    assert p_value(made, 256) > 1e-3
    drafted = np.concatenate(sizes)
    assert (drafted == 0).any() and (drafted > 0).any()


def test_a_draft_model_without_any_allowed_token_drafts_nothing():
    made = engine()
    made.drafter.model.logits[..., [3, END]] = -np.inf
    bans = dict.fromkeys((0, 1, 2, 4, 5), -math.inf)
    made.drafter.model.draft_ids = np.array([0, 1, 2, 4, 5])
    result = made.generate([PROMPT], SamplingParams(max_tokens=9, logit_bias=bans))[0]
    assert (
        set(result.token_ids) <= {3, END}
        and result.stats.drafted_tokens == 0
        and result.stats.drafter_error is None
    )


def test_what_hangs_on_a_token_that_does_not_fit_is_pruned_from_drafts_of_text():
    made = engine("top_k")
    tried = []
    check = drafting.inputs.check_draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            drafting.inputs,
            "check_draft",
            lambda draft, *more: (tried.append(draft.tree), check(draft, *more)),
        )
        made.generate([PROMPT], SamplingParams(seed=1, max_tokens=9, structured_outputs=FORM))
    first = tried[0]
    tokens = first.tokens[0].tolist()
    parents = first.parents[0].tolist()
    for n in range(1, len(tokens)):
        path = []
        at = n
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        assert parents[n] < 0 or all(t in next_tokens(path[:i]) for i, t in enumerate(path))
    assert sum(parent >= 0 for parent in parents) > 2


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["add", "sub", "multiply"]},
        "args": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 1,
            "maxItems": 3,
        },
        "note": {"type": "string", "maxLength": 8},
        "deep": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "args", "note", "deep"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    found = json.loads(text)
    numbers = found["args"]
    return (
        list(found) == ["name", "args", "note", "deep"]
        and found["name"] in ("add", "sub", "multiply")
        and 1 <= len(numbers) <= 3
        and all(type(n) is int and 0 <= n <= 999 for n in numbers)
        and len(found["note"]) <= 8
        and type(found["deep"]["on"]) is bool
    )


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_sampled_outputs_parse_and_fit_their_schema(drafter, count):
    made = Engine.embedded(device="cpu", drafter=drafter, depth=3, max_num_seqs=8)
    params = SamplingParams(
        n=count, seed=1, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    samples = made.generate("# the call, as JSON\n", params)[0].samples
    assert {s.finish_reason for s in samples} == {"stop"} and all(fits(s.text) for s in samples)
    assert len({s.text for s in samples}) > count / 2


def test_neighbours_of_an_output_with_a_form_are_as_they_are_alone():
    made = Engine.embedded(device="cpu", depth=3, num_paths=2, max_num_seqs=4)
    plain = SamplingParams(seed=3, max_tokens=20)
    bound = SamplingParams(
        seed=4, max_tokens=40, structured_outputs=StructuredOutputs(choice=["yes", "no way"])
    )
    alone = [made.generate("def f(", p)[0].token_ids for p in (plain, bound)]
    together = (
        made.generate(["def f("], plain)[0].token_ids,
        made.generate(["x", "def f("], [bound, plain.with_(seed=3)], first_index=0),
    )
    assert together[0] == alone[0] and together[1][0].text in ("yes", "no way")
    results = [made.submit("def f(", p, 0) for p in (plain, bound)]
    while made.has_unfinished_requests:
        made.step()
    assert [r.token_ids for r in results] == alone


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "("}, "regex"),
        ({"json": {"type": "thing"}}, "Invalid type"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "expected a schema"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "start: start"}, "no text fits it"),
        ({"json": {"$ref": "#"}}, "no text fits it"),
        (
            {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}},
            "maxItems: 100000; expected at most 10000",
        ),
        ({"json": reduce(lambda inner, _: {"anyOf": [inner]}, range(300), {})}, "nested 601 levels deep"),
        ({"regex": "(((a{100}){100}){100}){100}"}, "repeats 100000000 times"),
        ({"choice": [f"a{i}" for i in range(40_000)]}, "expected at most 131072"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_forms_that_cannot_be_followed_are_refused_in_one_line(form, said):
    with pytest.raises(InvalidInputError, match=said) as told:
        engine().generate([PROMPT], SamplingParams(structured_outputs=StructuredOutputs(**form)))
    line = str(told.value)
    assert "\n" not in line and "<" not in line and len(line) < 500


def test_a_choice_may_have_thousands_of_texts():
    made = Engine.embedded(device="cpu", drafter="ngram", depth=3, max_num_seqs=4)
    texts = [f"text number {i}" for i in range(5000)]
    params = SamplingParams(n=4, seed=1, structured_outputs=StructuredOutputs(choice=texts))
    assert {s.text for s in made.generate("x", params)[0].samples} <= set(texts)


def test_grammars_that_are_kept_are_bounded_in_bytes_and_those_used_last():
    grammars = structured.Grammars(tokenizer(), 7, [END])
    forms = [StructuredOutputs(choice=["a", "b" * 60_000 + "c" * i]) for i in range(12)]
    kept = [grammars.compiled(form) for form in forms]
    assert sum(g.num_bytes for g in kept) > structured.CACHED_BYTES
    assert grammars.compiled(forms[-1]) is kept[-1] and grammars.compiled(forms[-8]) is kept[-8]
    assert grammars.compiled(forms[0]) is not kept[0] and grammars.compiled(forms[-8]) is kept[-8]
    small = [StructuredOutputs(choice=["a" * (i + 1)]) for i in range(structured.CACHED_GRAMMARS + 1)]
    first = grammars.compiled(small[0])
    for form in small:
        grammars.compiled(form)
    assert grammars.compiled(small[0]) is not first


WIDE = StructuredOutputs(regex="([ab]{0,30}c){0,30}")
"""Each output needs states of its own."""


def walk(grammar, seed, length=60):
    text = list(PROMPT)
    while len(text) < length and END not in text:
        allowed = np.flatnonzero(grammar.allowed(text, [text[-1]], [-1])[0])
        text.append(
            int(
                np.random.default_rng([seed, len(text)]).choice(
                    allowed[allowed < 4] if (allowed < 4).any() else allowed
                )
            )
        )
    return text


def test_outputs_that_have_used_up_the_states_of_their_grammar_are_followed_with_new_ones(monkeypatch):
    free = structured.Grammars(tokenizer(), 7, [END]).compiled(WIDE)
    expected = [walk(free.constraint(2), seed) for seed in range(30)]
    monkeypatch.setitem(structured.LIMITS, "max_lexer_states", 300)
    source = structured.Grammars(tokenizer(), 7, [END]).compiled(WIDE)
    first = source.matcher
    assert [walk(source.constraint(2), seed) for seed in range(30)] == expected
    assert source.matcher is not first


@pytest.mark.filterwarnings(
    "ignore::polydraft.errors.RequestWarning", "ignore::polydraft.errors.DrafterWarning"
)
def test_an_output_beyond_what_can_be_followed_ends_alone_and_says_so(monkeypatch):
    monkeypatch.setitem(structured.LIMITS, "max_lexer_states", 40)
    wanted = SamplingParams(seed=1, max_tokens=60, structured_outputs=WIDE)
    short = SamplingParams(seed=1, max_tokens=8)
    alone = engine().generate([PROMPT], short, first_index=1)[0]
    wide, plain = engine().generate([PROMPT, PROMPT], [wanted, short])
    assert wide.finish_reason == "error" and wide.samples[0].refused and plain.token_ids == alone.token_ids
    assert "too many states" in wide.samples[0].error and "Make them simpler" in wide.samples[0].error


def test_a_form_needs_an_end_of_text_and_is_one():
    with pytest.raises(IncompatibleError, match="token that ends a text"):
        endless = Engine.of(TableModel(7), tokenizer=tokenizer(None), drafter=None)
        endless.generate([PROMPT], SamplingParams(structured_outputs=FORM))
    with pytest.raises(InvalidInputError, match="expected one of json"):
        StructuredOutputs(json={}, regex="a")
    with pytest.raises(InvalidInputError, match="min_tokens"):
        SamplingParams(min_tokens=2, structured_outputs=FORM)


def test_an_output_goes_on_with_its_end_where_that_is_ignored():
    found = (
        engine()
        .generate([PROMPT], SamplingParams(seed=1, max_tokens=8, ignore_eos=True, structured_outputs=FORM))[0]
        .token_ids
    )
    assert (
        len(found) == 8
        and set(found[found.index(END) :]) == {END}
        and tuple(found[: found.index(END) + 1]) in outputs()
    )
