"""Exponential races: output distribution by chi-square, acceptance by quadrature, the same tokens whatever the drafter."""

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft.core import Draft, DraftSampling, NoiseKey, TreeShape
from polydraft.core import geometry as trees
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.sampling import noise

P = np.array([0.05, 0.35, 0.3, 0.2, 0.1], dtype=np.float64)
Q = np.array([0.5, 0.1, 0.2, 0.15, 0.05], dtype=np.float64)
SEEDS = 40_000


def coupled(k):
    """k children by the smallest clock/q, for every seed; with the key of the round."""
    zero = np.zeros(SEEDS, np.int64)
    key = NoiseKey(np.arange(SEEDS), zero, zero + 7)
    best = (-Q / noise.clocks(key, 5)).argsort(-1)[:, :k]
    tree = trees.TokenTree(
        np.concatenate([zero[:, None], best], axis=1), np.tile(np.array([[-1] + [0] * k]), (SEEDS, 1))
    )
    rows = np.tile(np.array([[-1] + [0] * k]), (SEEDS, 1))
    return Draft(
        tree, DraftSampling.COUPLED, TreeShape.PRODUCT, np.broadcast_to(Q, (SEEDS, 1, 5)), rows, key
    ), key


def closed_form(p, q):
    """One draft: sum_j 1 / sum_i max(p_i/p_j, q_i/q_j)."""
    return sum(
        1 / sum(max(p[i] / p[j], q[i] / q[j]) for i in range(len(p)))
        for j in range(len(p))
        if p[j] > 0 and q[j] > 0
    )


def quadrature(p, q, k):
    """k drafts: sum_j p_j int e^-s Pr(PB_j(s) <= k-1) ds, trapezoid in log s."""
    s = np.exp(np.arange(np.log(1e-22), np.log(80), 0.05))
    total = 0.0
    for j in range(len(p)):
        counts = np.zeros((k, len(s)))
        if not p[j] > 0 or not q[j] > 0:
            continue
        counts[0] = 1
        for i in range(len(p)):
            if i != j:
                hit = -np.expm1(-s * max(q[i] * p[j] / q[j] - p[i], 0))
                counts[1:] = counts[1:] * (1 - hit) + counts[:-1] * hit
                counts[0] *= 1 - hit
        f = np.exp(-s) * counts.sum(0) * s
        total += p[j] * float(((f[1:] + f[:-1]) / 2 * 0.05).sum())
    return total


@pytest.mark.parametrize("k", [1, 2, 3])
def test_race_emits_the_target_distribution(k):
    draft, key = coupled(k)
    outcome = verifier("race")(draft, np.broadcast_to(P, (SEEDS, k + 1, 5))).sample(key)
    first = np.array([row[0] for row in outcome.emitted(draft.tree)])
    seen = np.bincount(first, minlength=5).astype(np.float64)
    assert chi2.sf(float(((seen - SEEDS * P) ** 2 / (SEEDS * P)).sum()), 4) > 1e-3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_race_acceptance_equals_its_integral(k):
    draft, key = coupled(k)
    outcome = verifier("race")(draft, np.broadcast_to(P, (SEEDS, k + 1, 5))).sample(key)
    alpha = quadrature(P.tolist(), Q.tolist(), k)
    if k == 1:
        assert alpha == pytest.approx(closed_form(P.tolist(), Q.tolist()), abs=1e-9)
    assert outcome.num_accepted.astype(np.float64).mean().item() == pytest.approx(
        alpha, abs=4 * (alpha * (1 - alpha) / SEEDS) ** 0.5
    )


def test_race_emits_the_same_tokens_whatever_was_drafted():
    draft, key = coupled(2)
    p = np.broadcast_to(P, (SEEDS, 3, 5))
    bare = Draft(
        trees.TokenTree.roots(draft.tree.tokens[:, 0]),
        DraftSampling.POINT_MASS,
        TreeShape.CHAIN,
        None,
        draft.rows[:, :1],
        key,
    )
    plain = verifier("race")(bare, p[:, :1]).sample(key).token
    drafted = verifier("race")(draft, p).sample(key).emitted(draft.tree)
    assert [row[0] for row in drafted] == plain.tolist()


def test_race_needs_the_noise_of_the_round():
    draft = Draft.bare(np.array([0]))
    with pytest.raises(InvalidInputError, match="noise"):
        verifier("race")(draft, P[None, None])
