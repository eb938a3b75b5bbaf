"""Losses between the target's distributions and a drafter's, by name; each with its gradient, made with it.

With p the target's distribution at the draft vocabulary (mass at most 1), q the drafter's, and alpha = sum_v min(p(v), q(v)), the chance that a draft is accepted:

    ce      -ln q(argmax p)                                     hard labels
    kl      -sum_v p(v) ln q(v)                                 the divergence but for the entropy of p, which has no gradient
    tv      1 - alpha                                           the total variation; no slope where p and q do not meet
    lk      w kl + (1 - w) tv,  w = exp(-3 mean alpha)          LK losses (hybrid): Samarin et al. 2026 (arXiv 2602.23881); w has no gradient
    mixed   kl, in the second half of a training half kl and half tv

w is one number for each depth of each batch: far from the target the loss is kl, near it tv.
"""

from collections.abc import Iterable
from math import exp
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

ROWS = 128
"""Rows at once: rows of a whole vocabulary that stay in the caches are not written and read ten times."""
DECAY = 0.8
"""Weight of a depth over that of the one before."""


class Loss(NamedTuple):
    """ce, kl, tv: shares of each.  eta: where it is above 0, kl has exp(-eta mean alpha) and tv the rest.  decay: weight of a depth over that of the one before."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    eta: float = 0.0
    decay: float = DECAY

    def shares(self, alpha: float) -> tuple[float, float, float]:
        """Of ce, kl and tv where the mean overlap is alpha.

        Example:
            >>> Loss(kl=1).shares(0.5), Loss(eta=3.0).shares(0.0)
            ((0.0, 1, 0.0), (0.0, 1.0, 0.0))
        """
        if not self.eta:
            return self.ce, self.kl, self.tv
        weight = exp(-self.eta * alpha)
        return 0.0, weight, 1.0 - weight


KL = Loss(kl=1)
TV = Loss(tv=1)
LOSSES = {"ce": Loss(ce=1), "kl": KL, "tv": TV, "lk": Loss(eta=3.0), "mixed": KL}


def loss_at(name: str, done: float, decay: float = DECAY) -> Loss:
    """The loss of this name when so much of the training is done.

    Example:
        >>> loss_at("mixed", 0.7)
        Loss(ce=0.0, kl=0.5, tv=0.5, eta=0.0, decay=0.8)
    """
    loss = Loss(kl=0.5, tv=0.5) if name == "mixed" and done > 0.5 else LOSSES[name]
    return loss._replace(decay=decay)


class Figures(NamedTuple):
    """loss: in nats, with a gradient.  acceptance: sum min(p, q) by depth, means over what counts.  agreement: how often the most likely
    tokens are the same.
    """

    loss: Tensor
    acceptance: list[float]
    agreement: list[float]


def unrolled(depths: Iterable[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]], loss: Loss) -> Figures:
    """Figures of logits and the target's distributions by depth: the loss is the sum over k of decay^(k-1) times that of depth k.

    Example:
        >>> distribution = torch.tensor([[0.75, 0.25]])
        >>> unrolled([(distribution.log(), distribution)], Loss(kl=1)).acceptance
        [1.0]
    """
    total = torch.zeros(())
    accepted = list[float]()
    agreed = list[float]()
    for k, (logits, p) in enumerate(depths):
        distance_at_k, overlaps, agreement = distance(logits, p, loss)
        total = total + loss.decay**k * distance_at_k
        accepted.append(float(overlaps.mean()))
        agreed.append(float(agreement))
    return Figures(total, accepted, agreed)


def distance(
    logits: Float[Tensor, "n D"], p: Float[Tensor, "n D"], loss: Loss
) -> tuple[Float[Tensor, ""], Float[Tensor, " n"], Float[Tensor, ""]]:
    """The loss, a mean over rows; the overlap of each row; how often the most likely tokens are the same."""
    return _Distance.apply(logits, p, loss)


class _Distance(torch.autograd.Function):
    """See `distance`. An eta asks for the slopes of kl and tv apart: their shares are known with the last row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "n D"], p: Float[Tensor, "n D"], loss: Loss
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_slope = ctx.needs_input_grad[0]
        slope = torch.empty_like(logits)
        kl_slope = torch.empty_like(logits) if loss.eta else None
        overlaps = torch.empty(len(logits), device=logits.device)
        sums = torch.zeros(4, dtype=torch.float64)
        for i in range(0, len(logits), ROWS):
            some = slice(i, i + ROWS)
            target = p[some].float()
            log_q = logits[some].float().log_softmax(-1)
            peak = target.argmax(-1, True)
            hard = log_q.gather(-1, peak)
            soft = torch.linalg.vecdot(target, log_q)
            agreed = hard == log_q.amax(-1, True)
            q = log_q.exp_()
            overlap = torch.minimum(target, q).sum(-1)
            overlaps[some] = overlap
            apart = 1 - overlap.double()
            sums += torch.stack([-hard.double().sum(), -soft.double().sum(), apart.sum(), agreed.sum()]).cpu()
            if not needs_slope:
                continue
            slope[some] = _slope(q, target, peak, loss if kl_slope is None else TV)
            if kl_slope is not None:
                kl_slope[some] = _slope(q, target, peak, KL)
        hard, soft, apart, agreed = sums / len(logits)
        ce, kl, tv = loss.shares(1.0 - float(apart))
        if kl_slope is not None:
            slope.mul_(tv).add_(kl_slope, alpha=kl)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(overlaps, agreed)
        return (ce * hard + kl * soft + tv * apart).float(), overlaps, agreed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * (gradients[0] / len(slope)).to(slope), None, None


def _slope(q: Tensor, p: Tensor, peak: Tensor, loss: Loss) -> Float[Tensor, "n D"]:
    """Of so much of each loss, by the logits of q."""
    step = q * (loss.ce + loss.kl * p.sum(-1, keepdim=True))
    if loss.kl:
        step.sub_(p, alpha=loss.kl)
    if loss.ce:
        step.scatter_add_(-1, peak, torch.full_like(peak, -loss.ce, dtype=step.dtype))
    if loss.tv:
        below = q * (q < p)
        step.sub_(below - below.sum(-1, keepdim=True) * q, alpha=loss.tv)
    return step
