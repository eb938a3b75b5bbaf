"""A form begins behind the thoughts of a model, at every node of a tree by its own path, with drafts and without."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polydraft import Engine, SamplingParams, StructuredOutputs
from polydraft.core.thinking import Thinking
from polydraft.engine.structured import Grammars
from polydraft.engine.thoughts import BehindThoughts
from tests.engine.tables import TableModel

WORDS = ["a", "b", "]", "]]", "]a", "[", "\n", "<end>"]
END = len(WORDS) - 1
FORM = StructuredOutputs(regex="a|ba?")
FORM_TEXTS = ("a", "b", "ba")
OPENED = Thinking("[", "]]", opened=True)
OFFERED = Thinking("[", "]]", offered=True)
PROMPT = [0, 1]
LENGTH = 4


@cache
def tokenizer():
    vocabulary = {"Ċ" if word == "\n" else word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("]", "]"), ("]", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(["["])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def may_follow(path, thinking):
    """By the text alone: thoughts end by their mark, of the answer no token has a part with it, and the form has to come."""
    text = "".join(WORDS[token] for token in path)
    if END in path:
        return {END}
    thinks = thinking.opened or text.startswith("[")
    if thinks and "]]" not in text:
        return {t for t in range(END) if not (text + WORDS[t]).partition("]]")[2].strip()}
    answer = text.partition("]]")[2] if thinks else text
    said = answer.lstrip("\n") if thinks else answer
    allowed = {t for t in range(END) if any(form.startswith(said + WORDS[t]) for form in FORM_TEXTS)}
    allowed |= {END} if said in FORM_TEXTS else set()
    allowed |= {WORDS.index("\n")} if thinks and not said and len(answer) < 4 else set()
    return allowed | ({WORDS.index("[")} if not text and not thinking.opened else set())


@cache
def constraint(thinking):
    grammars = Grammars(tokenizer(), len(WORDS), [END])
    return BehindThoughts(grammars.compiled(FORM), thinking, tokenizer(), len(WORDS), [END]).constraint(
        len(PROMPT)
    )


def drawn(rng, thinking, path):
    """One that may follow, the mark's sooner."""
    allowed = sorted(may_follow(path, thinking))
    return int(rng.choice([t for t in allowed if "]" in WORDS[t] or WORDS[t] == "["] * 4 + allowed))


@pytest.mark.parametrize("thinking", [OPENED, OFFERED], ids=["opened", "offered"])
def test_what_may_follow_a_node_is_decided_by_its_own_path(thinking):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        output = []
        for _ in range(int(rng.integers(8))):
            output.append(drawn(rng, thinking, output))
        paths = [()]
        parents = [-1]
        for _ in range(12):
            parents.append(int(rng.integers(len(paths))))
            above = paths[parents[-1]]
            paths.append((*above, drawn(rng, thinking, [*output, *above])))
        tokens = [(output or PROMPT)[-1], *(path[-1] for path in paths[1:])]
        rows = constraint(thinking).allowed([*PROMPT, *output], tokens, parents)
        assert [set(np.flatnonzero(row)) for row in rows] == [
            may_follow([*output, *path], thinking) for path in paths
        ], seed


def distribution(target, thinking):
    """Probability of every output of LENGTH tokens, or of one that ends before: products of the table's rows over what may follow."""
    chances = {}
    open_ = [((), 1.0)]
    while open_:
        path, chance = open_.pop()
        if len(path) == LENGTH or END in path:
            chances[path] = chance
            continue
        above = [*PROMPT, *path]
        row = np.exp(target.logits[above[-2], above[-1]].astype(np.float64))
        allowed = sorted(may_follow(path, thinking))
        open_ += [((*path, t), chance * float(row[t] / row[allowed].sum())) for t in allowed]
    return chances


def engine(**options):
    target, small = (
        TableModel(len(WORDS), seed, sharp, max_num_seqs=64, dtype=np.float32)
        for seed, sharp in ((0, 1.5), (1, 1.0))
    )
    drafts = {"draft_model": small, "drafter": "model:paths", "depth": 3, "num_paths": 2}
    return Engine.of(target, tokenizer=tokenizer(), eos_token_ids=[END], **{**drafts, **options})


@pytest.mark.parametrize(
    ("thinking", "drafter"), [(OPENED, "model:paths"), (OFFERED, "model:top_k")], ids=["opened", "offered"]
)
def test_sampled_outputs_have_the_distribution_over_what_may_follow(thinking, drafter):
    made = engine(drafter=drafter)
    samples = 384
    params = SamplingParams(n=samples, seed=5, max_tokens=LENGTH, structured_outputs=FORM, thinking=thinking)
    seen = Counter(tuple(s.token_ids) for s in made.generate([PROMPT], params)[0].samples)
    expected = distribution(made.target, thinking)
    assert sum(expected.values()) == pytest.approx(1) and set(seen) <= set(expected)
    big = [path for path, chance in expected.items() if chance * samples >= 5]
    observed, wanted = np.array(
        [[seen[path], samples * expected[path]] for path in big]
        + [[samples - sum(seen[path] for path in big), samples * (1 - sum(expected[path] for path in big))]]
    ).T
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("thinking", [OPENED, OFFERED], ids=["opened", "offered"])
def test_greedy_outputs_are_the_same_with_drafts_and_without(thinking):
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=FORM, thinking=thinking)
    prompts = [[x, y] for x in range(END) for y in range(END)]
    drafted, listed, plain = (
        [r.token_ids for r in engine(**options).generate(prompts, params)]
        for options in ({}, {"drafter": "model:top_k"}, {"drafter": None})
    )
    assert drafted == listed == plain and any("]]" in "".join(WORDS[t] for t in ids) for ids in plain)


class Anything:
    """A `ConstraintSource` and its `Constraint`: every token may follow."""

    def constraint(self, prompt_length):
        return self

    def allowed(self, context, tokens, parents):
        return np.ones((len(tokens), len(WORDS)), np.bool_)


def test_a_form_that_may_be_anything_at_first_leaves_the_thoughts_as_they_are():
    free = BehindThoughts(Anything(), OPENED, tokenizer(), len(WORDS), [END]).constraint(len(PROMPT))
    assert free.allowed([*PROMPT, WORDS.index("]")], [WORDS.index("]")], [-1]).all()
