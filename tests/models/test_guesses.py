"""Guessed tokens in a draft model's forward passes: fewer of them, and not one bit of a draft is another."""

from typing import Any

import numpy as np
import pytest

from polydraft.core import Budget, SamplingParams
from polydraft.core.budget import Stop
from polydraft.core.confidence import BINS
from polydraft.core.geometry import chain, paths
from polydraft.models import pair
from polydraft.models.growing.proposals import CompiledProposals
from polydraft.models.load import load_model

REPEATS = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
TEXTS = {"repeats": REPEATS, "new": list(range(20, 40)), "short": [3]}


@pytest.fixture(scope="module")
def model():
    return load_model(str(pair.draft_folder()), max_num_seqs=2, threads=1)


def proposed(
    model: Any, guesses: bool, text: list[int], *trees: tuple[int, ...], seed: int = 0, **options: Any
):
    """A proposal for each tree, and the forward passes that it took."""
    temperature = options.pop("temperature", 1.0)
    stop = options.pop("stop", None)
    budgets = [Budget.fixed(tree).ending(stop) for tree in trees]
    count = len(trees)
    before = model.passes
    with pytest.MonkeyPatch.context() as patch:
        if not guesses:
            patch.setattr(model, "read_texts", CompiledProposals.read_texts)
        for slot in range(count):
            model.cut(slot, 0)
            if text[:-1]:
                model.prefill([slot], [text[:-1]])
        before = model.passes
        keys = [seed] * count, [0] * count, [len(text)] * count
        params = [SamplingParams(temperature=temperature)] * count
        return model.propose_paths(
            list(range(count)), [text[-1:]] * count, keys, budgets, params, **options
        ), model.passes - before


def same_bits(one: Any, other: Any) -> bool:
    return one.tree.lists == other.tree.lists and all(
        np.array_equal(a, b) for a, b in zip(one[1:], other[1:], strict=True) if a is not None
    )


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("text", TEXTS)
def test_a_chain_with_guesses_has_the_bits_of_one_without(model, text, temperature):
    saved = 0
    for seed in range(12):
        few, some = (
            proposed(model, on, TEXTS[text], chain(7), seed=seed, temperature=temperature)
            for on in (True, False)
        )
        assert same_bits(few[0], some[0]) and some[1] == 7 >= few[1]
        saved += some[1] - few[1]
    assert saved > 0 or text != "repeats"


@pytest.mark.parametrize("options", [{"leaves": True}, {"stop": Stop((0.3,) * 7, tuple([0.9] * BINS))}])
def test_scored_leaves_and_stops_are_the_same_with_guesses(model, options):
    for seed in range(8):
        few, some = (
            proposed(model, on, REPEATS, chain(7), seed=seed, temperature=0.5, **options)
            for on in (True, False)
        )
        assert same_bits(few[0], some[0]) and few[1] <= some[1]


@pytest.mark.parametrize("trees", [[paths(2, 4)], [chain(4)] * 2, [Budget.fixed((-1, 0, 0, 1)).parents]])
def test_trees_and_batches_are_drawn_without_guesses(model, trees):
    assert proposed(model, True, REPEATS, *trees)[1] == proposed(model, False, REPEATS, *trees)[1]
