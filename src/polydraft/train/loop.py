"""How trained networks are optimized: Muon for the hidden matrices, AdamW for the rest.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The momentum of a matrix is replaced by the nearest
semi-orthogonal matrix (five Newton-Schulz steps), here in float32: bfloat16 is slow on most CPUs.
"""

import math

import torch
from torch import Tensor, nn


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix up to a spread of its singular values. [rows, columns] -> same."""
    a = 3.4445
    b = -4.7750
    c = 2.0315  # of a Newton-Schulz step, as published
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for 2-D parameters, scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(
        ("lm_head", "model.embed_tokens", "markov_head", "confidence_head")
    )


def optimizers_for(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and output, AdamW for what has a row for each token and the norms; neither where there are none."""
    hidden = [p for n, p in model.named_parameters() if _is_hidden(n, p)]
    rest = [p for n, p in model.named_parameters() if not _is_hidden(n, p)]
    muon = [Muon(hidden, lr=muon_lr, weight_decay=0.02)] if hidden else []
    return [
        *muon,
        *([torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else []),
    ]
