"""Gumbel-max list sampling: the distribution of two tokens by chi-square, acceptance against its bound, and the trap."""

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.sampling import categorical, noise
from polydraft.theory import acceptance

V = 4
DEPTH = 2
SEEDS = 6000
RNG = np.random.default_rng(4)
P, Q = ((lambda x: x / x.sum(-1, keepdims=True))(RNG.random((V, V)) + 0.05) for _ in range(2))


def listed(K, seeds=SEEDS):
    """K paths of DEPTH tokens, each the winner of races of its own; rows depend on the last token, the root is token 0."""
    zero = np.zeros(seeds, np.int64)
    key = NoiseKey(np.arange(seeds), zero, zero + 9)
    clocks = [
        noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), K * V).reshape(seeds, K, V)
        for d in range(DEPTH)
    ]
    last = np.broadcast_to(zero[:, None], (seeds, K))
    tokens = [zero[:, None]]
    for d in range(DEPTH):
        last = (clocks[d] / Q[last]).argmin(-1)
        tokens.append(last)
    parents = np.tile(np.array([-1] + [0] * K + [1 + k for k in range(K)]), (seeds, 1))
    drafted = TokenTree(np.concatenate(tokens, axis=1), parents)
    shape = TreeShape.PATHS if K > 1 else TreeShape.CHAIN
    return Draft(drafted, DraftSampling.LISTED, shape, Q[drafted.tokens], parents.clip(min=-1), key), key


def p_value(texts, distribution, cells):
    seen = np.bincount(texts, minlength=cells).astype(np.float64)
    return chi2.sf(
        float(((seen - len(texts) * distribution) ** 2 / (len(texts) * distribution)).sum()), cells - 1
    )


@pytest.mark.parametrize("K", [1, 2, 3])
def test_distribution_of_two_tokens_is_the_targets(K):
    draft, key = listed(K)
    outcome = verifier("list_race")(draft, P[draft.tree.tokens]).sample(key)
    texts = outcome.emitted(draft.tree)
    long = np.array([t[0] * V + t[1] for t in texts if len(t) > 1])
    first = np.array([t[0] for t in texts])
    assert p_value(first, P[0], V) > 1e-3
    fresh = np.random.default_rng(K).random(SEEDS)
    second = np.array(
        [
            t[1] if len(t) > 1 else int(categorical.choose(P[t[0]], u))
            for t, u in zip(texts, fresh, strict=True)
        ]
    )
    assert len(long) > SEEDS / 4
    assert p_value(first * V + second, (P[0][:, None] * P).ravel(), V * V) > 1e-3


@pytest.mark.parametrize("K", [1, 2, 3])
def test_acceptance_is_not_below_its_bound(K):
    draft, key = listed(K)
    accepted = (verifier("list_race")(draft, P[draft.tree.tokens]).sample(key).num_accepted > 0).astype(
        np.float64
    )
    bound = acceptance.list_matching(P[0], Q[0], K)
    assert accepted.mean().item() > bound - 4 * (bound * (1 - bound) / SEEDS) ** 0.5
    if K == 1:
        assert accepted.mean().item() == pytest.approx(acceptance.race_of_one(P[0], Q[0]), abs=0.03)


def test_path_dropped_because_of_its_own_token_is_caught():
    """Only the paths whose token is the likeliest drafted one stay in play at the position that drew it."""
    draft, key = listed(3)
    clocks = noise.clocks(key, 3 * V).reshape(SEEDS, 3, V)
    drawn = draft.tree.tokens[:, 1:4]
    stays = P[0][drawn] >= np.median(P[0])
    arrivals = np.where(stays[..., None] | ~stays.any(1)[:, None, None], clocks, np.inf).min(axis=1) / P[0]
    assert p_value(arrivals.argmin(1), P[0], V) < 1e-6


def test_path_zero_meets_the_clocks_of_the_plain_race():
    draft, key = listed(1, 50)
    ours = verifier("list_race")(draft, P[draft.tree.tokens]).sample(key).emitted(draft.tree)
    assert ours == verifier("race")(draft, P[draft.tree.tokens]).sample(key).emitted(draft.tree)


def test_noise_is_asked_for():
    with pytest.raises(InvalidInputError, match="noise"):
        verifier("list_race")(Draft.bare(np.array([0])), P[None, :1])
