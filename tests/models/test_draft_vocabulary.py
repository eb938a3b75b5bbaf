"""A compiled draft model over a part of its vocabulary: the whole layer's logits of what it drafts, nothing of other tokens."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from polydraft.core import Budget, DraftSampling, SamplingParams
from polydraft.core import geometry as trees
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.growing import draft_vocabulary
from polydraft.models.matrices.products import FORMATS
from polydraft.models.matrices.vectors import PANEL
from polydraft.policy.profile import identity
from polydraft.sampling.softmax import softmax
from tests.support.tiny import llama_config

VOCABULARY = 96


@pytest.fixture(autouse=True)
def parts_alone(monkeypatch):
    """However many new text tokens there are: texts here have hardly any other."""
    monkeypatch.setattr(draft_vocabulary, "MOST_NEW", 1000)


QUANTIZATIONS = (None, *FORMATS)


def model(seed=0, vocab_size=VOCABULARY):
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        llama_config(
            vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=95
        )
    ).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.2)
    return made


def both(quantization=None, slots=3, vocab_size=VOCABULARY, **options):
    """The same model over all tokens and over the first PANEL."""
    models = [
        CompiledModel(
            model(0, vocab_size), max_num_seqs=slots, quantization=quantization, cache_dtype="float32"
        )
        for _ in range(2)
    ]
    models[1].draft_over(PANEL, **options)
    return models


def tokens_with_logits(scores, b=0, n=0):
    return set(np.flatnonzero(np.isfinite(scores.logits[b, n])).tolist())


@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name != "float32"])
def test_drafted_tokens_have_the_logits_of_the_whole_layer(quantization):
    whole, part = both(quantization, special_ids=[80])
    text = [1, 40, 3, 77, 50]
    for fast in (whole, part):
        fast.prefill([1], [text])
    chain = trees.TokenTree.chain(np.array([[90, 4, 5]]))
    for n, (ours, theirs) in enumerate(
        zip(part.score([1], chain).logits[0], whole.score([1], chain).logits[0], strict=True)
    ):
        finite = np.isfinite(ours)
        assert set(np.flatnonzero(finite).tolist()) == {*range(PANEL), 40, 77, 50, 80, 90, 95}, n
        assert np.array_equal(ours[finite], theirs[finite])
    assert part.weight_bytes < whole.weight_bytes


def test_each_slot_drafts_tokens_of_its_own_text_while_it_holds_them():
    _, part = both()
    part.prefill([0, 1], [[40, 41, 1], [42, 1]])
    root = trees.TokenTree.roots(np.array([2, 2]))
    base = {*range(PANEL), 95}
    scores = part.score([0, 1], root)
    assert [tokens_with_logits(scores, b) for b in (0, 1)] == [base | {40, 41}, base | {42}]
    part.copy(0, 2, 1)
    part.cut(0, 1)
    part.release([1])
    part.prefill([1], [[43]])
    scores = part.score([0, 1, 2], trees.TokenTree.roots(np.array([2, 2, 2])))
    assert [tokens_with_logits(scores, b) for b in (0, 1, 2)] == [base | {40}, base | {43}, base | {40}]


def test_a_text_of_new_tokens_drafts_all_of_them_until_they_are_rare_again(monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "MOST_NEW", 2)
    whole, part = both()
    common = np.random.default_rng(0).integers(0, PANEL, 60).tolist()
    rare = [40, 50, 60]
    for fast in (whole, part):
        fast.prefill([0, 1], [rare, rare[:2]])
    root = trees.TokenTree.roots(np.array([1, 1]))
    ours = part.score([0, 1], root).logits
    theirs = whole.score([0, 1], root).logits
    assert np.array_equal(ours[0], theirs[0]) and set(np.flatnonzero(np.isfinite(ours[1, 0])).tolist()) == {
        *range(PANEL),
        40,
        50,
        95,
    }
    assert part.arrays.sizes.outputs == whole.arrays.sizes.outputs
    part.prefill([0], [common])
    scores = part.score([0, 1], root)
    assert [tokens_with_logits(scores, b) for b in (0, 1)] == [
        {*range(PANEL), 40, 50, 60, 95},
        {*range(PANEL), 40, 50, 95},
    ]
    assert part.arrays.sizes.outputs < whole.arrays.sizes.outputs


@pytest.mark.parametrize("most_new", [1000, 29, 0])
def test_distribution_is_the_same_alone_and_in_a_batch_whatever_was_read_before(most_new, monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "MOST_NEW", most_new)
    texts = np.random.default_rng(0).integers(PANEL, 700, (12, 40)).tolist()
    alone, batch = (both(vocab_size=700, slots=n)[1] for n in (1, 3))

    def proposed(fast, slots, first):
        fast.release(slots)
        fast.prefill(slots, [texts[first + b][:-1] for b in range(len(slots))])
        pending = [texts[first + b][-1:] for b in range(len(slots))]
        keys = [first + b for b in range(len(slots))], [0] * len(slots), [40] * len(slots)
        return fast.propose_paths(
            slots,
            pending,
            keys,
            [Budget.fixed(trees.chain(3))] * len(slots),
            [SamplingParams(top_p=0.9)] * len(slots),
        )

    for first in range(0, 12, 3):
        together = proposed(batch, [0, 1, 2], first)
        for b in range(3):
            single = proposed(alone, [0], first + b)
            assert np.array_equal(single.tree.tokens[0], together.tree.tokens[b])
            assert np.array_equal(single.probs[0], together.probs[b])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_report_the_distribution_of_the_drafted_tokens_and_exact_zeros(temperature):
    whole, part = both()
    params = [SamplingParams(temperature=temperature)]
    text = [1, 40, 3]
    for fast in (whole, part):
        fast.prefill([0], [text])
    for seed in range(20):
        part.cut(0, 3)
        tree, rows, probs, *_ = part.propose_paths(
            [0], [[50]], ([seed], [0], [5]), [Budget.fixed(trees.paths(2, 3))], params
        )
        drafted = [*range(PANEL), 40, 50, 95]
        for n in range(1, tree.num_nodes):
            path, length = trees.path_to(tree, tree.parents[:, n])
            ids = [50, *tree.tokens[0, path[0, : int(length[0])]].tolist()]
            logits = whole.score([0], trees.TokenTree.chain(np.array([ids]))).logits[0, -1, drafted]
            expected = np.zeros(VOCABULARY, np.float32)
            expected[drafted] = (
                softmax(logits) if temperature else (logits == logits.max()).astype(np.float32)
            )
            row = probs[0, rows[0, n]]
            np.testing.assert_allclose(row, expected, rtol=1.3e-6, atol=1e-5)
            assert (row[expected == 0] == 0).all() and row[tree.tokens[0, n]] > 0


def test_most_probable_trees_hold_drafted_tokens_alone():
    _, part = both()
    engine = Engine.of(
        CompiledModel(model(1), max_num_seqs=2, cache_dtype="float32"),
        draft_model=part,
        drafter="model:top_k",
        depth=3,
        num_paths=2,
    )
    first = engine.generate(
        [[1, 40, 3], [2, 60, 4]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    plain = Engine.of(CompiledModel(model(1), max_num_seqs=2, cache_dtype="float32"), drafter=None)
    again = plain.generate(
        [[1, 40, 3], [2, 60, 4]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    assert [r.token_ids for r in first] == [r.token_ids for r in again] and first[0].stats.drafted_tokens > 0


@pytest.mark.parametrize("distribution", [DraftSampling.COUPLED, DraftSampling.SYSTEMATIC])
def test_shared_races_and_equal_steps_draw_drafted_tokens_alone(distribution):
    _, part = both()
    part.prefill([0], [[1, 40, 3]])
    for seed in range(20):
        part.cut(0, 3)
        tree, *_ = part.propose_paths(
            [0],
            [[2]],
            ([seed], [0], [5]),
            [Budget.fixed(trees.paths(2, 3))],
            [SamplingParams()],
            draft_sampling=distribution,
        )
        assert {*tree.tokens[0].tolist()} <= {*range(PANEL), 40, 95}


def test_engine_limits_a_large_vocabulary_of_a_draft_model_and_says_what_it_expects(tmp_path):
    target = str(pair.target_folder())
    draft = str(pair.draft_folder())
    sizes = {}
    for given in (None, 64, 0, 2000):
        made = Engine.from_pretrained(target, draft_model=draft, draft_vocabulary=given, max_num_seqs=1)
        drafts = made.drafter.model
        sizes[given] = drafts.arrays.head.panels
        assert made.target.arrays.head.outputs >= 2048
        assert identity(made.target, made.drafter, made.verifier)["models"][1]["draft_vocabulary"] == str(
            64 if given == 64 else None
        )
    assert sizes[64] < sizes[None] == sizes[0] == sizes[2000]
    for wrong in (-1, "most", True, 2.5):
        with pytest.raises(InvalidInputError, match="expected at least 0, a whole number"):
            Engine.from_pretrained(target, draft_model=draft, draft_vocabulary=wrong, max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="expected a compiled one"):
        Engine.from_pretrained(
            target, draft_model=draft, draft_vocabulary=64, backend="transformers", max_num_seqs=1
        )
    model = load.load_model(draft, max_num_seqs=1)
    model.prefill([0], [[1]])
    with pytest.raises(InvalidInputError, match="Do it before the first request"):
        model.draft_over(64)


def test_text_of_a_seed_is_the_same_alone_and_among_others():
    def texts(slots, prompts):
        part = both(slots=slots)[1]
        engine = Engine.of(
            CompiledModel(model(1), max_num_seqs=slots, cache_dtype="float32"),
            draft_model=part,
            drafter="model:chain",
            depth=3,
        )
        params = [SamplingParams(seed=9 + i, max_tokens=16, ignore_eos=True) for i in range(len(prompts))]
        return [r.token_ids for r in engine.generate(prompts, params)]

    prompts = [[1, 40 + i, 60 + i] for i in range(3)]
    together = texts(3, prompts)
    assert together[0] == texts(1, prompts[:1])[0]
