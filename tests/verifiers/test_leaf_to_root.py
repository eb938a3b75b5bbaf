"""Traversal and greedy traversal against a second implementation, and their limits."""

import numpy as np
import pytest
import torch
from harness import SHAPES, Tables, as_batch, by_depth, measure

from polydraft.core import Draft, SiblingLaw, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.registry import verifier
from polydraft.verifiers._verdict import TreeVerdict
from verifiers.reference import greedy, merged, merged_wrongly, one_hot, pooled, sampled, sampled_first, visits

IID, WOR, PM, G1 = SiblingLaw.IID, SiblingLaw.WITHOUT_REPLACEMENT, SiblingLaw.POINT_MASS, SiblingLaw.GREEDY_PLUS_ONE
CHAIN, PATHS, PRODUCT, GROWN = TreeShape
TREES = [
    (PATHS, by_depth(3, 1, 1), 3),
    (PATHS, by_depth(1, 4, 1), 3),
    (PRODUCT, by_depth(2, 2, 2), 3),
]


def near(V, seed):
    """Tables in which q is within 3% of p, so that the gate of greedy traversal is closed everywhere."""

    class Near(Tables):
        def _row(self, which, path):
            x = super()._row("p", path)
            if which == "q":
                x = x * (1 + 0.03 * np.random.default_rng([self.seed, *path]).uniform(-1, 1, len(x)))
            return x / x.sum()

    return Near(V, seed)


def agree(name, steps, tables, law, shape, counts, depth, seeds):
    drafts = [sampled(tables, law, counts, depth, s) for s in seeds]
    draft, p = as_batch(tables, law, shape, drafts)
    verdict = verifier(name)(draft, p)
    for b, d in enumerate(drafts):
        for path, stop, law_after in visits(d, tables, steps):
            n = d.paths.index(path)
            assert verdict.stop[b, n].item() == pytest.approx(stop, abs=1e-13)
            if stop > 1e-9:
                after = verdict.after(torch.full((len(drafts),), n))[b].numpy()
                assert np.abs(after - law_after).max() < 1e-7


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("shape", "counts", "depth"), TREES)
def test_greedy_traversal_follows_its_pseudo_code(shape, counts, depth, seed):
    agree("greedy_traversal", greedy, Tables(6, seed), IID, shape, counts, depth, range(8))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("law", "steps"), [(IID, pooled), (WOR, merged), (PM, one_hot), (G1, sampled_first)])
def test_traversal_follows_its_pseudo_code(law, steps, seed):
    agree("traversal", steps, Tables(6, seed), law, PRODUCT, by_depth(3, 2), 2, range(8))


@pytest.mark.parametrize("seed", range(3))
def test_greedy_traversal_with_one_bucket_is_traversal_with_merged_siblings(seed):
    tables = near(4, seed)
    agree("greedy_traversal", merged, tables, IID, PATHS, by_depth(3, 1), 2, range(8))


@pytest.mark.parametrize("name", ["traversal", "greedy_traversal", "multipath"])
def test_one_path_is_block_verification(name):
    for seed in range(12):
        tables = Tables(5, seed)
        draft, p = as_batch(tables, IID, CHAIN, [sampled(tables, IID, by_depth(1, 1, 1, 1), 4, s) for s in range(10)])
        ours, block = verifier(name)(draft, p), verifier("block")(draft, p)
        assert torch.allclose(ours.stop, block.stop, rtol=0, atol=1e-13)
        for n in range(5):
            node = torch.full((10,), n)
            seen = block.stop[:, n] > 1e-9
            assert torch.allclose(ours.after(node)[seen], block.after(node)[seen], rtol=0, atol=1e-7)


def test_greedy_traversal_keeps_more_than_traversal_on_the_two_token_example():
    class Thirds(Tables):
        def _row(self, which, path):
            return np.array([1, 2] if which == "p" else [2, 1]) / 3

    cases = {"greedy_traversal": 2.8395403714, "multipath": 2.76817558299, "traversal": 2.55829903978}
    for name, expected in cases.items():
        found = measure(verifier(name), Thirds(2, 0), IID, PATHS, by_depth(3, 1), 2)
        assert found.block_efficiency == pytest.approx(expected, abs=1e-10)


def as_rule(steps):
    """The reference as a verifier, for the exact harness."""

    def rule(draft, p):
        tables = [_Rows(draft, p, b) for b in range(len(p))]
        stop, laws = torch.zeros_like(p[..., 0]), p.clone()
        for b, t in enumerate(tables):
            for path, mass, law in visits(t, t, steps):
                n = t.paths.index(path)
                stop[b, n], laws[b, n] = mass, torch.from_numpy(law)
        return TreeVerdict(draft.tree, stop, lambda node: laws[torch.arange(len(p)), node])

    return rule


class _Rows:
    """One row of a batch as the tables that the reference reads."""

    def __init__(self, draft, p, b):
        self.paths, self.rows = [()], {}
        for n in range(1, draft.tree.num_nodes):
            self.paths.append((*self.paths[draft.tree.parents[b, n]], int(draft.tree.tokens[b, n])))
            self.rows["q", self.paths[draft.tree.parents[b, n]]] = draft.probs[b, draft.rows[b, n]].numpy()
        self.rows |= {("p", path): p[b, n].numpy() for n, path in enumerate(self.paths)}

    def row(self, which, path):
        return self.rows.get((which, path))


def test_merging_equal_siblings_while_their_law_stays_q_is_caught():
    for steps, exact in [(pooled, True), (merged, True), (merged_wrongly, False)]:
        found = max(measure(as_rule(steps), Tables(3, s), IID, PATHS, by_depth(2, 1), 2).tv for s in range(3))
        assert found < 1e-12 if exact else found > 1e-3


@pytest.mark.parametrize("name", ["traversal", "greedy_traversal", "multipath"])
def test_ragged_batch_equals_single_rows(name):
    tables = Tables(5, 3)
    drafts = [
        sampled(tables, IID, counts, depth, 7)
        for counts, depth in [(by_depth(2, 1), 2), (by_depth(0), 1), (by_depth(3, 1, 1), 3)]
    ]
    draft, p = as_batch(tables, IID, PATHS, drafts)
    together = verifier(name)(draft, p)
    for b, d in enumerate(drafts):
        size = len(d.tokens)
        tree = TokenTree(draft.tree.tokens[b : b + 1, :size], draft.tree.parents[b : b + 1, :size])
        alone = verifier(name)(Draft(tree, IID, PATHS, draft.probs[b : b + 1], draft.rows[b : b + 1, :size]), p[b : b + 1, :size])
        assert torch.equal(together.stop[b, :size], alone.stop[0])
        assert (together.stop[b, size:] == 0).all()
        for n in range(size):
            assert torch.equal(together.after(torch.full((3,), n))[b], alone.after(torch.tensor([n]))[0])


@pytest.mark.parametrize("name", ["block", "traversal", "greedy_traversal", "multipath"])
def test_single_precision_rows_give_the_same_verdict(name):
    tables = Tables(8, 0)
    shape, counts = (CHAIN, by_depth(1, 1, 1)) if name == "block" else (PATHS, by_depth(3, 1, 1))
    draft, p = as_batch(tables, IID, shape, [sampled(tables, IID, counts, 3, s) for s in range(20)])
    exact = verifier(name)(draft, p)
    single = verifier(name)(Draft(draft.tree, IID, shape, draft.probs.float(), draft.rows), p.float())
    assert single.stop.dtype == torch.float64
    assert torch.allclose(single.stop, exact.stop, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["block", "traversal", "greedy_traversal", "multipath"])
def test_equal_laws_accept_a_whole_path(name):
    tables = Tables(5, 0)
    tables._row = lambda which, path, make=tables._row: make("p", path)
    shape, counts = (CHAIN, by_depth(1, 1)) if name in ("block", "multipath") else (PATHS, by_depth(2, 1))
    draft, p = as_batch(tables, IID, shape, [sampled(tables, IID, counts, 2, s) for s in range(10)])
    stop = verifier(name)(draft, p).stop
    assert torch.allclose(stop[:, 2], torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["block", "traversal", "greedy_traversal", "multipath"])
def test_token_that_the_draft_gave_no_mass_is_refused(name):
    p, q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    draft = Draft(TokenTree.chain(torch.tensor([[0, 1]])), IID, CHAIN, q, torch.tensor([[-1, 0]]))
    with pytest.raises(InvalidInputError, match="probability 0"):
        verifier(name)(draft, p)


@pytest.mark.parametrize("law", [IID, WOR, PM, G1])
def test_token_without_target_mass_is_never_emitted(law):
    tables = Tables(4, 1)
    draft, p = as_batch(tables, law, GROWN, [sampled(tables, law, SHAPES[GROWN][0][1], 2, s) for s in range(30)])
    verdict = verifier("traversal")(draft, p)
    above = draft.tree.parents.clamp(min=0)
    mass = p.gather(1, above[..., None].expand_as(p)).gather(2, draft.tree.tokens[..., None])[..., 0]
    banned = (mass == 0) & (draft.tree.parents >= 0)
    assert banned.any()
    assert (verdict.stop[banned] == 0).all()
    for n in range(draft.tree.num_nodes):
        reached = verdict.stop[:, n] > 0
        assert (verdict.after(torch.full((30,), n))[(p[:, n] == 0) & reached[:, None]] == 0).all()
