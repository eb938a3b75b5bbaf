"""The most probable tree of a draft model: equal to its reference, a function of the past, exact as point masses and only so."""

import numpy as np
import pytest

from polydraft.core import Budget, DraftSampling, Outcome, Scores, TreeShape
from polydraft.drafters.model import best_first
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.models import load, pair
from polydraft.models.slot_pool import Slots
from polydraft.sampling.softmax import softmax
from polydraft.testing import Grown, Tables, measure
from polydraft.theory.trees import grow_by_probability
from tests.drafters.sessions import models, requests
from tests.engine.tables import TableModel
from tests.exactness.harness import by_depth


def reference(model, text, budget, temperature=1.0):
    """The tree of the theory for a table model, root included."""

    def row(path):
        before, last = [*text, *path][-2:] if len(text) + len(path) > 1 else (0, text[-1])
        return softmax(model.logits[before, last] / temperature)

    given = {
        "max_nodes": budget.max_nodes,
        "max_depth": budget.max_depth,
        "min_path_prob": budget.min_path_prob,
    }
    tokens, parents, _ = grow_by_probability(row, **given)
    return [text[-1], *tokens[1:]], parents


def drafted(budgets, prompts, **params):
    small = TableModel(7, seed=1, max_num_seqs=len(prompts))
    drafter = ModelDrafter(small, "top_k")
    states = drafter.start(requests(*prompts, **params))
    draft = drafter.propose(states, budgets)
    again = drafter.propose(states, budgets)
    assert np.array_equal(draft.tree.tokens, again.tree.tokens) and np.array_equal(
        draft.tree.parents, again.tree.parents
    )
    return small, draft.tree.lists


def without_padding(tokens, parents):
    size = 1 + sum(parent >= 0 for parent in parents)
    return tokens[:size], parents[:size]


@pytest.mark.parametrize("min_path_prob", [0.0, 0.02, 0.1, 1.0])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (6, 3), (20, 4), (40, 2)])
def test_the_tree_is_the_references_where_the_beam_does_not_bind(nodes, depth, min_path_prob):
    prompts = [[1, 2, 3], [4], [0, 0]]
    budget = Budget.grown(nodes, depth, nodes, min_path_prob=min_path_prob)
    small, (tokens, parents) = drafted([budget] * 3, prompts)
    for b, prompt in enumerate(prompts):
        assert without_padding(tokens[b], parents[b]) == reference(small, prompt, budget)


@pytest.mark.parametrize(("temperature", "reads_as"), [(0.5, 0.5), (0.0, best_first.COLD)])
def test_the_distribution_is_the_requests_and_tempered_for_a_greedy_one(temperature, reads_as):
    budget = Budget.grown(12, 3, 12)
    small, (tokens, parents) = drafted([budget], [[1, 2]], temperature=temperature)
    assert (tokens[0], parents[0]) == reference(small, [1, 2], budget, reads_as)


def test_rows_of_a_batch_grow_as_they_would_alone_in_one_pass_a_depth():
    prompts = [[1, 2, 3], [4], [0, 0], [5]]
    budgets = [
        Budget.grown(9, 3, 2),
        Budget.grown(4, 4, 1),
        Budget.grown(0, 0),
        Budget.grown(16, 2, 8, min_path_prob=0.05),
    ]
    small, (tokens, parents) = drafted(budgets, prompts)
    assert small.passes == 2 * 4
    for b, prompt in enumerate(prompts):
        _, (alone, above) = drafted([budgets[b]], [prompt])
        assert without_padding(tokens[b], parents[b]) == (alone[0], above[0])


def test_a_beam_of_one_expands_the_most_probable_chain_and_keeps_its_neighbours():
    _, (_, (parents,)) = drafted([Budget.grown(10, 3, 1)], [[1, 2]])
    assert len({p for p in parents if p >= 0}) == 3 and max(map(parents.count, parents[1:])) > 1


def test_what_is_pruned_or_truncated_away_is_not_drafted():
    _, ((tokens,), (parents,)) = drafted([Budget.grown(30, 2, 8)], [[1, 2]], top_k=2)
    assert parents.count(0) == 2 and len(tokens) == 1 + 2 + 4
    assert len(drafted([Budget.grown(30, 2, 8)], [[1, 2]], repetition_penalty=1.5)[1][0][0]) == 31


@pytest.mark.parametrize("min_path_prob", [-0.1, 1.5, float("nan")])
def test_an_impossible_path_probability_is_refused(min_path_prob):
    with pytest.raises(InvalidInputError, match="a probability in"):
        Budget.grown(4, 2, min_path_prob=min_path_prob)


def test_a_scored_row_is_not_fed_again_even_where_none_of_its_children_was_kept():
    small = models()[1]
    drafter = ModelDrafter(small, "top_k")
    (state,) = drafter.start(requests([1, 2]))
    tree = drafter.propose([state], [Budget.grown(1, 2)]).tree
    top = tree.lists.tokens[0][1]
    outcome = Outcome(np.array([[1]]), np.array([1]), np.array([0]))
    (state,) = drafter.observe([state], outcome, Scores(tree, np.zeros((1, 2, 5), np.float32)))
    assert state.pending == (0,) and small.texts[state.slot] == [1, 2, top]


def test_the_embedded_models_tree_after_rounds_is_that_of_a_fresh_cache():
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=4)
    drafter = ModelDrafter(model, "top_k")
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    texts = [load.encode(tokenizer, p.text) for p in pair.prompts()[:2]]
    states = drafter.start(requests(*texts))
    budgets = [Budget.grown(12, 5, 3), Budget.grown(8, 3, 4)]
    for deepest in (5, 0, 2, 9):
        tree = drafter.propose(states, budgets).tree
        paths = [path_down(*(rows[b] for rows in tree.lists), deepest) for b in range(2)]
        longest = max(map(len, paths))
        outcome = Outcome(
            np.array([[*p, *[-1] * (longest - len(p))] for p in paths], dtype=np.int64).reshape(2, longest),
            np.array([len(p) for p in paths]),
            np.array([7, 11]),
        )
        texts = [[*text, *new] for text, new in zip(texts, outcome.emitted(tree), strict=True)]
        states = drafter.observe(states, outcome, Scores(tree, np.zeros((2, tree.num_nodes, 1), np.float32)))
    fresh = drafter.start(requests(*texts))
    for one, other, budget in zip(states, fresh, budgets, strict=True):
        assert drafter.propose([one], [budget]).tree.lists == drafter.propose([other], [budget]).tree.lists


def path_down(tokens, parents, deepest):
    """First children from the root down."""
    path = [0]
    while len(path) <= deepest and path[-1] in parents[1:]:
        path.append(parents.index(path[-1], 1))
    return path[1:]


def top_children(tables, reported):
    """The two most probable children of the root, as point masses or passed off as draws from q."""
    q = tables.row("q", ())
    best = [int(t) for t in np.argsort(-q, kind="stable")[:2]]
    return [Grown(1.0, [0, *best], [-1, 0, 0], [(), *((t,) for t in best)], [])], DraftSampling[reported]


@pytest.mark.parametrize("seed", range(4))
def test_top_children_passed_off_as_draws_from_q_bias_the_output(seed):
    tables = Tables(3, seed)
    for reported, rule, exact in (
        ("POINT_MASS", "match", True),
        ("WITHOUT_REPLACEMENT", "recursive_wor", False),
        ("IID", "recursive", False),
    ):
        drafts, distribution = top_children(tables, reported)
        found = measure(verifier(rule), tables, distribution, TreeShape.GROWN, by_depth(), 1, drafts)
        assert (found.error < 1e-12) if exact else (found.tv > 0.02), (reported, found.tv)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"logit_bias": {5: 3.0}}]
)
def test_the_compiled_tree_is_the_one_grown_depth_by_depth(params):
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=8)
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    texts = [load.encode(tokenizer, p.text) for p in pair.prompts()[:4]]
    budgets = [
        Budget.grown(12, 5, 3),
        Budget.grown(5, 2, 5),
        Budget.grown(0, 4),
        Budget.grown(30, 6, 2, min_path_prob=0.02),
    ]
    compiled = ModelDrafter(model, "top_k").start(requests(*texts, **params))
    drafter = ModelDrafter(model, "top_k")
    drafter.slots = Slots(model, [4, 5, 6, 7])
    grown = drafter.start(requests(*texts, **params))
    for state, num_pending in zip(compiled, (1, 2, 1, 40), strict=True):
        state.cursor.read(state.context, len(state.context) - num_pending)
    asked = (
        [s.slot for s in compiled],
        [s.pending for s in compiled],
        budgets,
        [best_first._warm(s.request.params, g) for s, g in zip(compiled, budgets, strict=True)],
    )
    tree, scores, scored = model.propose_tree(*asked)
    expected, values, rows = best_first._by_depth(model, grown, budgets, ())
    np.testing.assert_allclose(scores, values, rtol=1e-4)
    assert tree.lists == expected.lists
    for one, other in zip(scored, rows, strict=True):  # but for the copies that fill a batch
        assert one[0] == [
            t
            for n, t in enumerate(other[0])
            if n == 0 or (t, other[1][n]) != (other[0][n - 1], other[1][n - 1])
        ]
