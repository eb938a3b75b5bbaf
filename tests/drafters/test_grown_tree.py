"""Trees of candidates: what is compiled grows what is grown node by node."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, add_best, copy_onto, is_full, num_paths, point_mass

nodes = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2), st.floats(0, 1)), max_size=25)
budgets = st.builds(Budget.grown, st.integers(0, 12), st.integers(0, 5), st.integers(1, 4))
ANY = Budget.grown(99, 99, 99)


def grown(rows, budget=ANY, eos=()):
    """A tree of (parent, token, score), each on a node that is there."""
    tree = GrownTree.rooted(1, budget, eos)
    for parent, token, score in rows:
        tree.add(parent % tree.size, token, score)
    return tree


@settings(max_examples=300, deadline=None)
@given(nodes, nodes, budgets, st.sampled_from([(), (1,)]))
def test_a_tree_is_copied_onto_another_as_it_is_added_node_by_node(first, second, budget, eos):
    fast = GrownTree.rooted(1, budget, eos)
    slow = GrownTree.rooted(1, budget, eos)
    for other in (grown(first), grown(second)):
        copy_onto(fast.arrays, other.arrays)
        places = [0]
        for parent, token, score in list(zip(other.parents, other.tokens, other.scores, strict=True))[1:]:
            places.append(-1 if places[parent] < 0 else slow.add(places[parent], token, score))
        assert (fast.tokens, fast.parents, fast.scores) == (slow.tokens, slow.parents, slow.scores)
        assert is_full(fast.arrays) == is_full(slow.arrays)
        assert (
            num_paths(fast.arrays)
            == num_paths(slow.arrays)
            == len(set(range(1, fast.size)) - set(fast.parents))
        )


@settings(max_examples=300, deadline=None)
@given(nodes, nodes, budgets, st.sampled_from([(), (1,)]))
def test_the_best_candidate_is_the_heaviest_that_the_tree_takes(rows, offered, budget, eos):
    tree = grown(rows, budget, eos)
    parents = np.array([parent % (tree.size + 1) - 1 for parent, _, _ in offered], np.int64)
    tokens, masses = (
        np.array(x) for x in ([t + 3 for _, t, _ in offered], [round(m, 2) for *_, m in offered])
    )
    order = sorted((i for i in range(len(offered)) if parents[i] >= 0), key=lambda i: (-masses[i], i))
    expected = next(
        (i for i in order if grown(rows, budget, eos).add(int(parents[i]), int(tokens[i])) > 0), -1
    )
    best, node = add_best(
        tree.arrays, parents, masses, tokens.astype(np.int64), masses.astype(float), len(offered)
    )
    assert best == expected
    assert (node, tree.size) == (
        (-1, grown(rows, budget, eos).size) if best < 0 else (tree.size - 1, tree.size)
    )
    assert best < 0 or (parents[best] == -1 and tree.tokens[-1] == tokens[best])


def test_trees_of_different_sizes_are_padded_behind():
    small = GrownTree.rooted(5, Budget.grown(3, 3))
    large = GrownTree.rooted(6, Budget.grown(3, 3))
    large.add_path([7, 8])
    draft = point_mass([small, large])
    assert draft.tree.tokens.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert draft.tree.parents.tolist() == [[-1, -1, -1], [-1, 0, 1]]
    assert bool((draft.rows == -1).all())
