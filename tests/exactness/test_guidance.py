"""The guided distribution: kept with drafts, by enumeration; scored in one pass; its limits, its fakes, its two slots."""

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.core.arrays import scatter
from polydraft.decoding.guidance import Guidance
from polydraft.errors import CapacityError, InvalidInputError
from polydraft.sampling.softmax import softmax
from tests.engine.tables import TableModel
from tests.exactness.table_pairs import emitted_probs

PROMPT = [1, 2]
BARE = [0, 1]
SCALE = 2.5


def guided(target, scale=SCALE, length=3):
    """Probability of every text, from the tables: two tokens depend on how the second sequence begins."""
    found = np.ones((), np.float32)
    for n in range(length):
        rows = list[np.ndarray]()
        for path in np.ndindex(*(3,) * n):
            c, u = (target.logits[text[-2], text[-1]] for text in ([*PROMPT, *path], [*BARE, *path]))
            rows.append(softmax(u + scale * (c - u)))
        found = found[..., None] * np.stack(rows).reshape(*(3,) * (n + 1))
    return found


@pytest.fixture
def pair():
    target = TableModel(3, 0)
    small = TableModel(3, 1, 1.0)
    small.logits = 0.6 * target.logits + 0.4 * small.logits
    return target, small


@pytest.mark.parametrize(
    ("kind", "verifier", "size"),
    [
        ("chain", "speculative", (2, 1)),
        ("chain", "block", (2, 1)),
        ("paths", "greedy_traversal", (1, 2)),
        ("without_replacement", "greedy_traversal_wor", (1, 2)),
        ("top_k", "match", (2, 2)),
        (None, "auto", (None, None)),
    ],
)
def test_what_an_engine_emits_follows_the_guided_distribution(kind, verifier, size, pair, monkeypatch):
    target, small = pair
    parts = {
        "draft_model": small,
        "drafter": kind and f"model:{kind}",
        "verifier": verifier,
        "depth": size[0],
        "num_paths": size[1],
    }
    engine = Engine.of(target, decoding=Guidance(BARE, SCALE), **parts)
    assert np.abs(emitted_probs(engine, PROMPT, 3, monkeypatch) - guided(target)).max() < 1e-12
    assert target.lengths == [0] * 4


class OfTheFirstPrompt(Guidance):
    """Wrong: the second sequence begins as the first one does, which guides nothing."""

    def second_prompt(self, request):
        return request.prompt_token_ids


class OfProbabilities(Guidance):
    """Wrong: distributions are moved apart, not logits."""

    def __call__(self, scores, tree, contexts, second=None):
        c = softmax(scores.logits)
        u = softmax(second.logits)
        return np.log((u + self.scale * (c - u)).clip(min=1e-9))


class BonusUnguided(Guidance):
    """Wrong: leaves follow the target alone."""

    def __call__(self, scores, tree, contexts, second=None):
        found = super().__call__(scores, tree, contexts, second)
        inner = scatter(np.zeros(found.shape[:2], np.bool_), tree.parents.clip(min=0), True)
        return np.where(inner[..., None], found, scores.logits)


@pytest.mark.parametrize("fake", [None, OfTheFirstPrompt, OfProbabilities, BonusUnguided])
def test_distributions_that_are_guided_by_name_only_are_noticed(fake, pair, monkeypatch):
    target, small = pair
    distribution = (fake or Guidance)(BARE, SCALE)
    engine = Engine.of(
        target, draft_model=small, drafter="model:chain", verifier="block", depth=1, decoding=distribution
    )
    tv = np.abs(emitted_probs(engine, PROMPT, 2, monkeypatch) - guided(target, length=2)).sum() / 2
    assert (tv < 1e-12) if fake is None else tv > 0.01


def test_scale_1_is_the_target_and_0_the_unconditional_distribution(pair, monkeypatch):
    target, _ = pair
    for scale, prompt in ((1.0, PROMPT), (0.0, BARE)):
        found = emitted_probs(
            Engine.of(target, drafter=None, decoding=Guidance(BARE, scale)), PROMPT, 2, monkeypatch
        )
        alone = emitted_probs(Engine.of(target, drafter=None), prompt, 2, monkeypatch)
        assert np.abs(found - alone).max() < 1e-12


def test_both_sequences_are_scored_in_one_pass(pair):
    target, small = pair
    engine = Engine.of(
        target, draft_model=small, drafter="model:chain", depth=2, decoding=Guidance(BARE, SCALE)
    )
    target.passes = 0
    stats = engine.generate([PROMPT], SamplingParams(seed=1, max_tokens=20))[0].stats
    assert stats.accepted_tokens > 0 and target.passes == stats.steps


def test_by_name_each_request_has_two_slots():
    engine = Engine.embedded(decoding="guidance", max_num_seqs=1, draft_model=None, drafter="ngram")
    assert (engine.target.max_num_seqs, engine.summary()["max_num_seqs"]) == (2, 1)
    (result,) = engine.generate("import os\n", SamplingParams(seed=1, max_tokens=4))
    assert (
        result.lossless_to == "the guided distribution of the target's two prompts"
        and len(result.token_ids) == 4
    )


def test_what_cannot_be_guided_is_refused(pair):
    target, _ = pair
    for options, said in (
        ({"scale": float("inf")}, "scale=inf"),
        ({"negative": "x"}, "without a tokenizer"),
        ({"k": 1}, "no such option"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            Engine.of(target, drafter=None, decoding="guidance", decoding_options=options)
    with pytest.raises(InvalidInputError, match="at least one token"):
        Guidance([])
    with pytest.raises(CapacityError, match="two slots"):
        Engine.of(TableModel(max_num_seqs=1), drafter=None, decoding="guidance")
