"""Where rules must coincide: one path, one draft, one bucket, two tokens' worth of draws."""

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.methods.registry import verifier
from polydraft.testing import Tables, as_batch, enumerate_drafts
from tests.exactness.harness import Markov, by_depth

IID = DraftSampling.IID
WOR = DraftSampling.WITHOUT_REPLACEMENT
G1 = DraftSampling.GREEDY_PLUS_ONE


def same(ours, theirs, draft, p):
    """Equal stop probabilities, and equal distributions of the extra token wherever a rule may stop."""
    a = verifier(ours)(draft, p)
    b = verifier(theirs)(draft, p)
    assert np.allclose(a.stop, b.stop, atol=1e-12)
    for n in range(draft.tree.num_nodes):
        at = np.full((len(p),), n)
        reached = b.stop[:, n] > 1e-9
        assert np.allclose(a.after(at)[reached], b.after(at)[reached], atol=1e-8)


@pytest.mark.parametrize("name", ["traversal", "traversal_merged", "greedy_traversal", "multipath"])
@pytest.mark.parametrize("seed", range(6))
def test_one_path_is_block_verification(name, seed):
    tables = Tables(4, seed)
    draft, p = as_batch(tables, IID, TreeShape.CHAIN, enumerate_drafts(tables, IID, by_depth(1, 1), 2))
    same(name, "block", draft, p)


@pytest.mark.parametrize("seed", range(6))
def test_one_path_of_distinct_draws_is_block_verification(seed):
    tables = Tables(4, seed)
    draft, p = as_batch(tables, IID, TreeShape.CHAIN, enumerate_drafts(tables, IID, by_depth(1, 1), 2))
    distinct = Draft(draft.tree, WOR, TreeShape.CHAIN, draft.probs, draft.rows)
    a = verifier("greedy_traversal_wor")(distinct, p)
    b = verifier("block")(draft, p)
    assert np.allclose(a.stop, b.stop, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    ["recursive", "recursive_merged", "single_with_spares", "kseq", "max_ratio", "importance", "transport"],
)
@pytest.mark.parametrize("seed", range(6))
def test_one_draft_is_speculative_sampling(name, seed):
    tables = Tables(4, seed)
    draft, p = as_batch(tables, IID, TreeShape.CHAIN, enumerate_drafts(tables, IID, by_depth(1, 1), 2))
    same(name, "speculative", draft, p)


@pytest.mark.parametrize("seed", range(4))
def test_one_bucket_is_traversal_of_merged_siblings(seed):
    """Rows so alike that the gate is closed: all tokens then share one bucket."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(4), 4)
    q = 0.98 * p + 0.02 * rng.dirichlet(np.ones(4), 4)
    tables = Markov(p, q, 0)
    draft, rows = as_batch(tables, IID, TreeShape.PATHS, enumerate_drafts(tables, IID, by_depth(3, 1), 2))
    same("greedy_traversal", "traversal_merged", draft, rows)


def test_order_makes_a_difference_where_rows_differ():
    """The last test could not fail if the two rules were one."""
    tables = Tables(4, 0)
    draft, p = as_batch(tables, IID, TreeShape.PATHS, enumerate_drafts(tables, IID, by_depth(2, 1), 2))
    ours = verifier("greedy_traversal")(draft, p).stop
    theirs = verifier("traversal_merged")(draft, p).stop
    assert np.abs(ours - theirs).max() > 1e-3


@pytest.mark.parametrize("name", ["transport", "kseq", "recursive", "traversal"])
def test_float32_rows_give_nearly_the_same_verdict(name):
    tables = Tables(5, 0)
    draft, p = as_batch(tables, IID, TreeShape.PATHS, enumerate_drafts(tables, IID, by_depth(2, 1), 2))
    narrow = Draft(draft.tree, draft.sampling, draft.shape, draft.probs.astype(np.float32), draft.rows)
    a = verifier(name)(draft, p).stop
    b = verifier(name)(narrow, p.astype(np.float32)).stop
    assert np.allclose(a, b, atol=1e-5)
