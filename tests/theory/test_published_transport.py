"""SpecTr-GBV and UniVer, as far as their rules can be read: what the one states is no optimum, and the other's plan is traversal's."""

from itertools import product

import numpy as np
import pytest

from polydraft.core import DraftSampling
from polydraft.testing import sibling_draws
from polydraft.theory import acceptance, bounds, optimum
from polydraft.theory.bounds import best_acceptance
from polydraft.verifiers.lift.contexts import Contexts
from polydraft.verifiers.traversal import tries

PLUS_ONE = DraftSampling.GREEDY_PLUS_ONE
P, Q = np.array([0.5, 0.5]), np.array([0.9, 0.1])


def stated(p, q, K):
    """What SpecTr-GBV accepts of one token by its theorem: each target token's share of being drafted."""
    ratio = np.minimum(np.divide(q, p, out=np.ones_like(q), where=p > 0), 1)
    return p * (1 - (1 - ratio) ** K)


def test_the_stated_length_is_the_sum_over_all_paths():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(3), (2, 3))
    total = 1.0
    for depth in (1, 2):
        for path in product(range(3), repeat=depth):
            masses = [np.prod([rows[before, x] for before, x in zip((0, *path), path, strict=False)]) for rows in (p, q)]  # fmt: skip
            total += stated(*(np.array([mass]) for mass in masses), 3).sum()
    rows = [lambda path, rows=rows: rows[path[-1] if path else 0] for rows in (p, q)]
    mean, error = bounds.stated_by_spectr_gbv(bounds.TargetTexts(*rows, 2, 3000, rng), 3)
    assert abs(mean - total) < 5 * error


def test_the_stated_acceptance_is_below_the_optimum():
    """And it is attained: .69 by the draw of largest p/q."""
    assert stated(P, Q, 2).sum() == pytest.approx(0.68)
    assert acceptance.max_ratio(P, Q, 2) == pytest.approx(optimum.with_replacement(P, Q, 2).alpha)
    assert acceptance.max_ratio(P, Q, 2) == pytest.approx(0.69)
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, q = rng.dirichlet(np.full(4, 0.6), 2)
        assert stated(p, q, 3).sum() <= optimum.with_replacement(p, q, 3).alpha + 1e-12


def one_token_output(p, q, K):
    """Of the acceptance test that an implementation in public has: each draft is accepted with the stated share of its chance to be drafted."""
    output = np.zeros_like(p)
    accept = stated(p, q, K) / (1 - (1 - q) ** K)
    residual = p * (1 - np.minimum(1, q / p) ** K)
    for draws in product(range(len(p)), repeat=K):
        remaining = np.prod(q[list(draws)])
        for x in draws:
            output[x] += remaining * accept[x]
            remaining *= 1 - accept[x]
        output += remaining * residual / residual.sum()
    return output


def test_tests_of_one_draft_after_the_other_do_not_reach_it():
    """With one draft it is the ratio test; with two the first draft is asked as if the other could not be accepted."""
    assert one_token_output(P, Q, 1) == pytest.approx(P)
    assert np.abs(one_token_output(P, Q, 2) - P).sum() / 2 == pytest.approx(0.159, abs=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("weight", [1.0, 0.7, 0.3])
def test_traversal_is_the_conditional_transport_of_greedy_drafts(weight, n):
    """The children of a context of weight w are entered with the mass of the best transport from the drafts to w p, as UniVer's abstract has it."""
    rng = np.random.default_rng(n)
    for _ in range(20):
        p, q = rng.dirichlet(np.full(5, 0.6), 2)
        draws = list(sibling_draws(PLUS_ONE, [q], n))
        chances = np.array([chance for chance, _ in draws])
        tokens = np.array([x for _, x in draws])
        M = len(draws)
        at = Contexts(np.full(M, weight), np.tile(p, (M, 1)), np.tile(q, (M, 1)), tokens, PLUS_ONE, np.zeros_like(tokens))  # fmt: skip
        with np.errstate(divide="ignore", invalid="ignore"):
            decided = tries(at)
        below = 1 - np.prod(1 - np.where(decided.turns >= 0, decided.weights, 0.0), axis=1)
        assert chances @ below == pytest.approx(best_acceptance(weight * p, draws), abs=1e-9)
