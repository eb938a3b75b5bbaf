"""Rules take arrays of NumPy, PyTorch and JAX, give back the same kind, and come to the same numbers."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from array_api_compat import is_jax_array, is_numpy_array, is_torch_array

from polydraft import verify
from polydraft.core import Budget, Draft, DraftSampling, NoiseKey, TokenTree
from polydraft.core import geometry as trees
from polydraft.core.arrays import host
from polydraft.methods import registry
from polydraft.testing import Tables, as_batch, by_position, enumerate_drafts, enumerate_outputs

TREES = ((-1, 0, 1), (-1, 0, 0, 1, 2), (-1, 0, 0, 1, 1), (-1, 0, 0, 1))
"""A chain, two paths, a product and a tree by position."""
ALL = registry.names("verifier")
WITH_SHARED_NOISE = {name for name in ALL if registry.verifier(name).info.shared_noise}


def jax_arrays():
    """What makes JAX's arrays, of 64 bits where NumPy's have them."""
    jax = pytest.importorskip(
        "jax", reason="JAX is not installed: it is no dependency, and its CPU wheel has 100 MB"
    )
    jax.config.update("jax_enable_x64", True)
    return jax.numpy.asarray


def fitting(name):
    """(draft sampling, parents) of the drafts that a verifier is exact for, but for those that share noise."""
    info = registry.verifier(name).info
    for sampling in sorted(info.draft_sampling - {DraftSampling.LISTED}, key=lambda sampling: sampling.value):
        for parents in TREES:
            if Budget.fixed(parents).shape in info.shapes:
                yield sampling, parents


@lru_cache
def drafts(sampling, parents, seed):
    """All drafts of random tables, some of them."""
    budget = Budget.fixed(parents)
    tables = Tables(3, seed)
    every = enumerate_drafts(tables, sampling, by_position(*parents), budget.max_depth)
    return tables, budget.shape, every[:: max(1, len(every) // 40)]


def batch(sampling, parents, seed, arrays):
    """These drafts and the target's rows in one kind of arrays."""
    tables, shape, chosen = drafts(sampling, parents, seed)
    return as_batch(tables, sampling, shape, chosen, arrays)


def compare(name, arrays, is_kind, cases, seeds=range(6), tolerance=1e-12):
    """A rule's verdicts of one kind of arrays against those of NumPy's."""
    for sampling, parents in cases:
        for seed in seeds:
            draft, p = batch(sampling, parents, seed, np.asarray)
            expected = verify(name, draft, p)
            verdict = verify(name, *batch(sampling, parents, seed, arrays))
            assert is_kind(verdict.stop)
            np.testing.assert_allclose(host(verdict.stop), expected.stop, atol=tolerance)
            for n in range(draft.tree.num_nodes):
                node = np.full(len(p), n)
                after = verdict.after(arrays(node))
                assert is_kind(after)
                reached = expected.stop[:, n] > 10 * tolerance
                np.testing.assert_allclose(
                    host(after)[reached], expected.after(node)[reached], atol=10 * tolerance
                )


@pytest.mark.parametrize("name", sorted(set(ALL) - WITH_SHARED_NOISE))
def test_numpy_and_torch_agree(name):
    compare(name, torch.from_numpy, is_torch_array, fitting(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALL) - WITH_SHARED_NOISE))
def test_jax_agrees(name):
    one = [*fitting(name)][-1:]  # it compiles each operation for each shape
    compare(name, jax_arrays(), is_jax_array, one, seeds=[2])


@pytest.mark.parametrize("name", sorted(WITH_SHARED_NOISE))
@pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy])
def test_races_are_of_the_arrays_kind(name, arrays):
    tree = TokenTree(arrays(np.array([[5, 1, 2]])), arrays(np.array([[-1, 0, 0]])))
    p = np.array([[[0.5, 0.25, 0.25, 0, 0, 0]] * 3])
    sampling = min(
        registry.verifier(name).info.draft_sampling, key=lambda sampling: sampling is not DraftSampling.LISTED
    )
    key = NoiseKey(*(arrays(np.array([x])) for x in (1, 0, 7)))
    draft = Draft(
        tree, sampling, Budget.fixed((-1, 0, 0)).shape, arrays(p), arrays(np.array([[-1, 0, 0]])), key
    )
    verdict = registry.verifier(name)(draft, arrays(p))
    outcome = verdict.sample(key)
    assert type(verdict.stop) is type(outcome.path) is type(outcome.token) is type(arrays(p))
    assert host(verdict.stop).sum() == 1.0


@pytest.mark.parametrize("name", ["block", "traversal", "recursive"])
def test_arrays_of_numpy_are_enumerated(name):
    tables = Tables(3, seed=2)
    result = enumerate_outputs(
        registry.verifier(name), tables.target, tables.draft, arrays=np.asarray, parents=(-1, 0, 1)
    )
    assert result.error < 1e-12


def test_outcomes_are_the_same_for_the_same_noise():
    draft, p = batch(DraftSampling.IID, (-1, 0, 1), 0, np.asarray)
    of_torch = batch(DraftSampling.IID, (-1, 0, 1), 0, torch.from_numpy)
    key = NoiseKey.of(range(len(p)), [0] * len(p), [9] * len(p))
    outcomes = [verify("block", *given).sample(key) for given in ((draft, p), of_torch)]
    assert outcomes[0].lists == outcomes[1].lists
    assert is_numpy_array(outcomes[0].token) and is_torch_array(outcomes[1].token)


def test_trees_of_numpy_stay_of_numpy():
    tree = TokenTree.chain(np.array([[5, 7, 9]]))
    for x in (
        tree.parents,
        tree.is_node,
        trees.depths(tree),
        trees.children(tree),
        *trees.path_to(tree, np.array([2])),
    ):
        assert is_numpy_array(x)
