"""A proposal on the device is the draft that growing through `score` gives."""

import pytest
import torch

from polydraft import tree as trees
from polydraft.core import Budget, NoiseKey, Request, SamplingParams, Scores
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.models.hf import HFTarget
from polydraft.models.static.llama import StaticLlama
from polydraft.tree import chain, paths, product, ragged
from polydraft.verifiers.match import match
from tests.models.tree_rounds import ARCHITECTURES, V, small_model
from tests.other_device import OneDevice, moved

PARAMS = {
    "plain": SamplingParams(),
    "sharp": SamplingParams(temperature=0.2),
    "truncated": SamplingParams(top_k=7, top_p=0.9),
    "greedy": SamplingParams(temperature=0),
    "biased": SamplingParams(logit_bias={5: 4.0}),
}


def drafters(kind="paths"):
    return [ModelDrafter(path(small_model(ARCHITECTURES["llama"]), max_num_seqs=4), kind) for path in (StaticLlama, HFTarget)]


def same(one, two):
    assert torch.equal(one.tree.tokens, two.tree.tokens) and torch.equal(one.tree.parents, two.tree.parents)
    assert one.shape is two.shape and one.law is two.law
    b, n = (one.rows >= 0).nonzero(as_tuple=True)
    assert torch.equal(one.rows >= 0, two.rows >= 0)
    assert torch.allclose(one.probs[b, one.rows[b, n]], two.probs[b, two.rows[b, n]], atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    "budgets",
    [
        [chain(4)] * 3,
        [paths(3, 3)] * 3,
        [paths(2, 4), paths(3, 2), chain(3)],
        [paths(2, 3), chain(0), paths(4, 1)],
        [paths(3, 4, trunk=2), paths(2, 3), paths(2, 2, trunk=1)],
        [ragged(5, 2), ragged(4, 1, 1), paths(2, 3)],
        [(-1, 0, 0, 0, 1, 1, 2, 4, 5), product(2, 2), (-1, 0, 1, 0, 1, 2)],
    ],
)
def test_rounds_of_proposals_are_those_of_growing(name, budgets):
    both = drafters()
    requests = [Request(str(b), (1, 2, 3 + b), PARAMS[name], seed=b) for b in range(3)]
    states = [d.start(requests) for d in both]
    target = torch.randn(1, V, V, generator=torch.Generator().manual_seed(0)) * 2
    for position in range(5):
        limits = [*map(Budget.fixed, budgets)]
        one, two = (d.propose(s, limits) for d, s in zip(both, states, strict=True))
        same(one, two)
        logits = target[0][one.tree.tokens]
        outcome = match(one, logits.softmax(-1)).sample(NoiseKey.of([1, 2, 3], [0] * 3, [position] * 3))
        scores = Scores(one.tree, logits)
        states = [d.observe(s, outcome, scores) for d, s in zip(both, states, strict=True)]


def test_equal_prefixes_share_one_row():
    drafter = drafters()[0]
    states = drafter.start([Request("r", (1, 2, 3), PARAMS["sharp"], seed=4)])
    draft = drafter.propose(states, [Budget.fixed(paths(4, 4))])
    first = trees.first_copies(draft.tree)[0]
    copies = [n for n in range(1, 17) if first[n] != n]
    assert copies
    for n in range(1, 17):
        above = first[draft.tree.parents[0, n]]
        others = [m for m in range(1, 17) if first[draft.tree.parents[0, m]] == above]
        assert {int(draft.rows[0, m]) for m in others} == {int(draft.rows[0, n])}


def test_params_that_depend_on_the_path_are_grown():
    both = drafters("chain")
    requests = [Request("r", (1, 2, 3), SamplingParams(repetition_penalty=2.0), seed=1)]
    same(*(d.propose(d.start(requests), [Budget.fixed(chain(4))]) for d in both))


def test_only_the_drawn_tokens_are_read_back(monkeypatch):
    model = StaticLlama(small_model(ARCHITECTURES["llama"]), max_num_seqs=2)
    read = []

    class ReadBackError(Exception):
        """The proposal asked for the tokens."""

    def feed(self, slots, ids, offsets, parents):
        read.append(offsets.shape[1])
        return torch.empty(*ids.shape, V, device="meta")

    def cpu(self):
        raise ReadBackError(tuple(self.shape))

    monkeypatch.setattr(StaticLlama, "feed", feed)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    model.device = moved(torch.empty(1)).device
    with OneDevice(), pytest.raises(ReadBackError, match=r"2, 6"):
        model.propose_paths([0, 1], [[5], [6]], ([1, 2], [0, 0], [3, 3]), [paths(2, 3), chain(2)], [PARAMS["plain"]] * 2)
    assert read == [1, 2, 2]
