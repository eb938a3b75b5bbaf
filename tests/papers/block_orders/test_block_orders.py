"""Orders of block heads: the distribution of a draft is fixed by its order, and passes are counted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from polydraft import Engine
from polydraft.core import Budget, Draft, DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.papers.block_orders.drafter import ORDERS, LeftToRight, revealed
from polydraft.verifiers import pairing
from tests.drafters.sessions import proposed
from tests.heads import test_block
from tests.heads.test_block import (
    BLOCK,
    CHAIN,
    begun,
    both_forms,
    check_a_pause,
    distributions_of,
    drafter_of,
    text,
)

target = test_block.target
net = test_block.net
folder = test_block.folder


@both_forms
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_from_the_left_rows_are_those_of_the_step_that_revealed_and_passes_are_steps(
    net, folder, target, steps, form
):
    ids = text(target, 20)
    drafter = drafter_of(folder, target, form=form, drafter=LeftToRight, steps=steps)
    state, states = begun(drafter, target, ids)
    before = drafter.model.passes
    draft = drafter.propose([state], CHAIN)
    steps = min(steps, BLOCK)
    assert drafter.model.passes - before == steps
    drafted = draft.tree.tokens[0, 1:].tolist()
    block = [None] * BLOCK
    for step in range(steps):
        distribution = distributions_of(net, states, ids[-1], block, len(ids) - 2)
        for j in revealed(
            "left_to_right", step, steps, [j for j in range(BLOCK) if block[j] is None], [], []
        ):
            np.testing.assert_allclose(
                draft.probs[0, int(draft.rows[0, j + 1]), ::3], distribution[j], atol=2e-5, rtol=1e-3
            )
            block[j] = drafted[j]
    assert block == drafted


@pytest.mark.parametrize("order", ORDERS)
def test_the_distribution_of_a_draft_is_known_before_it_is_drawn_and_the_mask_is_never_proposed(
    order, folder, target
):
    drafter = drafter_of(folder, target, drafter=ORDERS[order], steps=3)
    ids = text(target, 20)
    state, _ = begun(drafter, target, ids)
    for length in range(20):
        again = replace(state, context=(*state.context[:-1], length))
        draft = drafter.propose([again], CHAIN)
        assert {draft.sampling} == drafter.info.draft_sampling == ORDERS[order].methods[0].draft_sampling
        assert draft.tree.tokens.max() < target.vocab_size and draft.tree.num_nodes == 1 + BLOCK
        assert (draft.probs is None) == (order != "left_to_right")


def test_random_places_are_revealed_at_the_chance_of_the_schedule_and_all_at_last():
    rng = np.random.default_rng(0)
    counts = np.zeros(4)
    times = 4000
    for _ in range(times):
        masked = [0, 1, 2, 3]
        for step in range(4):
            shown = revealed("random", step, 4, masked, [], rng.random(4).tolist())
            masked = [j for j in masked if j not in shown]
            counts[step] += len(shown)
        assert not masked
    np.testing.assert_allclose(counts / times, 1, atol=0.06)


def test_the_engine_refuses_an_order_out_of_line_with_the_ratio_test():
    for order in ("random", "confidence"):
        assert "match" in pairing.fitting(ORDERS[order].methods[0])
        assert not {"speculative", "block"} & set(pairing.fitting(ORDERS[order].methods[0]))
    assert "speculative" in pairing.fitting(LeftToRight.methods[0])


def test_an_engine_of_confidence_and_the_ratio_test_is_refused(folder, target):
    with pytest.raises(IncompatibleError, match="confidence"):
        Engine.of(
            target, drafter="block:confidence", verifier="speculative", drafter_options={"weights": folder}
        )


P = (np.array([0.5, 0.5]), np.array([[0.3, 0.7], [0.5, 0.5]]))
"""The target's distributions of the first token, and of the second given the first."""
JOINT = np.array([[0.9 * 0.4, 0.3 * 0.6], [0.1 * 0.4, 0.7 * 0.6]])
"""What the denoiser believes of both places."""


def rows_of(order, x):
    """The denoiser's rows at the steps at which the places were revealed."""
    first = JOINT.sum(1)
    second = JOINT.sum(0)
    if order == "together":
        return [first, second]
    return [first, JOINT[x[0]] / first[x[0]]] if order == "left" else [JOINT[:, x[1]] / second[x[1]], second]


def variation(order, rule):
    """Total variation between two emitted tokens and the target's distribution, by enumeration of all drafts of two tokens from two."""
    emitted = np.zeros((2, 2))
    chain = np.array([[-1, 0, 1]])
    for x in product(range(2), repeat=2):
        rows = rows_of(order, x)
        chance = rows[0][x[0]] * rows[1][x[1]]
        tokens = tree.TokenTree.chain(np.array([[0, *x]]))
        draft = Draft(tokens, DraftSampling.IID, TreeShape.CHAIN, np.array(np.array([rows])), chain)
        if rule == "match":
            draft = Draft(tokens, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full((1, 3), -1))
        verdict = registry.verifier(rule)(draft, np.array(np.array([[P[0], P[1][x[0]], [0.5, 0.5]]])))
        after = [verdict.after(np.array([node]))[0] for node in range(2)]
        stop = verdict.stop[0] * chance
        emitted += stop[0] * after[0][:, None] * P[1]
        emitted[x[0]] += stop[1] * after[1]
        emitted[x] += stop[2]
    return abs(emitted - P[0][:, None] * P[1]).sum() / 2


def test_rows_that_saw_a_token_to_the_right_bias_the_ratio_test_and_no_other_rows_do():
    assert variation("right", "speculative") == pytest.approx(0.116, abs=1e-6)
    assert variation("left", "speculative") == pytest.approx(0, abs=1e-12)
    assert variation("together", "speculative") == pytest.approx(0, abs=1e-12)
    assert variation("right", "match") == pytest.approx(0, abs=1e-12)


@both_forms
def test_what_was_emitted_in_a_pause_is_cached_in_pieces_and_drafts_the_same(folder, target, form):
    check_a_pause(drafter_of(folder, target, form=form, drafter=LeftToRight), target)


def test_no_steps_are_refused_and_longer_blocks_are_cut(folder, target):
    with pytest.raises(InvalidInputError, match="steps=0"):
        drafter_of(folder, target, drafter=ORDERS["confidence"], steps=0)
    for drafter_class in ORDERS.values():
        drafter = drafter_of(folder, target, drafter=drafter_class)
        state, _ = begun(drafter, target, text(target, 20))
        assert proposed(drafter, [state], [Budget.fixed(tree.chain(9))]).tree.num_nodes == 1 + BLOCK


def test_a_block_drafter_and_its_orders_are_siblings_in_one_head(folder, target):
    drafter = drafter_of(folder, target)
    for order, drafter_class in ORDERS.items():
        sibling = drafter.sibling(order)
        assert type(sibling) is drafter_class and sibling.model is drafter.model
        assert type(sibling.sibling("chain")) is type(drafter)
