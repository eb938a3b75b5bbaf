import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.core import Budget, Drafter, DraftSampling, Outcome, Request, SamplingParams, Scores
from polydraft.core import geometry as trees
from polydraft.drafters.text.ngram import MOST_PLACES, NgramDrafter, NgramState
from polydraft.errors import InvalidInputError
from polydraft.methods import registry

WIDE = Budget.grown(64, 8, width=4)
CHAIN = Budget.grown(8, 8)


def started(drafter: NgramDrafter, *prompts: list[int]) -> list[NgramState]:
    return drafter.start(
        [Request(str(i), tuple(prompt), SamplingParams(), seed=0) for i, prompt in enumerate(prompts)]
    )


def paths_of(drafter: NgramDrafter, state: NgramState, budget: Budget) -> list[list[int]]:
    """The tokens from below the root to every node of the proposal, node by node."""
    tree = drafter.propose([state], [budget]).tree
    below = [trees.path_to(tree, np.array([n]))[0][0] for n in range(1, tree.num_nodes)]
    return [tree.tokens[0, path].tolist() for path in below]


def emit(drafter: NgramDrafter, states: list[NgramState], accepted: int, extra: int) -> list[NgramState]:
    """Every row keeps the first `accepted` nodes of its chain, then emits `extra`."""
    tree = drafter.propose(states, [CHAIN] * len(states)).tree
    path = np.tile(np.arange(1, accepted + 1), (len(states), 1))
    outcome = Outcome(path, np.full((len(states),), accepted), np.full((len(states),), extra))
    return drafter.observe(states, outcome, Scores(tree, np.zeros((*tree.tokens.shape, 1), np.float32)))


def brute_force_places(tokens: list[int], max_ngram: int, min_ngram: int) -> list[int]:
    """Positions after earlier occurrences of the suffix, by rescanning the text for each length."""
    places = []
    for n in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        found = [at for at in range(n, len(tokens)) if tokens[at - n : at] == tokens[len(tokens) - n :]]
        places += found[::-1][:MOST_PLACES]
    return places


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(texts, texts, st.integers(1, 5), st.integers(1, 5))
def test_the_index_grown_token_by_token_equals_a_rescan_of_the_text(prompt, output, a, b):
    drafter = NgramDrafter(max(a, b), min(a, b))
    [state] = started(drafter, prompt)
    for token in output:
        [state] = emit(drafter, [state], 0, token)
    assert state.tokens.tolist() == prompt + output
    assert [at for _, at in state.places()] == brute_force_places(prompt + output, max(a, b), min(a, b))


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 12), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_proposals_keep_to_the_budget_and_copy_the_text(prompt, max_nodes, max_depth, width, ends):
    drafter = NgramDrafter(eos_token_ids=(3,) if ends else ())
    [state] = started(drafter, prompt)
    budget = Budget.grown(max_nodes, max_depth, width)
    tree = drafter.propose([state], [budget]).tree
    paths = paths_of(drafter, state, budget)
    leaves = set(range(tree.num_nodes)) - set(tree.parents[0].tolist()) - {0}
    assert len(paths) <= max_nodes
    assert int(trees.depths(tree).max()) <= max_depth
    assert len(leaves) <= width
    assert len({tuple(path) for path in paths}) == len(paths)
    text = " ".join(map(str, prompt))
    assert all(" ".join(map(str, [prompt[-1], *path])) in text for path in paths)
    assert not ends or all(3 not in path[:-1] for path in paths)
    trees.check(tree, vocab_size=4)


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    drafter = NgramDrafter(max_ngram=3)
    [state] = started(drafter, [1, 2, 3, 9, 3, 8, 1, 2, 3])
    assert paths_of(drafter, state, Budget.grown(1, 1)) == [[9]]


def test_a_suffix_that_is_new_falls_back_to_a_shorter_one():
    drafter = NgramDrafter(max_ngram=3)
    [state] = started(drafter, [2, 3, 9, 5, 7, 2, 3])
    assert paths_of(drafter, state, Budget.grown(2, 2)) == [[9], [9, 5]]
    [state] = started(NgramDrafter(max_ngram=3, min_ngram=3), [2, 3, 9, 5, 7, 2, 3])
    assert paths_of(NgramDrafter(max_ngram=3, min_ngram=3), state, CHAIN) == []


def test_the_latest_of_equal_matches_wins():
    drafter = NgramDrafter()
    [state] = started(drafter, [1, 2, 5, 1, 2, 6, 1, 2])
    assert paths_of(drafter, state, Budget.grown(1, 1)) == [[6]]


def test_a_wider_budget_merges_several_continuations():
    drafter = NgramDrafter()
    [state] = started(drafter, [1, 2, 5, 8, 1, 2, 5, 7, 1, 2, 6, 1, 2])
    assert paths_of(drafter, state, Budget.grown(9, 2, width=3)) == [[6], [6, 1], [5], [5, 7], [5, 8]]


def test_a_continuation_runs_into_the_suffix_but_not_past_the_end():
    drafter = NgramDrafter()
    [state] = started(drafter, [4, 5, 4, 5])
    assert paths_of(drafter, state, CHAIN) == [[4], [4, 5]]


def test_a_repeated_token_is_drafted_as_deep_as_it_was_repeated():
    drafter = NgramDrafter(max_ngram=2)
    [state] = started(drafter, [7] * 6)
    assert paths_of(drafter, state, CHAIN)[-1] == [7] * 5


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3, 4]])
def test_a_text_without_repetition_gives_an_empty_draft(prompt):
    drafter = NgramDrafter()
    draft = drafter.propose(started(drafter, prompt), [CHAIN])
    assert draft.tree.tokens.tolist() == [[prompt[-1]]]


def test_a_draft_ends_at_end_of_sequence():
    drafter = NgramDrafter(eos_token_ids=(9,))
    [state] = started(drafter, [1, 2, 9, 4, 1, 2])
    assert paths_of(drafter, state, CHAIN) == [[9]]


def test_rejected_tokens_leave_no_trace():
    drafter = NgramDrafter()
    [state] = started(drafter, [1, 2, 5, 6, 1, 2])
    [state] = emit(drafter, [state], accepted=1, extra=3)
    [fresh] = started(drafter, [1, 2, 5, 6, 1, 2, 5, 3])
    assert (state.tokens.tolist(), state.places()) == (fresh.tokens.tolist(), fresh.places())


def test_proposing_twice_gives_the_same_draft_and_changes_nothing():
    drafter = NgramDrafter()
    states = started(drafter, [1, 2, 3, 1, 2], [1, 1, 1])
    first, second = (drafter.propose(states, [WIDE, WIDE]).tree for _ in range(2))
    assert np.array_equal(first.tokens, second.tokens)
    for state, fresh in zip(states, started(drafter, [1, 2, 3, 1, 2], [1, 1, 1]), strict=True):
        assert (state.tokens.tolist(), state.places()) == (fresh.tokens.tolist(), fresh.places())


def test_requests_do_not_see_each_other():
    drafter = NgramDrafter()
    states = started(drafter, [1, 2, 3, 4], [1, 2])
    draft = drafter.propose(states, [CHAIN, CHAIN])
    assert draft.tree.tokens.tolist() == [[4], [2]]


def test_rows_of_a_batch_are_padded_and_equal_to_those_alone():
    drafter = NgramDrafter()
    prompts = [[1, 2, 3, 1, 2], [5], [7, 8, 7, 9, 7]]
    states = started(drafter, *prompts)
    budgets = [CHAIN, CHAIN, WIDE]
    together = drafter.propose(states, budgets).tree
    for b, (state, budget) in enumerate(zip(states, budgets, strict=True)):
        alone = drafter.propose([state], [budget]).tree
        assert np.array_equal(trees.subtree(together, b).tokens, alone.tokens)
        assert np.array_equal(trees.subtree(together, b).parents, alone.parents)


def test_the_draft_declares_that_nothing_was_sampled():
    drafter: Drafter = NgramDrafter()
    draft = drafter.propose(started(NgramDrafter(), [1, 2, 1]), [CHAIN])
    assert draft.sampling is DraftSampling.POINT_MASS
    assert drafter.info.draft_sampling == {draft.sampling}
    assert draft.shape in drafter.info.shapes
    assert draft.probs is None
    assert bool((draft.rows == -1).all())


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (2, 3), (3, 0)])
def test_lengths_out_of_range_are_refused(max_ngram, min_ngram):
    with pytest.raises(InvalidInputError, match="1 <= min_ngram <= max_ngram"):
        NgramDrafter(max_ngram, min_ngram)


@pytest.mark.parametrize("length", [500, 20_000])
def test_a_round_reads_nothing_of_the_text_but_the_places_of_its_suffixes(length):
    text = [i * i % 97 for i in range(length)]
    drafter = NgramDrafter()
    (whole,) = started(drafter, text)
    (spoilt,) = started(drafter, text)
    read = {at + k for _, at in whole.places() for k in range(-4, WIDE.max_depth)} | set(
        range(length - 4, length)
    )
    spoilt.arrays.text[sorted(set(range(length)) - read)] = -1
    assert len(read) < 500 == max(500, len(read))
    assert paths_of(drafter, spoilt, WIDE) == paths_of(drafter, whole, WIDE) != []


@pytest.mark.parametrize("length", [1 << 14, (1 << 14) + 1])
def test_a_token_of_history_costs_at_most_16_bytes(length):
    (state,) = started(NgramDrafter(), np.random.default_rng(0).integers(0, 2048, length).tolist())
    assert 8 <= state.num_bytes / state.num_tokens <= 16.1


def test_the_match_rule_keeps_the_distribution_whatever_the_text_suggested():
    drafter = NgramDrafter()
    draft = drafter.propose(started(drafter, [1, 2, 0, 1, 2, 3, 1, 2]), [WIDE])
    p = torch.rand(
        1, draft.tree.num_nodes, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).numpy()
    p = p / p.sum(-1, keepdims=True)
    verdict = registry.verifier("match")(draft, p)
    emitted = verdict.stop[0, 0] * verdict.after(np.array([0]))[0]
    for n, path in enumerate(paths_of(drafter, *started(drafter, [1, 2, 0, 1, 2, 3, 1, 2]), WIDE), start=1):
        emitted[path[0]] += verdict.stop[0, n]
    np.testing.assert_allclose(emitted, p[0, 0], rtol=0, atol=1e-12)
