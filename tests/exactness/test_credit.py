"""Drafts that stop for good where their credit is spent: the distribution of whole texts, by enumeration of every run of the policy itself."""

from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, Outcome, TokenTree, TreeShape
from polydraft.methods.registry import verifier
from tests.policy.planning import LOGITS, costs, made, sequences

V = 2
LENGTH = 5
RNG = np.random.default_rng(3)
P, Q = (RNG.dirichlet(np.full(V, 0.7), size=V) for _ in range(2))
"""Distributions behind each token, of the target and of the draft model."""


def begun(seed, credit):
    """A policy that knows nothing but chains, and a sequence with so much credit."""
    policy = made(costs(0.1, 0.3), 0.6)
    policy.shaper = replace(policy.shaper, confident=False)
    (s,) = sequences(length=1, seed=seed)
    policy.course(s).credit.left = credit
    return policy, s


def drafts(last, depth):
    """Every chain, and its probability."""
    for tokens in product(range(V), repeat=depth):
        path = [last, *tokens]
        yield np.prod([Q[a, b] for a, b in zip(path, tokens, strict=False)]), path


def outcomes(path):
    """Every outcome of block verification, and its probability."""
    tree = TokenTree.chain(np.array([path]))
    depth = len(path) - 1
    rows = np.arange(-1, depth)[None]
    draft = Draft(tree, DraftSampling.IID, TreeShape.CHAIN, Q[path[:-1]][None], rows)
    verdict = verifier("block")(draft, P[path][None])
    for node in range(depth + 1):
        for token, p in enumerate(verdict.after(np.array([node]))[0]):
            yield float(verdict.stop[0, node] * p), draft, node, token


def text_probs(policy, s, peeks=False):
    """Probability of each text of LENGTH tokens. peeks: (wrongly) drafts that begin with token 0 are not used."""
    texts = np.zeros((V,) * LENGTH)
    depths = set()

    def go_on(policy, s, p):
        emitted = s.token_ids[1:]
        if len(emitted) >= LENGTH:
            texts[tuple(emitted[:LENGTH])] += p
            return
        depth = 0 if policy.rests([s]) else policy.budgets([s])[0].max_depth
        depths.add(depth)
        for drafted, path in drafts(s.token_ids[-1], depth):
            used = path[:1] if peeks and depth and path[1] == 0 else path
            for chance, draft, accepted, token in outcomes(used):
                if chance > 0:
                    now, then = deepcopy((policy, s))
                    if depth:
                        paths = np.arange(1, accepted + 1)[None]
                        outcome = Outcome(paths, np.array([accepted]), np.array([token]))
                        now.learn([then], draft, lambda: LOGITS, outcome)
                        step = 2.0 + 0.5 * (draft.tree.num_nodes - 1)
                        now.time(
                            {"prefill": 0.0, "drafting": 0.0, "scoring": step, "verifying": 0.0, "other": 0.0}
                        )
                    then.token_ids += [*used[1 : accepted + 1], token]
                    go_on(now, then, p * drafted * chance)

    go_on(policy, s, 1.0)
    return texts, depths


def target_text_probs():
    texts = np.ones(())
    for _ in range(LENGTH):
        rows = P[1] if texts.ndim == 0 else P
        texts = texts[..., None] * rows
    return texts


@pytest.mark.parametrize("credit", [0.5, 0.9, 1.9])
@pytest.mark.parametrize("seed", [None, 3])
def test_texts_keep_their_distribution_where_drafts_stop_by_what_they_cost(seed, credit):
    """By the clock, and with a seed by counts alone."""
    texts, depths = text_probs(*begun(seed, credit))
    assert np.abs(texts - target_text_probs()).max() < 1e-14
    assert 0 in depths and max(depths) > 0  # some runs stop, all begin with drafts


def test_a_stop_that_looks_at_the_draft_it_drops_is_caught():
    texts, _ = text_probs(*begun(None, 1.9), peeks=True)
    assert np.abs(texts - target_text_probs()).sum() / 2 > 0.01
