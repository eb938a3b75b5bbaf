"""Gumbel-max list sampling: the distribution of two tokens by chi-square, acceptance against its bound, and the trap."""

import pytest
import torch
from scipy.stats import chi2

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.sampling import categorical, noise
from polydraft.theory import acceptance

V = 4
DEPTH = 2
SEEDS = 6000
RNG = torch.Generator().manual_seed(4)
P, Q = (
    (lambda x: x / x.sum(-1, keepdim=True))(torch.rand(V, V, generator=RNG, dtype=torch.float64) + 0.05)
    for _ in range(2)
)


def listed(K, seeds=SEEDS):
    """K paths of DEPTH tokens, each the winner of races of its own; rows depend on the last token, the root is token 0."""
    zero = torch.zeros(seeds, dtype=torch.int64)
    key = NoiseKey(torch.arange(seeds), zero, zero + 9)
    clocks = [
        noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), K * V).view(seeds, K, V)
        for d in range(DEPTH)
    ]
    last = zero[:, None].expand(seeds, K)
    tokens = [zero[:, None]]
    for d in range(DEPTH):
        last = (clocks[d] / Q[last]).argmin(-1)
        tokens.append(last)
    parents = torch.tensor([-1] + [0] * K + [1 + k for k in range(K)]).expand(seeds, -1)
    drafted = TokenTree(torch.cat(tokens, 1), parents.contiguous())
    shape = TreeShape.PATHS if K > 1 else TreeShape.CHAIN
    return Draft(
        drafted, DraftSampling.LISTED, shape, Q[drafted.tokens], parents.clamp(min=-1).contiguous(), key
    ), key


def p_value(texts, distribution, cells):
    seen = texts.bincount(minlength=cells).double()
    return chi2.sf(
        float(((seen - len(texts) * distribution) ** 2 / (len(texts) * distribution)).sum()), cells - 1
    )


@pytest.mark.parametrize("K", [1, 2, 3])
def test_distribution_of_two_tokens_is_the_targets(K):
    draft, key = listed(K)
    outcome = verifier("list_race")(draft, P[draft.tree.tokens]).sample(key)
    texts = outcome.emitted(draft.tree)
    long = torch.tensor([t[0] * V + t[1] for t in texts if len(t) > 1])
    first = torch.tensor([t[0] for t in texts])
    assert p_value(first, P[0], V) > 1e-3
    fresh = torch.rand(SEEDS, generator=torch.Generator().manual_seed(K), dtype=torch.float64)
    second = torch.tensor(
        [
            t[1] if len(t) > 1 else int(categorical.choose(P[t[0]], u))
            for t, u in zip(texts, fresh, strict=True)
        ]
    )
    assert len(long) > SEEDS / 4
    assert p_value(first * V + second, (P[0][:, None] * P).flatten(), V * V) > 1e-3


@pytest.mark.parametrize("K", [1, 2, 3])
def test_acceptance_is_not_below_its_bound(K):
    draft, key = listed(K)
    accepted = (verifier("list_race")(draft, P[draft.tree.tokens]).sample(key).num_accepted > 0).double()
    bound = acceptance.list_matching(P[0].numpy(), Q[0].numpy(), K)
    assert accepted.mean().item() > bound - 4 * (bound * (1 - bound) / SEEDS) ** 0.5
    if K == 1:
        assert accepted.mean().item() == pytest.approx(
            acceptance.race_of_one(P[0].numpy(), Q[0].numpy()), abs=0.03
        )


def test_path_dropped_because_of_its_own_token_is_caught():
    """Only the paths whose token is the likeliest drafted one stay in play at the position that drew it."""
    draft, key = listed(3)
    clocks = noise.clocks(key, 3 * V).view(SEEDS, 3, V)
    drawn = draft.tree.tokens[:, 1:4]
    stays = P[0][drawn] >= P[0].median()
    arrivals = torch.where(stays[..., None] | ~stays.any(1)[:, None, None], clocks, torch.inf).amin(1) / P[0]
    assert p_value(arrivals.argmin(1), P[0], V) < 1e-6


def test_path_zero_meets_the_clocks_of_the_plain_race():
    draft, key = listed(1, 50)
    ours = verifier("list_race")(draft, P[draft.tree.tokens]).sample(key).emitted(draft.tree)
    assert ours == verifier("race")(draft, P[draft.tree.tokens]).sample(key).emitted(draft.tree)


def test_noise_is_asked_for():
    with pytest.raises(InvalidInputError, match="noise"):
        verifier("list_race")(Draft.bare(torch.tensor([0])), P[None, :1])
