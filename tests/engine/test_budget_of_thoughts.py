"""A budget of thoughts is a mask: no path of a drafted tree thinks longer, and the distribution is the model's until then."""

import itertools

import numpy as np
import pytest

from polydraft.core.thinking import Thinking
from polydraft.engine.thoughts import BudgetOfThoughts
from polydraft.models import load, pair

WORDS = load.load_tokenizer(str(pair.target_folder()))
A, B = (WORDS(text, add_special_tokens=False)["input_ids"][0] for text in "ab")


def budgeted(budget, *, closing="b", message="", opened=True):
    thinking = Thinking("a", closing, opened=opened, budget=budget, message=message)
    return BudgetOfThoughts(None, thinking, WORDS, len(WORDS)).constraint(1)


@pytest.mark.parametrize("budget", range(4))
@pytest.mark.parametrize("opened", [True, False])
def test_every_path_of_two_tokens_has_the_mass_that_the_budget_leaves(budget, opened):
    """Enumerated: behind each text of a and b up to 5 tokens, what may follow is all, or the last mark where the thoughts are at their budget."""
    for length in range(6):
        for path in itertools.product((A, B), repeat=length):
            thoughts = path if opened else path[1:]
            thinks = opened or path[:1] == (A,)
            reached = thinks and B not in thoughts and len(thoughts) >= budget
            if reached and len(thoughts) > budget:
                continue  # no such text may be written
            row = budgeted(budget, opened=opened).allowed([0, *path], [[0, *path][-1]], [-1])[0]
            assert row[B] and row.sum() == (1 if reached else len(WORDS)), path


@pytest.mark.parametrize("message", ["", " So."])
def test_the_end_is_forced_token_by_token_at_every_node_of_a_tree_as_on_its_own_path(message):
    end = WORDS(f"{message}</end>", add_special_tokens=False)["input_ids"]
    tokens = [0, A, A, *end, B, A]
    parents = [-1, 0, 1, *range(2, 2 + len(end)), 2 + len(end), 0]
    rows = budgeted(2, closing="</end>", message=message).allowed([0], tokens, parents)
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        paths[node] = [*paths[parents[node]], tokens[node]]
        alone = budgeted(2, closing="</end>", message=message)
        assert np.array_equal(rows[node], alone.allowed(paths[node], paths[node][-1:], [-1])[0]), node
    assert [rows[node].argmax() for node in range(2, 2 + len(end))] == end
    assert all(rows[node].sum() == 1 for node in range(2, 2 + len(end))) and rows[-1].all() and rows[-2].all()
