"""An EAGLE-3 head in torch: what a step reads, and what its loss is least for."""

import numpy as np
import pytest
import torch

from polydraft.heads.checkpoint import head_config
from polydraft.heads.eagle.network import EagleHead, EagleRecipe
from polydraft.heads.losses import KL
from polydraft.heads.recipe import Batch, Material

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def fresh():
    torch.manual_seed(0)
    material = Material(None, (0, 1), np.arange(24), torch.randn(24, 16), torch.randn(24, 16), {})
    return EagleHead(head_config(SIZES), material)


def test_the_second_step_reads_the_first_ones_output_and_sees_no_future():
    head = fresh()
    for matrix in head.parameters():
        torch.nn.init.normal_(matrix, std=0.4)
    tokens = torch.randint(0, 24, (1, 9))
    features = torch.randn(1, 9, 32)
    length = 6

    def second(tokens, features):
        lines = []
        states = head.step(tokens[:, 1 : 1 + length], head.fc(features[:, :length]), lines)
        return head.step(tokens[:, 2 : 2 + length], states, lines)

    with torch.no_grad():
        whole = second(tokens, features)
        for t in range(length):
            later = tokens.clone()
            changed = features.clone()
            later[:, t + 3 :] = 0
            changed[:, t + 1 :] = 0
            torch.testing.assert_close(second(later, changed)[:, t], whole[:, t])
            own = tokens.clone()
            past = features.clone()
            own[:, t + 1] = (own[:, t + 1] + 1) % 24
            past[:, t] += 1
            assert (second(own, features)[:, t] - whole[:, t]).abs().max() > 1e-3
            assert (second(tokens, past)[:, t] - whole[:, t]).abs().max() > 1e-3


def test_the_loss_is_least_where_the_head_has_the_targets_distribution():
    head = fresh()
    tokens = torch.randint(0, 24, (1, 9))
    features = torch.randn(1, 9, 32)
    counted = torch.ones(1, 9, dtype=torch.bool)
    with torch.no_grad():
        states = head.step(tokens[:, 1:8], head.fc(features[:, :7]), [])
        distributions = torch.zeros(1, 9, 24)
        distributions[:, 1:8] = head.logits(states).softmax(-1)
        loss, kept, agreed = EagleRecipe().loss(
            head, Batch(tokens, features, distributions, counted), steps=1, loss=KL
        )
        entropy = -(distributions[:, 1:8] * distributions[:, 1:8].log()).sum(-1).mean()
        assert kept[0] == pytest.approx(1)
        assert agreed[0] == 1
        assert float(loss) == pytest.approx(float(entropy), rel=1e-4)
        other = Batch(tokens, features, torch.full_like(distributions, 1 / 24), counted)
        flat, worse, _ = EagleRecipe().loss(head, other, steps=1, loss=KL)
        assert worse[0] < 0.9
        assert float(flat) > float(torch.tensor(24.0).log())
