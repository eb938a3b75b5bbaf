"""Calls in every format with drafts in trees: the masks are those of the texts, the distribution is the target's, and greedy texts are those without drafts."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from scipy.stats import chisquare

from polydraft import Engine, SamplingParams
from polydraft.core import DraftSampling, TreeShape
from polydraft.engine.structured import Grammars
from polydraft.methods import registry
from polydraft.testing import Tables, enumerate_drafts, measure, target_text_probs
from tests.exactness.harness import by_depth
from tests.server.constraints import calls_of
from tests.server.test_tools import ADD, NOW
from tests.server.tiny_formats import FORMATS, PROMPT, VALUES, TinyFormat, tool

QUICK = ("hermes", "kimi_k3", "lfm2", "minimax_m3", "keyed")
"""One of each coding; the other formats are slow tests."""
IN_EVERY_FORMAT = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMATS]
)
RULES = [
    ("block", "IID", "CHAIN"),
    ("greedy_traversal", "IID", "PATHS"),
    ("traversal", "WITHOUT_REPLACEMENT", "PATHS"),
    ("match", "POINT_MASS", "PATHS"),
]


@cache
def tiny(name):
    return TinyFormat(FORMATS[name])


def places(form):
    """Where drafts are enumerated: before a name, and before a value of "a"."""
    return {"name": form.before, "value": [*form.before, *form.ids("a"), *form.behind["a"]]}


class Constrained(Tables):
    """Random rows with the mask of an answer's calls on p, and on q where it is drawn so. written: tokens of the answer before the drafts."""

    def __init__(self, form, written, *, masked=True, source=None):
        super().__init__(len(form.words), 4)
        self.form = form
        self.written = written
        self.masked = masked
        self.calls = (source or form.source()).constraint(len(PROMPT))

    def _row(self, which, path):
        row = super()._row(which, path) + 0.01
        text = [*self.written, *path]
        if (which == "p" or self.masked) and self.form.fits(text):
            context = [*PROMPT, *text]
            row = row * self.calls.allowed(context, context[-1:], [-1])[0]
        return row / row.sum()


@pytest.mark.parametrize("name", FORMATS)
def test_every_node_of_every_small_tree_allows_what_its_texts_do(name):
    form = tiny(name)
    for written in places(form).values():
        calls = form.source().constraint(len(PROMPT))
        context = [*PROMPT, *written]
        tables = Constrained(form, written)
        for draft in enumerate_drafts(tables, DraftSampling.WITHOUT_REPLACEMENT, by_depth(2, 2), 2):
            rows = calls.allowed(context, [context[-1], *draft.tokens[1:]], draft.parents)
            for row, path in zip(rows, draft.paths, strict=True):
                assert set(np.flatnonzero(row)) == form.may_follow([*written, *path]), (written, path)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("rule", "drawn", "shape"), RULES)
@IN_EVERY_FORMAT
def test_every_draft_enumerated_gives_the_distribution_of_the_calls(name, rule, drawn, shape, masked):
    form = tiny(name)
    first = 1 if shape == "CHAIN" else 2
    depth = 2 if masked else 1
    counts = by_depth(*[first, 1][:depth])
    for written in places(form).values():
        tables = Constrained(form, written, masked=masked)
        drafts = enumerate_drafts(tables, DraftSampling[drawn], counts, depth)
        verifier = registry.verifier(rule)
        found = measure(verifier, tables, DraftSampling[drawn], TreeShape[shape], counts, depth, drafts)
        assert found.tv < 1e-9, written


@IN_EVERY_FORMAT
def test_a_mask_that_does_not_know_which_tool_is_called_is_found(name):
    """The wrong variant: both tools take what either does."""
    form = tiny(name)
    wide = {**tool("a")["parameters"], "properties": {"x": {"type": "integer", "enum": [1, 2, 3]}}}
    source = form.source([{"name": name, "parameters": wide} for name in VALUES])
    written = places(form)["value"]
    right, wrong = Constrained(form, written), Constrained(form, written, source=source)
    iid = DraftSampling.IID
    drafts = enumerate_drafts(wrong, iid, by_depth(1), 1)
    found = measure(registry.verifier("block"), wrong, iid, TreeShape.CHAIN, by_depth(1), 1, drafts)
    assert found.tv < 1e-9
    assert np.abs(found.probs - target_text_probs(right, 2)).sum() > 0.01


@IN_EVERY_FORMAT
def test_to_prune_a_sampled_token_of_another_tool_is_found(name):
    form = tiny(name)
    written = places(form)["value"]
    tables = Constrained(form, written, masked=False)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(1), 1)
    for draft in drafts:
        if not form.fits([*written, *draft.paths[1]]):
            draft.tokens = draft.tokens[:1]
            draft.parents = draft.parents[:1]
            draft.paths = draft.paths[:1]
    block = registry.verifier("block")
    found = measure(block, tables, DraftSampling.IID, TreeShape.CHAIN, by_depth(1), 1, drafts)
    assert found.tv > 1e-3


@pytest.mark.parametrize("name", ["hermes", "minimax_m3"])
def test_sampled_calls_have_the_distribution_over_what_may_be_written(name):
    form = tiny(name)
    samples = 192
    made = form.engine()
    params = SamplingParams(n=samples, seed=3, max_tokens=24, structured_outputs=form.source())
    drawn = made.generate([PROMPT], params)[0].samples
    seen = Counter(tuple(sample.token_ids) for sample in drawn)
    expected = form.distribution(made.target)
    assert sum(expected.values()) == pytest.approx(1) and set(seen) <= set(expected)
    big = [path for path, chance in expected.items() if chance * samples >= 5]
    rest = samples - sum(seen[path] for path in big)
    few = samples * (1 - sum(expected[path] for path in big))
    observed = np.array([*(seen[path] for path in big), rest])
    wanted = np.array([*(samples * expected[path] for path in big), few])
    there = wanted > 1e-6
    observed = observed[there]
    assert len(observed) > 1
    assert chisquare(observed, wanted[there] * observed.sum() / wanted[there].sum()).pvalue > 1e-3


@IN_EVERY_FORMAT
def test_greedy_calls_are_the_same_with_drafts_in_trees_and_without(name):
    form = tiny(name)
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs=form.source())
    prompts = [[0, 0], [1, 2]]
    seen = set()
    for seed in range(6):
        drafted, listed, plain = (
            [tuple(result.token_ids) for result in form.engine(seed, **options).generate(prompts, params)]
            for options in ({}, {"drafter": "model:top_k"}, {"drafter": None})
        )
        assert drafted == listed == plain, seed
        seen |= {*plain}
    assert len(seen) > 1


@cache
def embedded(drafter):
    """The pair that comes with the package, with two paths of drafts."""
    made = Engine.embedded(device="cpu", drafter=drafter, depth=3, num_paths=2, max_num_seqs=8)
    return made, Grammars(made.tokenizer, made.target.vocab_size, made.eos_token_ids)


@pytest.mark.parametrize("required", [True, False])
@IN_EVERY_FORMAT
def test_a_model_with_drafts_writes_the_calls_that_it_writes_without(name, required):
    form = FORMATS[name]
    (drafted, grammars), (plain, _) = embedded("model:paths"), embedded(None)
    source = calls_of(drafted.tokenizer, grammars, [ADD, NOW], required=required, calls=form)
    head = form.opening + form.call_head("add", "call00001", 0)
    prompts = [f"# {question}\n{'' if required else head[:-1]}" for question in ("Add 3 and 4.", "What now?")]
    for seed in range(2):
        params = SamplingParams(temperature=0, seed=seed, max_tokens=40, structured_outputs=source)
        texts = [[result.token_ids for result in made.generate(prompts, params)] for made in (drafted, plain)]
        assert texts[0] == texts[1]
