"""Importance selection: at the optimum where it should be, never below one draft, and caught where q_I is not its own."""

import numpy as np
import pytest
from scipy.optimize import linprog

from polydraft.core import DraftSampling, TreeShape
from polydraft.core.arrays import scatter
from polydraft.testing import Tables, measure, sibling_draws
from polydraft.theory import acceptance, optimum
from polydraft.verifiers import importance, max_ratio, speculative, transport
from polydraft.verifiers.selection import overlap, selection_probs
from tests.exactness.harness import by_depth
from tests.exactness.oracle import Fixed, lifted

IID = DraftSampling.IID
INDEPENDENT = DraftSampling.INDEPENDENT


def accepted(emitted, p, qs, distribution):
    draws = list(sibling_draws(distribution, qs, len(qs)))
    tokens = np.array([d for _, d in draws])
    rows = np.stack(qs) if distribution is INDEPENDENT else qs[0]
    e = emitted(np.tile(p, (len(draws), 1)), np.broadcast_to(rows, (len(draws), *rows.shape)), tokens)
    member = scatter(np.zeros_like(e), tokens, 1.0)
    return float(np.array([w for w, _ in draws], dtype=np.float64) @ (e * member).sum(1))


def distributions(seed, V, count):
    return np.random.default_rng(seed).dirichlet(np.full(V, 0.8), count)


@pytest.mark.parametrize("seed", range(6))
def test_programme_attains_the_optimum_for_two_drafts(seed):
    p, q = distributions(seed, 6, 2)
    assert (
        accepted(importance.emitted_probs, p, [q, q], IID) >= optimum.with_replacement(p, q, 2).alpha - 1e-6
    )


@pytest.mark.parametrize("seed", range(6))
def test_programme_attains_the_optimum_for_drafts_of_two_models(seed):
    p, a, b = distributions(seed, 5, 3)
    assert accepted(importance.emitted_probs, p, [a, b], INDEPENDENT) == pytest.approx(
        optimum.independent(p, [a, b]).alpha, abs=1e-6
    )


def linear_programme(p, a, b, s):
    """Best overlap where w is free among the first s tokens by p - a b, by a general solver."""
    order = np.argsort(a * b - p, kind="stable")
    p = p[order]
    a = a[order]
    b = b[order]
    m = np.outer(a, b) + np.outer(b, a)
    distribution = a * b + np.triu(m, 1).sum(1)  # the earlier token wins
    i, j = np.triu_indices(s, 1)
    moves = np.zeros((s, s + len(i)))  # z_k - q_I(k) <= 0 with 1 - w_ij = x_ij led from i to j
    moves[:, :s] = np.eye(s)
    moves[i, s + np.arange(len(i))] = m[i, j]
    moves[j, s + np.arange(len(i))] = -m[i, j]
    limits = [*((0, x) for x in p[:s]), *[(0, 1)] * len(i)]
    found = linprog([-1.0] * s + [0.0] * len(i), A_ub=moves, b_ub=distribution[:s], bounds=limits)
    return max(
        -found.fun + np.minimum(p, distribution)[s:].sum(), np.minimum(p, a).sum(), np.minimum(p, b).sum()
    )


@pytest.mark.parametrize("s", [2, 4, 7])
def test_flow_is_the_optimum_of_the_truncated_programme(s):
    every = np.stack([distributions(seed, 9, 3) for seed in range(20)], 1)
    p, a, b = every
    found = overlap(p, importance.select_pairs(p, a, b, s).distribution)
    assert found.tolist() == pytest.approx([linear_programme(*every[:, k], s) for k in range(20)], abs=1e-9)


@pytest.mark.parametrize("free_tokens", [2, 3, 4])
def test_verifier_with_any_number_of_free_tokens_is_lossless(free_tokens):
    for seed in range(6):
        result = measure(importance.of(free_tokens), Tables(4, seed), IID, TreeShape.PATHS, by_depth(3, 1), 2)
        assert result.error < 1e-12


def test_more_free_tokens_accept_more():
    p, q = distributions(3, 400, 2)
    rates = [acceptance.importance(p, q, 2, free_tokens) for free_tokens in (2, 32, 128, 400)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(optimum.with_replacement(p, q, 2).alpha, abs=1e-9)
    assert rates[0] < rates[-1] - 1e-3


@pytest.mark.parametrize("n", [2, 3, 4])
def test_solved_transport_attains_the_optimum_where_every_token_has_a_bucket(n):
    for seed in range(6):
        p, q = distributions(seed, 5, 2)
        assert accepted(transport.emitted_probs, p, [q] * n, IID) == pytest.approx(
            optimum.with_replacement(p, q, n).alpha, abs=1e-5
        )


@pytest.mark.parametrize(("n", "gap"), [(2, 0.01), (4, 0.03), (8, 0.08)])
def test_solved_transport_is_near_the_optimum_for_many_tokens(n, gap):
    rng = np.random.default_rng(1)
    z = 2 * rng.standard_normal(2000)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, z + rng.standard_normal(2000)))
    distribution = transport.select(p, q, n)[0]
    assert distribution.sum() == pytest.approx(1, abs=1e-12)
    best = optimum.with_replacement(p, q, n).alpha
    assert best - gap < np.minimum(p, distribution).sum() <= best + 1e-12


@pytest.mark.parametrize(
    "emitted",
    [importance.emitted_probs, transport.emitted_probs, max_ratio.emitted_probs],
    ids=["lp", "transport", "ratio"],
)
@pytest.mark.parametrize("n", [2, 3])
def test_selection_is_never_below_speculative_sampling(emitted, n):
    for seed in range(6):
        p, q = distributions(seed, 5, 2)
        assert accepted(emitted, p, [q] * n, IID) >= acceptance.single(p, q) - 1e-12


def picked_but_tested_against_q(p, q, draws):
    """The draw of largest p/q, tested as if it were a plain draw from q."""
    best = np.take_along_axis((p / q), draws, 1).argmax(1)
    x = np.take_along_axis(draws, best[:, None], 1)
    return speculative.emitted_probs(p, q, x)


def picked_by_other_weights(p, q, draws):
    """The first draw is picked, tested against the distribution of the best one."""
    distribution = np.broadcast_to(transport.select(p[0], q[0], draws.shape[1])[0], q.shape)
    pi = np.zeros_like(draws, dtype=p.dtype)
    pi[:, 0] = 1.0
    return selection_probs(p, distribution, pi, draws)


@pytest.mark.parametrize("wrong", [picked_but_tested_against_q, picked_by_other_weights])
def test_distribution_that_is_not_of_the_picked_token_is_caught(wrong):
    assert measure(lifted(wrong), Fixed(), IID, TreeShape.PATHS, by_depth(3), 1).tv > 1e-2


def test_drafts_of_two_models_verified_as_of_one_are_caught():
    def first_distribution_for_all(p, q, draws):
        return importance.emitted_probs(p, q[:, 0], draws)

    tables = Tables(4, 0)
    assert (
        measure(lifted(first_distribution_for_all), tables, INDEPENDENT, TreeShape.PATHS, by_depth(2), 1).tv
        > 1e-3
    )
