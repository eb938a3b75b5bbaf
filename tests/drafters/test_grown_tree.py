"""Trees of candidates: taken all at once they are what they are one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, point_mass

candidates = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.floats(0, 1)), max_size=25)
budgets = st.builds(Budget, st.integers(0, 12), st.integers(0, 5), st.integers(1, 4))


def arrays(rows):
    parents = [p % (i + 1) - 1 for i, (_, p, _) in enumerate(rows)]
    return np.array([r[0] for r in rows], np.int64), np.array(parents, np.int64), np.array([r[2] for r in rows])


def one_by_one(grown, tokens, parents, scores):
    nodes = []
    for token, parent, score in zip(tokens.tolist(), parents.tolist(), scores.tolist(), strict=True):
        above = 0 if parent < 0 else nodes[parent]
        nodes.append(-1 if above < 0 else grown.add(above, token, score))


@settings(max_examples=300, deadline=None)
@given(candidates, candidates, budgets, st.sampled_from([(), (1,)]))
def test_candidates_taken_at_once_are_what_they_are_one_by_one(first, second, budget, eos):
    fast, slow = GrownTree(1, budget, eos), GrownTree(1, budget, eos)
    for rows in (first, second):
        given = arrays(rows)
        fast.add_ranked(*given)
        one_by_one(slow, *given)
        assert (fast.tokens, fast.parents, fast.scores) == (slow.tokens, slow.parents, slow.scores)
        assert (fast.num_paths, fast.full) == (slow.num_paths, slow.full)


def test_trees_of_different_sizes_are_padded_behind():
    small, large = GrownTree(5, Budget.grown(3, 3)), GrownTree(6, Budget.grown(3, 3))
    large.add_path([7, 8])
    draft = point_mass([small, large])
    assert draft.tree.tokens.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert draft.tree.parents.tolist() == [[-1, -1, -1], [-1, 0, 1]]
    assert bool((draft.rows == -1).all())
