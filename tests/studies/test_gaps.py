"""What is left to gain: the programme's optimum is above every verifier, is reached at one draft, and joins drafts of the same contexts."""

import numpy as np
import pytest

from polydraft.core import DraftSampling
from polydraft.core import geometry as trees
from polydraft.testing import by_position, enumerate_drafts
from polydraft.theory.bounds import best_block_efficiency
from studies import gaps


def rows(seed, overlap=0.5):
    rng = np.random.default_rng(seed)
    found = {}
    for path in ((), *((x,) for x in range(gaps.TOP))):
        p = rng.dirichlet(np.full(gaps.V, 0.7))
        q = np.append(rng.dirichlet(np.full(gaps.TOP, 0.7)), 0.0)
        found[path] = (p, overlap * np.append(p[:-1] / p[:-1].sum(), 0.0) + (1 - overlap) * q)
    return gaps.ContextRows(found)


def test_no_verifier_exceeds_the_optimum_of_its_draws():
    for value in gaps.values(rows(0), 2):
        assert value.tokens <= value.optimum + 1e-7


def test_one_path_leaves_nothing_over_block_verification():
    found = {(v.verifier, v.sampling): v for v in gaps.values(rows(1), 1)}
    block = found["traversal", DraftSampling.IID]
    assert block.tokens == pytest.approx(block.optimum, abs=1e-7)


def test_drafts_of_the_same_contexts_may_be_joined():
    source = rows(2)
    drafts = enumerate_drafts(source, DraftSampling.IID, by_position(*trees.paths(2, 1)), 1)
    each = best_block_efficiency(
        lambda path: source.row("p", path), [(d.probability, d.paths) for d in drafts]
    )
    assert gaps.optimum(source, drafts) == pytest.approx(each, abs=1e-9)


def test_tokens_that_the_head_cannot_draft_are_one():
    p, q, ids = gaps.reduced(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 0.6, 0.4, 0.0]))
    assert ids == [1, 2]
    assert p == pytest.approx([0.2, 0.3, 0, 0, 0.5])
    assert q == pytest.approx([0.6, 0.4, 0, 0, 0])
