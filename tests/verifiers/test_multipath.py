"""The law of the picked path of greedy multi-path block verification."""

from itertools import product

import numpy as np
import torch
from harness import Markov, Tables, by_depth, measure

from polydraft.core import Draft, SiblingLaw, TreeShape
from polydraft.registry import verifier
from polydraft.verifiers.block import multipath
from polydraft.verifiers.block.multipath import picked_law

TWO_PATHS = SiblingLaw.IID, TreeShape.PATHS, by_depth(2, 1), 2


def test_picked_law_equals_enumeration_of_the_draws():
    rng = np.random.default_rng(0)
    for n in (1, 2, 3):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        q[rng.integers(4)] = 0
        q /= q.sum()
        with np.errstate(divide="ignore"):
            order = np.lexsort((np.arange(4), np.where(q > 0, p / q, np.inf)))
        expected = np.zeros(4)
        for draws in product(range(4), repeat=n):
            expected[max(draws, key=order.argsort().__getitem__)] += np.prod(q[list(draws)])
        chance = torch.eye(4, dtype=torch.float64)[n : n + 1]
        law, _, _ = picked_law(torch.from_numpy(p)[None], torch.from_numpy(q)[None], chance)
        assert np.abs(law[0].numpy() - expected).max() < 1e-15


def test_equal_models_keep_less_than_block_verification():
    uniform = np.full((3, 3), 1 / 3)
    found = measure(verifier("multipath"), Markov(uniform, uniform, 0), *TWO_PATHS)
    assert found.block_efficiency < 3 - 0.1
    assert found.error < 1e-12


def test_draft_law_in_place_of_the_picked_law_is_caught(monkeypatch):
    def unskewed(p, q, chance):
        return q, *picked_law(p, q, chance)[1:]

    monkeypatch.setattr(multipath, "picked_law", unskewed)
    assert max(measure(verifier("multipath"), Tables(3, s), *TWO_PATHS).tv for s in range(3)) > 0.01


def test_trunk_token_counted_once_for_each_path_is_caught(monkeypatch):
    once = multipath._times
    trunk = SiblingLaw.IID, TreeShape.PATHS, by_depth(1, 2), 2
    assert max(measure(verifier("multipath"), Tables(3, s), *trunk).tv for s in range(3)) < 1e-12
    monkeypatch.setattr(multipath, "_times", lambda copies, children: once(copies, children + (children == 1)))
    assert max(measure(verifier("multipath"), Tables(3, s), *trunk).tv for s in range(3)) > 0.01


def test_draft_without_tokens_decodes_plainly():
    verdict = verifier("multipath")(Draft.empty(torch.tensor([0])), torch.tensor([[[0.25, 0.75]]]))
    assert verdict.stop.tolist() == [[1.0]]
    assert verdict.after(torch.tensor([0])).tolist() == [[0.25, 0.75]]
