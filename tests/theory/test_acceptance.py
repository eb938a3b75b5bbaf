"""Optimal acceptance: closed forms against linear programmes and all subsets, and no rule above its optimum."""

import numpy as np
import pytest

from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.testing import sibling_draws
from polydraft.theory import acceptance, bounds, optimum


def distributions(seed, V):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(V, 0.7), 2)
    if seed % 3 == 1:
        p[0] = 0.0
    if seed % 3 == 2:
        q[1] = 0.0
    return p / p.sum(), q / q.sum()


OPTIMA = {
    DraftSampling.IID: optimum.with_replacement,
    DraftSampling.WITHOUT_REPLACEMENT: optimum.without_replacement,
    DraftSampling.GREEDY_PLUS_ONE: optimum.greedy_plus_one,
}


@pytest.mark.parametrize("distribution", OPTIMA, ids=lambda distribution: distribution.name)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_optimum_equals_the_linear_programme(distribution, n):
    for seed in range(8):
        p, q = distributions(seed, 5)
        draws = list(sibling_draws(distribution, [q], n))
        assert OPTIMA[distribution](p, q, n).alpha == pytest.approx(
            bounds.best_acceptance(p, draws), abs=1e-9
        )


@pytest.mark.parametrize(
    "distribution",
    [DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT],
    ids=lambda distribution: distribution.name,
)
def test_witness_set_attains_the_optimum(distribution):
    for seed in range(6):
        p, q = distributions(seed, 5)
        found = OPTIMA[distribution](p, q, 2)
        inside = sum(
            w for w, draws in sibling_draws(distribution, [q], 2) if set(draws) <= set(found.witness.tolist())
        )
        assert found.alpha == pytest.approx(1 + p[found.witness].sum() - inside, abs=1e-12)


def test_draws_of_several_models_equal_the_linear_programme():
    for seed in range(6):
        p, q1 = distributions(seed, 5)
        _, q2 = distributions(seed + 20, 5)
        draws = list(sibling_draws(DraftSampling.INDEPENDENT, [q1, q2], 2))
        assert optimum.independent(p, [q1, q2]).alpha == pytest.approx(
            bounds.best_acceptance(p, draws), abs=1e-9
        )


def test_search_over_many_tokens_finds_the_optimum_where_all_models_are_one():
    for seed in range(5):
        p, q = distributions(seed, 60)
        exact = optimum.with_replacement(p, q, 2).alpha
        assert exact - 1e-12 <= optimum.independent(p, [q, q]).alpha < exact + 2e-3


def test_race_integral_agrees_with_the_closed_form_for_two_draws(monkeypatch):
    p, q = distributions(3, 30)
    t = np.exp(np.arange(np.log(1e-12), np.log(1e12), optimum.LOG_STEP))
    s = q[optimum.ascending(p, q)]
    rest = np.append(s[::-1].cumsum()[::-1][1:], 0.0)
    closed = s.cumsum() * (s / (1 - s)).cumsum() - (s * s / (1 - s)).cumsum()
    assert optimum._all_inside(s, 2, t, optimum.LOG_STEP * t, rest) == pytest.approx(closed, abs=1e-11)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_rule_is_above_its_optimum_and_drawing_without_replacement_helps(n):
    for seed in range(10):
        p, q = distributions(seed, 12)
        best = optimum.with_replacement(p, q, n).alpha + 1e-12
        for rule in (
            acceptance.recursive,
            acceptance.target_sample,
            acceptance.single_with_spares,
            lambda p, q, n: acceptance.kseq(p, q, n)[1],
        ):
            assert rule(p, q, n) <= best
        assert optimum.without_replacement(p, q, n).alpha >= best - 1e-11
    p, q = distributions(0, 6)
    assert (
        acceptance.recursive_wor(p, q, min(n, 3))
        <= optimum.without_replacement(p, q, min(n, 3)).alpha + 1e-12
    )


def test_acceptance_one_is_recognised_and_refuted_with_a_set():
    assert optimum.is_certain(np.array([0.5, 0.5]), np.array([0.6, 0.4]))[0]
    p = np.array([0.2, 0.8])
    q = np.array([0.6, 0.4])
    certain, witness = optimum.is_certain(p, q)
    assert not certain
    assert p[witness].sum() < q[witness].sum() ** 2


def test_race_of_one_lies_between_its_bounds_and_equals_the_integral():
    for seed in range(5):
        p, q = distributions(seed, 8)
        tv = 1 - acceptance.single(p, q)
        alpha = acceptance.race_of_one(p, q)
        assert (1 - tv) / (1 + tv) - 1e-12 <= alpha <= 1 - tv + 1e-12
        assert acceptance.race(p, q, 1) == pytest.approx(alpha, abs=1e-9)


def test_a_large_vocabulary_has_the_sum_of_its_minima():
    p, q = np.random.default_rng(0).dirichlet(np.full(152_064, 0.1), 2)
    assert optimum.with_replacement(p, q, 1).alpha == pytest.approx(np.minimum(p, q).sum(), abs=1e-9)
    assert optimum.with_replacement(p, q, 1).alpha < optimum.with_replacement(p, q, 4).alpha < 1


def test_rows_that_are_no_distributions_are_refused():
    with pytest.raises(InvalidInputError, match="sums to"):
        optimum.with_replacement(np.array([0.5, 0.6]), np.array([0.5, 0.5]), 2)
