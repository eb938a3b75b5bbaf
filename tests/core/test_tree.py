import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.core import TokenTree
from polydraft.core import geometry as trees
from polydraft.errors import InvalidInputError


@st.composite
def token_trees(draw) -> TokenTree:
    """Batches of ragged trees over two tokens, so that equal prefixes are common."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        parents = [-1, *(draw(st.integers(0, n)) for n in range(draw(st.integers(0, 9))))]
        rows.append(([draw(st.integers(0, 1)) for _ in parents], parents))
    return trees.pad(rows)


def path_nodes(tree: TokenTree, b: int, n: int) -> list[int]:
    """Nodes from the root to n."""
    above = int(tree.parents[b, n])
    return [*path_nodes(tree, b, above), n] if above >= 0 else [n]


def prefix(tree: TokenTree, b: int, n: int) -> tuple[int, ...]:
    return tuple(tree.tokens[b, path_nodes(tree, b, n)].tolist())


def nodes_of(tree: TokenTree) -> list[tuple[int, int]]:
    return [(b, n) for b, n in np.argwhere(tree.is_node).tolist()]


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_depth_ancestors_and_paths_follow_the_parents(tree):
    depths = trees.depths(tree)
    mask = trees.ancestors(tree)
    for b, n in nodes_of(tree):
        path = path_nodes(tree, b, n)
        assert depths[b, n] == len(path) - 1
        assert np.flatnonzero(mask[b, n]).tolist() == sorted(path)
        found, length = trees.path_to(trees.subtree(tree, b), np.array([n]))
        assert found[0].tolist() == path[1:]
        assert length.item() == len(path) - 1


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_padding_has_no_depth_and_sees_only_itself(tree):
    padding = ~tree.is_node
    assert bool((trees.depths(tree)[padding] == -1).all())
    assert np.array_equal(
        trees.ancestors(tree)[padding],
        np.broadcast_to(np.eye(tree.num_nodes, dtype=np.bool_), trees.ancestors(tree).shape)[padding],
    )


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_two_nodes_are_copies_exactly_if_they_spell_the_same_prefix(tree):
    first = trees.first_copies(tree)
    for b, n in nodes_of(tree):
        expected = min(m for c, m in nodes_of(tree) if c == b and prefix(tree, b, m) == prefix(tree, b, n))
        assert int(first[b, n]) == expected


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_the_scored_tree_holds_every_prefix_once_and_every_node_finds_its_own(tree):
    unique = trees.dedup(tree)
    trees.check(unique.tree, vocab_size=2)
    for b in range(tree.batch_size):
        drafted = {prefix(tree, b, n) for c, n in nodes_of(tree) if c == b}
        scored = [prefix(unique.tree, b, m) for c, m in nodes_of(unique.tree) if c == b]
        assert sorted(scored) == sorted(drafted)
    for b, n in nodes_of(tree):
        assert prefix(unique.tree, b, int(unique.row[b, n])) == prefix(tree, b, n)
    for b, m in nodes_of(unique.tree):
        assert m in unique.row[b]


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_expanding_scored_rows_gives_copies_equal_rows(tree):
    unique = trees.dedup(tree)
    rows = torch.rand(*unique.tree.tokens.shape, 3).numpy()
    expanded = unique.expand(rows)
    for b, n in nodes_of(tree):
        assert np.array_equal(expanded[b, n], rows[b, unique.row[b, n]])


@settings(deadline=None, max_examples=60)
@given(token_trees())
def test_children_are_the_draws_of_a_context_in_order_with_copies_pooled(tree):
    kids = trees.children(tree)
    for b, n in nodes_of(tree):
        here = prefix(tree, b, n)
        is_first = int(trees.first_copies(tree)[b, n]) == n
        draws = [
            m
            for c, m in nodes_of(tree)
            if c == b and m > 0 and prefix(tree, b, int(tree.parents[b, m])) == here
        ]
        assert [m for m in kids[b, n].tolist() if m >= 0] == (draws if is_first else [])


def test_siblings_that_are_equal_stay_two_draws_of_the_draft():
    tree = trees.pad([([5, 7, 7], [-1, 0, 0])])
    assert trees.children(tree)[0, 0].tolist() == [1, 2]
    assert trees.dedup(tree).tree.num_nodes == 2
    assert tree.num_nodes == 3


def test_a_chain_is_one_path_and_roots_are_trees_without_a_draft():
    assert trees.depths(TokenTree.chain(np.array([[4, 5, 6]]))).tolist() == [[0, 1, 2]]
    roots = TokenTree.roots(np.array([4, 5]))
    assert (roots.tokens.tolist(), roots.parents.tolist()) == ([[4], [5]], [[-1], [-1]])


def test_a_row_of_a_padded_batch_is_the_tree_it_was_made_from():
    rows = [([1], [-1]), ([1, 2, 3], [-1, 0, 0])]
    batch = trees.pad(rows)
    for b, (tokens, parents) in enumerate(rows):
        row = trees.subtree(batch, b)
        assert (row.tokens[0].tolist(), row.parents[0].tolist()) == (tokens, parents)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2, 3], [-1, 2, 0], "Sort the nodes topologically"),
        ([1, 2, 3], [0, 0, 0], "expected -1 at node 0"),
        ([1, 2, 3], [-1, -1, 0], "padding .* only after the last node"),
        ([1, 9, 3], [-1, 0, 0], "token id 9 .* expected 0 <= id < 9"),
        ([1, -2, 3], [-1, 0, 0], "token id -2"),
    ],
)
def test_trees_that_are_not_well_formed_are_refused(tokens, parents, message):
    with pytest.raises(InvalidInputError, match=message):
        trees.check(TokenTree(np.array([tokens]), np.array([parents])), vocab_size=9)


def test_rows_of_different_lengths_without_copies_are_scored_as_they_are():
    ragged = trees.pad([([5, 7, 8, 9], [-1, 0, 1, 2]), ([6], [-1]), ([4, 2], [-1, 0])])
    assert trees.dedup(ragged).same
    copied = trees.pad([([5, 7, 8, 9], [-1, 0, 1, 2]), ([6, 3, 3], [-1, 0, 0])])
    assert not trees.dedup(copied).same
