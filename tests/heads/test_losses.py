"""Losses of drafters: values and gradients are those of their formulas, in any state of training."""

from math import exp

import pytest
import torch

from polydraft.cli.train import TrainOptions
from polydraft.config import settings
from polydraft.heads import losses
from polydraft.heads.losses import LOSSES, distance, loss_at, unrolled


def formula(name, logits, p):
    """As the papers write them, by torch's own gradients."""
    log_q = logits.log_softmax(-1)
    kl = -(p * log_q).sum(-1).mean()
    overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
    weight = torch.exp(-3 * overlap.detach())
    return {
        "ce": torch.nn.functional.cross_entropy(logits, p.argmax(-1)),
        "kl": kl,
        "tv": 1 - overlap,
        "lk": weight * kl + (1 - weight) * (1 - overlap),
        "mixed": kl,
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_formula(name, monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    logits, p = (torch.randn(7, 12, generator=generator) for _ in range(2))
    p = 0.8 * p.softmax(-1)  # the rest is beyond the draft vocabulary
    slopes = list[torch.Tensor]()
    values = list[float]()
    for value_of in (lambda x: formula(name, x, p), lambda x: distance(x, p, LOSSES[name])[0]):
        x = logits.clone().requires_grad_()
        value = value_of(x)
        value.backward()
        values.append(value.item())
        slopes.append(x.grad)  # pyright: ignore[reportArgumentType]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    torch.testing.assert_close(slopes[1], slopes[0], atol=1e-6, rtol=1e-4)
    assert slopes[0].abs().max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_where_drafter_and_target_have_nothing_in_common(name):
    logits = torch.tensor([[300.0, -300.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    loss, overlaps, _ = distance(logits, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), LOSSES[name])
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
    assert overlaps.tolist() == [0, 0]


def test_lk_is_kl_far_from_the_target_and_tv_near_it():
    assert LOSSES["lk"].shares(0.0) == (0, 1, 0)
    near = LOSSES["lk"].shares(1.0)
    assert near == pytest.approx((0, exp(-3), 1 - exp(-3)))


def test_depths_weigh_less_and_less():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    p = torch.full((2, 5), 0.2)
    single = float(distance(logits, p, LOSSES["kl"])[0])
    assert float(unrolled([(logits, p)] * 3, loss_at("kl", 0.0, 0.5)).loss) == pytest.approx(
        1.75 * single, rel=1e-6
    )


def test_the_command_offers_every_loss():
    assert sorted(settings(TrainOptions)["loss"].choices) == sorted(LOSSES)
