"""Block verification against its closed form and its optimum."""

import numpy as np
import pytest
import torch
from harness import Markov, Tables, as_batch, by_depth, measure

from polydraft.core import SiblingLaw, TreeShape
from polydraft.registry import verifier
from verifiers.reference import sampled

CHAIN = TreeShape.CHAIN, by_depth(1, 1, 1), 3


def test_block_reaches_the_optimum_of_the_two_token_example():
    thirds = np.array([[1, 2], [1, 2]]) / 3
    tables, args = Markov(thirds, thirds[:, ::-1], 0), (SiblingLaw.IID, TreeShape.CHAIN, by_depth(1, 1), 2)
    assert 9 * (measure(verifier("block"), tables, *args).block_efficiency - 1) == pytest.approx(11, abs=1e-12)
    assert 9 * (measure(verifier("speculative"), tables, *args).block_efficiency - 1) == pytest.approx(10, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_survival_follows_from_the_running_maximum_of_the_path_ratio(seed):
    tables = Tables(5, seed)
    drafts = [sampled(tables, SiblingLaw.IID, *CHAIN[1:], s) for s in range(10)]
    draft, p = as_batch(tables, SiblingLaw.IID, CHAIN[0], drafts)
    stop = verifier("block")(draft, p).stop.numpy()
    for b, d in enumerate(drafts):
        steps = [tables.row("p", path[:-1])[path[-1]] / tables.row("q", path[:-1])[path[-1]] for path in d.paths[1:]]
        rho = np.cumprod([1.0, *steps])
        w = rho / np.maximum.accumulate(rho)
        S = [np.maximum(w[i] * tables.row("p", x) - tables.row("q", x), 0).sum() for i, x in enumerate(d.paths[:-1])]
        h = [1.0 if S[i] + 1 - w[i] == 0 else S[i] / (S[i] + 1 - w[i]) for i in range(3)] + [w[3]]
        expected = [h[i] * np.prod([1 - x for x in h[i + 1 :]]) for i in range(4)]
        assert np.abs(stop[b] - [1 - sum(expected[1:]), *expected[1:]]).max() < 1e-12


def test_expected_length_is_the_sum_of_the_path_weights():
    for seed in range(6):
        tables, total = Tables(4, seed), 1.0
        weights = {(): (1.0, 1.0)}
        for _ in range(3):
            grown = {}
            for path, (chance, w) in weights.items():
                p, q = tables.row("p", path), tables.row("q", path)
                grown |= {(*path, int(x)): (chance * q[x], min(1, w * p[x] / q[x])) for x in np.flatnonzero(q)}
            weights = grown
            total += sum(chance * w for chance, w in weights.values())
        found = measure(verifier("block"), tables, SiblingLaw.IID, *CHAIN)
        assert found.block_efficiency == pytest.approx(total, abs=1e-12)


def test_ragged_chains_equal_single_chains():
    tables = Tables(5, 0)
    drafts = [sampled(tables, SiblingLaw.IID, by_depth(*[1] * length), length, 3) for length in (3, 0, 1)]
    together = verifier("block")(*as_batch(tables, SiblingLaw.IID, TreeShape.CHAIN, drafts))
    for b, d in enumerate(drafts):
        alone = verifier("block")(*as_batch(tables, SiblingLaw.IID, TreeShape.CHAIN, [d]))
        assert torch.equal(together.stop[b, : len(d.tokens)], alone.stop[0])
        assert (together.stop[b, len(d.tokens) :] == 0).all()
