"""The comparison of a policy with the best of several fixed shapes, by raw figures and on recorded contexts."""

import numpy as np
import torch

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.policy.costs import Costs
from polydraft.policy.profile import Profile
from polydraft.verifiers.block import block
from studies.policy.comparison import compare
from studies.policy.contexts import Context, Recorder, Simulation, num_accepted, policy_run


def test_the_best_shape_of_the_very_prompts_is_partly_luck_and_that_of_other_prompts_is_not():
    """A policy and fifteen shapes of one true speed, whose prompts differ: the ratio is 1 on the mean, and its interval says so."""
    rng = np.random.default_rng(0)
    comparisons = []
    for _ in range(40):
        seconds = np.exp(0.2 * rng.standard_normal((16, 20)))
        figures = np.stack([np.ones_like(seconds), seconds], -1)
        comparisons.append(compare(figures[0], figures[1:]))
    fair, lucky = (np.array([getattr(c, name) for c in comparisons]) for name in ("ratio", "hindsight"))
    assert abs(fair.mean() - 1.0) < 0.02 and lucky.mean() < 0.95
    assert np.mean([low < 1.0 < high for low, high in (c.interval for c in comparisons)]) > 0.8


def test_a_recorded_chain_is_accepted_as_block_verification_accepts_it_whatever_it_is_cut_to():
    generator = torch.Generator().manual_seed(0)
    recorder = Recorder()
    for _ in range(20):
        q, p = (torch.rand(1, n, 4, generator=generator, dtype=torch.float64) ** 3 for n in (3, 4))
        q = q / q.sum(-1, keepdim=True)
        p = p / p.sum(-1, keepdim=True)
        tokens = torch.cat(
            [torch.zeros(1, 1, dtype=torch.int64), q[0].multinomial(1, generator=generator).T], 1
        )
        chains = {
            depth: Draft(
                TokenTree.chain(tokens[:, : depth + 1].numpy()),
                DraftSampling.IID,
                TreeShape.CHAIN,
                q.numpy(),
                np.arange(-1, depth)[None],
            )
            for depth in (1, 2, 3)
        }
        recorder(chains[3], p.numpy())
        for depth, draft in chains.items():
            stop = block(draft, p[:, : depth + 1].numpy()).stop[0]
            np.testing.assert_allclose(num_accepted(recorder.contexts[-1], depth), stop, atol=1e-12)


def test_the_policy_is_as_fast_as_the_best_chain_where_unlikely_tokens_are_accepted_as_often_as_others():
    """Chains that ended behind unlikely tokens made .95 of it on such contexts."""
    rng = np.random.default_rng(0)
    texts = list[list[Context]]()
    for _ in range(12):
        accepted = (rng.random((60, 8)) < 0.8).cumprod(1).astype(float)
        confidence = np.exp(-9.0 * rng.random((60, 8)))
        texts.append([Context(c, w, np.zeros(8)) for c, w in zip(confidence, accepted, strict=True)])
    costs = Costs.of({1: 1.0, 4: 1.1, 8: 1.4}, draft_start=0.1, draft_step=0.1)
    simulation = Simulation(texts, costs, 8)
    chains = np.array([simulation.run(lambda context, depth=depth: depth) for depth in range(1, 9)])
    assert compare(policy_run(simulation, Profile.of(costs)), chains).ratio > 0.97
