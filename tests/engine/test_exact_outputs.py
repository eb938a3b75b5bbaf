"""Exact structured output follows the target's distribution of whole outputs, given that they are valid: by enumeration, and by frequency."""

import numpy as np
import pytest

from polydraft import Engine, SamplingParams, StructuredOutputs
from polydraft.core import DraftSampling, TokenTree, TreeShape
from polydraft.engine.exact_outputs import MOST_PREFIXES, completed, log_probs_of
from polydraft.engine.structured import Grammars
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.sampling import processing as sampling
from polydraft.testing import Tables, enumerate_drafts, measure
from tests.engine.tables import TableModel
from tests.engine.test_structured import END, FORM, PROMPT, engine, next_tokens, outputs, p_value, tokenizer
from tests.exactness.harness import by_depth

EXACT = StructuredOutputs(regex=FORM.regex, exact=True)
PLAIN = SamplingParams()


def rows_of(target, prompt, path, params):
    """The target's own distribution behind a path, by the sampling parameters alone."""
    text = [*prompt, *path]
    tree = TokenTree.roots(np.array(text[-1:]))
    logits = target.logits[text[-2], text[-1]][None, None]
    return sampling.distributions(logits, tree, [text], [len(prompt)], [params], [END])[0, 0]


def conditional(target, params=PLAIN, prompt=PROMPT):
    """Probability of every output, given that it is one of these: products of the target's rows, divided by their sum."""
    chances = {
        ids: np.prod([rows_of(target, prompt, ids[:i], params)[t] for i, t in enumerate(ids)])
        for ids in outputs()
    }
    total = sum(chances.values())
    return {ids: chance / total for ids, chance in chances.items()}


def weighed(target, params=PLAIN, form=EXACT):
    """The constraint that ships, weighed by a target."""
    source = Grammars(tokenizer(), 7, [END]).grammar(form).exact
    output = source.constraint(len(PROMPT))
    target.prefill([0], [PROMPT[:-1]])
    output.log_completed = completed(source.prefixes, log_probs_of(source, target, 0, PROMPT, params))
    target.release([0])
    return output


def written(target, params):
    """Probability of every output by the rows that the engine samples from."""
    return {
        ids: np.prod([rows_of(target, PROMPT, ids[:i], params)[t] for i, t in enumerate(ids)])
        for ids in outputs()
    }


def distance(seen, wanted):
    assert set(seen) <= set(wanted)
    return sum(abs(seen.get(ids, 0) - chance) for ids, chance in wanted.items()) / 2


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.3, "logit_bias": {0: 1.5, 4: -2.0}},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_multiply_to_the_conditional_distribution(seed, options):
    target = TableModel(7, seed)
    params = SamplingParams(**options)
    exact = params.with_(structured_outputs=weighed(target, params))
    assert distance(written(target, exact), conditional(target, params)) < 1e-12


def test_masks_alone_are_another_distribution():
    target = TableModel(7, 2)
    local = Grammars(tokenizer(), 7, [END]).compiled(FORM).constraint(len(PROMPT))
    masked = SamplingParams(structured_outputs=local)
    assert distance(written(target, masked), conditional(target)) > 0.05


def test_weights_of_another_temperature_are_found():
    target = TableModel(7, 2)
    params = SamplingParams(temperature=0.6)
    wrong = params.with_(structured_outputs=weighed(target))
    assert distance(written(target, wrong), conditional(target, params)) > 0.01


class Weighed(Tables):
    """The harness's tables, with the shipped constraint on p, and on q where it is drawn so."""

    def __init__(self, seed, *, weighs_drafts):
        super().__init__(7, seed)
        self.model = TableModel(7, seed)
        self.small = TableModel(7, seed + 1)
        self.params = SamplingParams(structured_outputs=weighed(self.model))
        self.weighs_drafts = weighs_drafts

    def _row(self, name, path):
        fits = all(t in next_tokens(path[:i]) for i, t in enumerate(path))
        weighs = fits and (name == "p" or self.weighs_drafts)
        model = self.model if name == "p" else self.small
        return rows_of(model, PROMPT, path, self.params if weighs else SamplingParams())


RULES = [
    ("block", "IID", "CHAIN"),
    ("speculative", "IID", "CHAIN"),
    ("greedy_traversal", "IID", "PATHS"),
    ("traversal", "WITHOUT_REPLACEMENT", "PATHS"),
    ("flow", "SYSTEMATIC", "PATHS"),
    ("match", "POINT_MASS", "PATHS"),
]


@pytest.mark.parametrize("weighs_drafts", [True, False])
@pytest.mark.parametrize(("rule", "drawn", "shape"), RULES)
def test_every_draft_enumerated_gives_the_conditional_distribution(rule, drawn, shape, weighs_drafts):
    tables = Weighed(4, weighs_drafts=weighs_drafts)
    counts = by_depth(*([1, 1] if shape == "CHAIN" else [2, 1]))
    drafts = enumerate_drafts(tables, DraftSampling[drawn], counts, 2)
    shapes = DraftSampling[drawn], TreeShape[shape]
    measured = measure(registry.verifier(rule), tables, *shapes, counts, 2, drafts)
    assert measured.tv < 1e-9


@pytest.mark.parametrize("kind", ["paths", "coupled", "top_k"])
def test_what_an_engine_writes_with_drafts_has_the_conditional_distribution(kind):
    made = engine(kind)
    assert p_value(made, form=EXACT, wanted=conditional(made.target)) > 1e-3
    assert p_value(made, form=FORM, wanted=conditional(made.target)) < 1e-9


def test_an_output_that_a_mask_writes_half_of_the_time_is_as_rare_as_the_model_has_it():
    target = TableModel(7, 0)
    target.logits[:] = np.log(1e-9)
    target.logits[5, 5, [0, 1]] = 0.0
    target.logits[5, 0, 3] = 0.0
    target.logits[5, 1, [3, 4]] = np.log([0.01, 0.99])  # "b" goes on with "aa", which no output does
    target.logits[[0, 1], 3, END] = 0.0
    choice = StructuredOutputs(choice=["ac", "bc"], exact=True)
    params = SamplingParams(structured_outputs=weighed(target, form=choice))
    assert rows_of(target, PROMPT, (), PLAIN)[1] == pytest.approx(0.5)
    assert rows_of(target, PROMPT, (), params)[1] == pytest.approx(0.01 / 1.01)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "[abc]{20}"}, f"more prefixes; expected at most {MOST_PREFIXES}"),
        ({"regex": "c*"}, "a longer output; expected at most 64 tokens"),
    ],
)
def test_a_form_of_too_many_outputs_is_refused_before_anything_runs(form, said):
    made = engine()
    with pytest.raises(InvalidInputError, match=said):
        made.generate([PROMPT], SamplingParams(structured_outputs=StructuredOutputs(**form, exact=True)))
    assert made.target.passes == 0


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_what_changes_a_distribution_token_by_token_is_refused_beside_exact(options):
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        SamplingParams(structured_outputs=EXACT, **options)


def test_outputs_that_the_model_cannot_write_end_with_an_error_and_harm_nobody():
    made = engine()
    bans: dict[int, float] = dict.fromkeys((0, 1, 2), -np.inf)
    params = [SamplingParams(seed=1, max_tokens=9), SamplingParams(structured_outputs=EXACT, logit_bias=bans)]
    free, banned = made.generate([PROMPT, PROMPT], params)
    assert free.finish_reason != "error"
    assert banned.finish_reason == "error" and "possible" in str(banned.samples[0].error)


def test_the_embedded_model_writes_choices_as_often_as_it_would_by_itself():
    made = Engine.embedded(device="cpu", depth=3, num_paths=2)
    texts = ["return x", "pass", "yield"]
    form = StructuredOutputs(choice=texts, exact=True)
    params = SamplingParams(n=8, seed=1, structured_outputs=form)
    samples = made.generate("def f(x):\n    ", params)[0].samples
    assert {s.finish_reason for s in samples} == {"stop"} and {s.text for s in samples} <= set(texts)
    with pytest.raises(InvalidInputError, match="more prefixes"):
        made.generate("x", SamplingParams(structured_outputs=StructuredOutputs(json_object=True, exact=True)))
