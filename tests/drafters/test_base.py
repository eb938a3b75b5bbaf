"""What drafters share: rounds told as one, and what a round emitted."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.core import Outcome, TokenTree
from polydraft.core import geometry as trees
from polydraft.drafters.base import as_one_step

texts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(deadline=None)
@given(texts, st.data())
def test_rounds_told_as_one_emit_all_their_tokens(missed, data):
    last = [data.draw(st.integers(0, 9)) for _ in missed]
    outcome, scores = as_one_step(last, missed)
    trees.check(scores.tree, 10, np.array(last))
    assert outcome.emitted(scores.tree) == missed
    assert (
        scores.tree.is_node.sum(1).tolist()
        == ((outcome.path >= 0).sum(1) + 1).tolist()
        == list(map(len, missed))
    )
    assert scores.logits.shape == (*scores.tree.tokens.shape, 0)


def test_what_a_round_emitted_is_read_off_branches_too():
    tree = TokenTree(np.array([[5, 6, 7, 8], [5, 1, 2, 0]]), np.array([[-1, 0, 0, 2], [-1, 0, 0, -1]]))
    outcome = Outcome(np.array([[2, 3], [-1, -1]]), np.array([2, 0]), np.array([9, 4]))
    assert outcome.emitted(tree) == [[7, 8, 9], [4]]
