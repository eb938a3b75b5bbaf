"""Rows of batches are cut, joined and put in their places, whatever their widths and whatever some of them lack."""

from dataclasses import replace

import torch

from polydraft.core import Draft, DraftSampling, Outcome, TokenTree, TreeShape
from polydraft.core.batch import scatter, select


def drawn(tokens, V=4):
    """A sampled chain."""
    tree = TokenTree.chain(torch.tensor([tokens]))
    probs = torch.full((1, len(tokens) - 1, V), 1 / V, dtype=torch.float64)
    return Draft(
        tree,
        DraftSampling.IID,
        TreeShape.CHAIN,
        probs,
        tree.parents,
        confidence=torch.full(tree.tokens.shape, 0.5),
    )


def test_scattered_rows_are_those_of_their_parts_and_padded():
    rows = [[2], [0, 1]]
    parts = [Outcome.of_paths([[1, 3]], [9]), Outcome.of_paths([[], [2]], [8, 7])]
    whole = scatter(rows, parts)
    assert whole.lists == ([[], [2], [1, 3]], [8, 7, 9]) and whole.path.tolist() == [
        [-1, -1],
        [2, -1],
        [1, 3],
    ]
    assert [select(whole, group).lists for group in rows] == [part.lists for part in parts]


def test_bare_rows_beside_sampled_ones_have_their_sampling_and_uniform_rows():
    bare = Draft.bare(torch.tensor([6, 7]))
    deep = drawn([5, 1, 2])
    short = drawn([4, 3])
    whole = Draft.scatter([[3, 1], [0], [2]], [bare, deep, short])
    assert whole.tree.tokens.tolist() == [[5, 1, 2], [7, 0, 0], [4, 3, 0], [6, 0, 0]]
    assert (whole.sampling, whole.shape) == (DraftSampling.IID, TreeShape.CHAIN) and whole.rows[
        1
    ].tolist() == [-1] * 3
    assert (
        whole.probs is not None
        and whole.probs.dtype == torch.float64
        and torch.equal(whole.probs.sum(-1), torch.ones(4, 2, dtype=torch.float64))
    )
    assert whole.confidence is not None and whole.confidence.tolist() == [
        [0.5] * 3,
        [1.0] * 3,
        [0.5, 0.5, 1.0],
        [1.0] * 3,
    ]


def test_what_some_drafts_do_not_say_their_batch_does_not_say():
    deep = drawn([5, 1, 2])
    assert Draft.scatter([[0], [1]], [replace(deep, confidence=None), deep]).confidence is None
