"""The law over several rounds, with the real noise: what enumeration of one round cannot see."""

import numpy as np
import torch
from scipy.stats import chi2

from polydraft import noise
from polydraft.core import Draft, NoiseKey, SiblingLaw, TokenTree, TreeShape
from polydraft.registry import verifier

V, GAMMA, LENGTH, SEEDS = 3, 2, 4, 40_000
RNG = np.random.default_rng(3)
P = torch.from_numpy(RNG.dirichlet(np.ones(V), size=V))
Q = torch.from_numpy(RNG.dirichlet(np.ones(V), size=V))


def drafted(last, key, own_position):
    """A chain drawn from Q; its noise is keyed by the round, or (wrongly) by each token's own position."""
    tokens = [last]
    for n in range(1, GAMMA + 1):
        at = NoiseKey(key.seed, key.sample, key.position + n - 1) if own_position else key
        u = noise.uniforms(at, noise.Stream.DRAFT, 1, start=0 if own_position else n)[:, 0]
        tokens.append(noise.choose(Q[tokens[-1]], u))
    tree = TokenTree.chain(torch.stack(tokens, 1))
    rows = torch.arange(-1, GAMMA).expand(len(last), GAMMA + 1)
    return Draft(tree, SiblingLaw.IID, TreeShape.CHAIN, Q[tree.tokens[:, :-1]], rows.contiguous())


def stopped_by_own_positions(verdict, key):
    """The stop node from one uniform for each position: the largest i with u_i < h_i."""
    stop, behind = verdict.stop, torch.zeros(SEEDS, dtype=torch.float64)
    node = torch.zeros(SEEDS, dtype=torch.int64)
    for i in range(GAMMA, 0, -1):
        h = torch.where(behind < 1, stop[:, i] / (1 - behind), 1.0)
        u = noise.uniforms(NoiseKey(key.seed, key.sample, key.position + i - 1), noise.Stream.STOP, 1)[:, 0]
        node = torch.where((node == 0) & (u < h), i, node)
        behind = behind + stop[:, i]
    return node


def first_tokens(rule, *, own_position):
    """The first LENGTH tokens of every seed, generated in rounds."""
    texts = torch.zeros(SEEDS, LENGTH + GAMMA + 1, dtype=torch.int64)
    length = torch.zeros(SEEDS, dtype=torch.int64)
    last = torch.zeros(SEEDS, dtype=torch.int64)
    for _ in range(LENGTH):
        key = NoiseKey(torch.arange(SEEDS), torch.zeros(SEEDS, dtype=torch.int64), 1 + length)
        draft = drafted(last, key, own_position)
        verdict = rule(draft, P[draft.tree.tokens])
        if own_position:
            node = stopped_by_own_positions(verdict, key)
            token = noise.choose(verdict.after(node), noise.uniforms(key, noise.Stream.EXTRA, 1)[:, 0])
        else:
            outcome = verdict.sample(key)
            node, token = outcome.num_accepted, outcome.token
        block = draft.tree.tokens[:, 1:].scatter(1, node.clamp(max=GAMMA - 1)[:, None], 0)
        block = torch.where(torch.arange(GAMMA) < node[:, None], draft.tree.tokens[:, 1:], block)
        full = torch.cat([block, torch.zeros(SEEDS, 1, dtype=torch.int64)], 1).scatter(1, node[:, None], token[:, None])
        for i in range(GAMMA + 1):
            at = length + i
            write = (i <= node) & (at < texts.shape[1])
            texts[write, at[write]] = full[write, i]
        length, last = (length + node + 1).clamp(max=LENGTH), token
    return texts[:, :LENGTH]


def p_value(texts):
    code = (texts * torch.tensor([V**i for i in reversed(range(LENGTH))])).sum(1)
    seen = np.bincount(code.numpy(), minlength=V**LENGTH)
    law = P[0]
    for _ in range(LENGTH - 1):
        law = (law.reshape(-1, V)[..., None] * P).reshape(-1)
    expected = law.numpy() * SEEDS
    return chi2.sf(((seen - expected) ** 2 / expected).sum(), V**LENGTH - 1)


def test_block_rule_keeps_the_law_over_rounds():
    assert p_value(first_tokens(verifier("block"), own_position=False)) > 1e-3


def test_speculative_rule_keeps_the_law_over_rounds():
    assert p_value(first_tokens(verifier("speculative"), own_position=False)) > 1e-3


def test_noise_keyed_by_a_tokens_own_position_is_caught():
    assert p_value(first_tokens(verifier("block"), own_position=True)) < 1e-6
