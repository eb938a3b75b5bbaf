"""The contrastive distribution: kept by every lossless rule, by enumeration; its rows come from the draft pass; its traps and fakes."""

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.core import DraftSampling
from polydraft.core.arrays import scatter
from polydraft.decoding.contrastive import Contrastive, contrast
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.sampling.softmax import log_softmax, softmax
from polydraft.testing import Tables, measure
from tests.engine.tables import TableModel
from tests.exactness.harness import SHAPES
from tests.exactness.table_pairs import TwoTables, emitted_probs
from tests.exactness.test_lossless import PAIRS, RULES, words

EXPERT = np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float64)


class ContrastedTables:
    """The checker's rows: the expert's and the amateur's, the draft's, contrasted where the target's are asked for."""

    def __init__(self, V, seed, alpha=0.1, beta=0.5):
        self.V = V
        self.tables = Tables(V, seed)
        self.numbers = (alpha, beta)

    def row(self, which, path):
        if which != "p":
            return self.tables.row(which, path)
        expert, amateur = (self.tables.row(x, path) + np.log(1e-3) for x in ("p", "q"))
        return softmax(contrast(expert, amateur, *self.numbers))


DRAWN = [pair for pair in PAIRS if pair[0] is not DraftSampling.COUPLED]
"""Races decide by their noise: tests/exactness/test_race.py enumerates them."""


@pytest.mark.parametrize(("distribution", "shape", "name"), DRAWN, ids=words)
def test_every_lossless_rule_keeps_the_contrastive_distribution(distribution, shape, name):
    label, counts, depth = SHAPES[shape][-1]
    for seed in (0, 4):
        found = measure(RULES[name], ContrastedTables(3, seed), distribution, shape, counts, depth)
        assert found.error < 1e-12, f"{label}, seed {seed}: {found}"


def test_without_mask_and_contrast_it_is_the_expert_and_with_the_mask_the_expert_cut_by_min_p():
    amateur = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float64))
    assert np.array_equal(contrast(np.log(EXPERT), amateur, 0, 0), np.log(EXPERT))
    cut = softmax(contrast(np.log(EXPERT), amateur, 0.2, 0))
    assert np.abs(cut - EXPERT).sum() / 2 == pytest.approx(0.05)
    assert np.array_equal(
        contrast(np.log(EXPERT), amateur, 1, 0.5) > -np.inf, np.array([True, False, False, False])
    )


def contrasted(target, small, alpha=0.1, beta=0.5):
    """Tables of the distribution itself, as the checker sees them."""
    made = TableModel(target.vocab_size)
    made.logits = contrast(target.logits, small.logits, alpha, beta)
    return made


@pytest.mark.parametrize(
    ("kind", "verifier", "size"),
    [
        ("chain", "speculative", (2, 1)),
        ("chain", "block", (2, 1)),
        ("paths", "greedy_traversal", (1, 2)),
        ("without_replacement", "greedy_traversal_wor", (1, 2)),
        ("greedy_plus_one", "greedy_plus_one", (1, 2)),
        ("top_k", "match", (2, 2)),
        (None, "auto", (None, None)),
    ],
)
def test_what_an_engine_emits_follows_the_contrastive_distribution(kind, verifier, size, pair, monkeypatch):
    target, small = pair
    engine = Engine.of(
        target,
        draft_model=small,
        drafter=kind and f"model:{kind}",
        verifier=verifier,
        depth=size[0],
        num_paths=size[1],
        decoding="contrastive",
    )
    found = emitted_probs(engine, [1, 2], 3, monkeypatch)
    rows = TwoTables(contrasted(target, small), small, [1, 2])
    expected = np.ones((), np.float32)
    for length in range(3):
        tables = [rows.row("p", path) for path in np.ndindex(*(3,) * length)]
        expected = expected[..., None] * np.stack(tables).reshape(*(3,) * (length + 1))
    assert np.abs(found - expected).max() < 1e-12


class BonusOfTheExpert(Contrastive):
    """Wrong: leaves have no row of the amateur's, and follow the expert alone."""

    def __call__(self, scores, tree, contexts, second=None):
        found = super().__call__(scores, tree, contexts, second)
        inner = scatter(np.zeros(found.shape[:2], np.bool_), tree.parents.clip(min=0), True)
        return np.where(inner[..., None], found, scores.logits)


class OfTheDraftsDistribution(Contrastive):
    """Wrong: the amateur's row after sampling parameters, in the place of its logits."""

    def __call__(self, scores, tree, contexts, second=None):
        return contrast(scores.logits, log_softmax(second.logits / 0.5), self.alpha, self.beta)


class Ranks(Contrastive):
    """Wrong: contrastive scores choose what is allowed, the expert's distribution does the rest."""

    def __call__(self, scores, tree, contexts, second=None):
        found = super().__call__(scores, tree, contexts, second)
        return np.where(found < found.max(axis=-1, keepdims=True) - 1, -np.inf, scores.logits)


@pytest.mark.parametrize("fake", [None, BonusOfTheExpert, OfTheDraftsDistribution, Ranks])
def test_distributions_that_are_contrastive_by_name_only_are_noticed(fake, pair, monkeypatch):
    target, small = pair
    distribution = (fake or Contrastive)(small)
    engine = Engine.of(
        target, draft_model=small, drafter="model:chain", verifier="block", depth=1, decoding=distribution
    )
    expected = TwoTables(contrasted(target, small), small, [1, 2])
    first = expected.row("p", ())
    pairs = first[:, None] * np.stack([expected.row("p", (t,)) for t in range(3)])
    tv = np.abs(emitted_probs(engine, [1, 2], 2, monkeypatch) - pairs).sum() / 2
    assert (tv < 1e-12) if fake is None else tv > 0.01


class Watched(TableModel):
    """Counts the nodes that it is asked to score."""

    rows = 0

    def score(self, slots, tree, *, since=0, **options):
        self.rows += int(tree.is_node[:, since:].sum())
        return super().score(slots, tree, since=since, **options)


@pytest.mark.parametrize("kind", ["chain", "greedy_plus_one", "coupled"])
def test_the_amateur_scores_each_node_once_and_is_asked_again_where_drafts_are_not_its_own(kind):
    target = Watched()
    small = Watched(seed=1, max_num_seqs=4)
    engine = Engine.of(target, draft_model=small, drafter=f"model:{kind}", depth=3, decoding="contrastive")
    engine.generate([[1, 2], [2, 1]], SamplingParams(seed=1, max_tokens=20))
    assert small.rows == target.rows > 0
    other = Engine.of(target, drafter="ngram", depth=3, decoding=Contrastive(small))
    target.rows = small.rows = 0
    other.generate([[1, 2, 1, 2]], SamplingParams(temperature=0, max_tokens=20))
    assert small.rows == target.rows > 0


@pytest.fixture(scope="module")
def models():
    return [
        load.load_model(str(folder()), device="cpu", max_num_seqs=2)
        for folder in (pair.target_folder, pair.draft_folder)
    ]


def texts(models, drafter, distribution, **options):
    target, small = models
    engine = Engine.of(target, draft_model=small, drafter=drafter, decoding=distribution, **options)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    return [r.token_ids for r in engine.generate([[5, 9, 70, 5, 9], [33, 200]], greedy)]


def test_beta_0_without_the_mask_is_ordinary_speculative_sampling_bit_for_bit(models):
    target, small = models
    size = {"draft_model": small, "drafter": "model", "depth": 3, "num_paths": 2}
    params = SamplingParams(seed=7, max_tokens=32)
    plain = Engine.of(target, **size).generate([[5, 9, 70]], params)[0]
    distribution = Engine.of(
        target, **size, decoding="contrastive", decoding_options={"alpha": 0, "beta": 0}
    ).generate([[5, 9, 70]], params)[0]
    assert (
        distribution.token_ids == plain.token_ids
        and distribution.stats.accepted_tokens == plain.stats.accepted_tokens
    )
    assert (
        distribution.lossless_to == "the contrastive distribution of target and amateur"
        and plain.lossless_to == "the target distribution"
    )


@pytest.mark.filterwarnings("error::polydraft.errors.DrafterWarning")
def test_drafts_of_the_amateur_change_no_token_and_leave_its_slots_empty(models):
    target, small = models
    plain = texts(models, None, Contrastive(small))
    for kind in ("chain", "paths", "systematic", "coupled", "without_replacement", "top_k"):
        assert (
            texts(models, f"model:{kind}", "contrastive", depth=3, num_paths=1 if kind == "chain" else 2)
            == plain
        ), kind
    assert texts(models, "mixture:model:top_k,ngram", "contrastive") == plain
    assert small.lengths.tolist() == target.lengths.tolist() == [0, 0]
    assert plain != texts(models, None, None)


def test_what_cannot_be_contrasted_is_refused():
    target = TableModel()
    small = TableModel(seed=1)
    for options, said in (
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": -0.1}, "0 \\(no mask\\) to 1"),
        ({"beta": -1}, "beta=-1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"gamma": 1}, "no such option"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            Engine.of(target, draft_model=small, decoding="contrastive", decoding_options=options)
    with pytest.raises(InvalidInputError, match="without an amateur"):
        Engine.of(target, decoding="contrastive", drafter=None)
    with pytest.raises(IncompatibleError, match="same vocabulary"):
        Engine.of(target, drafter=None, decoding=Contrastive(TableModel(V=9)))
    with pytest.raises(InvalidInputError, match="decoding_options was given without decoding"):
        Engine.of(target, drafter=None, decoding_options={"alpha": 0.1})
    with pytest.raises(InvalidInputError, match="with the name of a decoding method"):
        Engine.of(target, drafter=None, decoding=Contrastive(small), decoding_options={"alpha": 0.1})
    small.logits[0, 0, 0] = np.nan
    small.logits = small.logits * np.nan
    with pytest.warns(match="the amateur's logits hold NaN"):
        (result,) = Engine.of(target, drafter=None, decoding=Contrastive(small)).generate([[1, 2]])
    assert result.finish_reason == "error" and not result.token_ids
