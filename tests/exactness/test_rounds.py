"""The distribution over several rounds, with the real noise and through the walks: what enumeration of one round cannot see.

Texts of four tokens of three, 81 cells, the rare ones in one. Power: a bias adds the number of texts times sum (difference^2 / distribution) to a
statistic of mean 80 and standard deviation 13 at most; each of the mistakes below is asked for p < 1e-6.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods.registry import verifier
from polydraft.sampling import categorical, noise
from tests.fast_equals_slow.walk_rounds import at_equal_steps
from tests.support import wrong_rules

V = 3
LENGTH = 4
RNG = np.random.default_rng(6)
P, Q = (RNG.dirichlet(np.full(V, 0.5), size=V).astype(np.float32) for _ in range(2))
TREES = {
    "chain": (TreeShape.CHAIN, (-1, 0, 1)),
    "paths": (TreeShape.PATHS, (-1, 0, 0, 1, 2)),
    "tree": (TreeShape.PRODUCT, (-1, 0, 0, 1, 1, 2, 2)),
    "ragged": (TreeShape.RAGGED, (-1, 0, 0, 1, 3)),
    "by position": (TreeShape.BY_POSITION, (-1, 0, 0, 0, 1, 1)),
}


def depths(parents):
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def drafted(last, key, shape, parents, own_position, distribution):
    """Draws from Q; their noise is keyed by the round, or (wrongly) by each token's own position."""
    depth = depths(parents)
    tokens = [last]
    if distribution is DraftSampling.SYSTEMATIC:
        u = noise.uniforms(key, noise.Stream.DRAFT, len(parents))
        roots = np.zeros((len(last), len(parents)), np.int64)
        roots[:, 0] = last
        tokens = at_equal_steps(parents, roots, u, lambda b, x: Q[x]).T
    for n in range(len(tokens), len(parents)):
        at = replace(key, position=key.position + depth[n] - 1) if own_position else key
        u = noise.uniforms(at, noise.Stream.DRAFT, 1, start=depth[:n].count(depth[n]) if own_position else n)[
            :, 0
        ]
        tokens.append(categorical.choose(Q[tokens[parents[n]]], u))
    tree = TokenTree(np.stack(tokens, axis=1), np.tile(np.array(parents), (len(last), 1)))
    rows = np.where(
        tree.parents >= 0, np.take_along_axis(trees.first_copies(tree), tree.parents.clip(min=0), 1), -1
    )
    return Draft(tree, distribution, shape, Q[tree.tokens], rows, key)


def first_tokens(
    decide, shape, parents, count, *, own_position=False, same_noise=False, distribution=DraftSampling.IID
):
    """The first LENGTH tokens of `count` seeds, generated in rounds; same_noise: (wrongly) one key for all of them."""
    texts = np.zeros((count, LENGTH + max(depths(parents)) + 1), np.int64)
    length = np.zeros(count, np.int64)
    while len(on := np.flatnonzero(length < LENGTH)):
        at = length[on]
        key = NoiseKey(on, np.zeros_like(on), np.ones_like(at) if same_noise else 1 + at)
        last = np.where(at > 0, texts[on, at - 1], 0)
        draft = drafted(last, key, shape, parents, own_position, distribution)
        outcome = decide(draft, P[draft.tree.tokens], key)
        for i in range(outcome.path.shape[1]):
            kept = i < outcome.num_accepted
            texts[on[kept], at[kept] + i] = draft.tree.tokens[kept, outcome.path[kept, i]]
        texts[on, at + outcome.num_accepted] = outcome.token
        length[on] += outcome.num_accepted + 1
    return texts[:, :LENGTH]


def p_value(texts):
    code = (texts * np.array([V**i for i in reversed(range(LENGTH))])).sum(1)
    seen = np.bincount(code, minlength=V**LENGTH)
    rows = P.astype(np.float64)
    distribution = rows[0]
    for _ in range(LENGTH - 1):
        distribution = (distribution.reshape(-1, V)[..., None] * rows).reshape(-1)
    expected = distribution * len(texts)
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    return chi2.sf(((seen - expected) ** 2 / expected).sum(), len(expected) - 1)


def walk(name):
    return lambda draft, p, key: verifier(name).walk(draft, np.log(p), key)


def sampled(rule):
    return lambda draft, p, key: rule(draft, p).sample(key)


WALKS = [
    ("block", "chain"),
    *(("greedy_traversal", tree) for tree in TREES if tree != "chain"),
    ("match", "chain"),
    ("match", "tree"),
    ("race", "paths"),
]


@pytest.mark.parametrize(("name", "tree"), WALKS)
def test_a_walk_keeps_the_distribution_over_rounds(name, tree):
    assert p_value(first_tokens(walk(name), *TREES[tree], 12_000)) > 1e-3


@pytest.mark.parametrize("tree", TREES)
def test_systematic_draws_keep_the_distribution_over_rounds(tree):
    assert (
        p_value(first_tokens(walk("flow"), *TREES[tree], 12_000, distribution=DraftSampling.SYSTEMATIC))
        > 1e-3
    )


def test_systematic_draws_whose_rounds_share_their_noise_are_caught():
    wrong = first_tokens(
        walk("flow"), *TREES["paths"], 2_000, same_noise=True, distribution=DraftSampling.SYSTEMATIC
    )
    assert p_value(wrong) < 1e-6


@pytest.mark.parametrize(
    ("name", "tree"), [("speculative", "chain"), ("recursive", "paths"), ("traversal", "tree")]
)
def test_a_rule_without_a_walk_keeps_the_distribution_over_rounds(name, tree):
    assert p_value(first_tokens(sampled(verifier(name)), *TREES[tree], 12_000)) > 1e-3


def test_noise_keyed_by_a_tokens_own_position_is_caught():
    """Drafts and stops, both."""
    assert (
        p_value(first_tokens(sampled(wrong_rules.own_position), *TREES["chain"], 12_000, own_position=True))
        < 1e-6
    )


@pytest.mark.parametrize(
    ("name", "tree"), [(name, tree) for name, tree in WALKS if name in ("block", "greedy_traversal")]
)
def test_drafts_keyed_by_their_own_positions_are_caught_by_walks(name, tree):
    assert p_value(first_tokens(walk(name), *TREES[tree], 12_000, own_position=True)) < 1e-6


@pytest.mark.parametrize(("name", "tree"), WALKS)
def test_rounds_that_share_their_noise_are_caught(name, tree):
    assert p_value(first_tokens(walk(name), *TREES[tree], 2_000, same_noise=True)) < 1e-6


@pytest.mark.parametrize("tree", ["chain", "paths"])
def test_a_broken_walk_is_caught_over_rounds(tree):
    assert p_value(first_tokens(wrong_rules.keep_all, *TREES[tree], 2_000)) < 1e-6
