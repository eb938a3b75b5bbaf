"""A resumable training loop: Muon for the hidden matrices, AdamW for the rest, one cosine schedule, checkpoints by wall time.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The momentum of a matrix is replaced by the nearest
semi-orthogonal matrix (five Newton-Schulz steps), here in float32: bfloat16 is slow on most CPUs.

The loop's state is (model, optimizers, step). Batches are a function of the step, so a resumed run equals an unbroken one
bit for bit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix up to a spread of its singular values. [rows, columns] -> same."""
    a, b, c = NEWTON_SCHULZ
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
    return parameter.ndim == 2 and not name.startswith(("lm_head", "model.embed_tokens", "markov_head", "confidence_head"))


def optimizers_for(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and output, AdamW for what has a row for each token and the norms; neither where there are none."""
    hidden = [p for n, p in model.named_parameters() if _is_hidden(n, p)]
    rest = [p for n, p in model.named_parameters() if not _is_hidden(n, p)]
    muon = [Muon(hidden, lr=muon_lr, weight_decay=0.02)] if hidden else []
    return [*muon, *([torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else [])]


def cosine(step: int, num_steps: int, *, warm_up: int, floor: float) -> float:
    """Factor of the learning rate: linear warm-up, then a half cosine down to `floor`."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def save_atomically(state: Any, path: Path) -> None:
    """Write beside the file, then rename: a reader or a crash never meets half a checkpoint."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Callable[[int], Tensor],
    *,
    num_steps: int,
    checkpoint: Path,
    muon_lr: float = 0.02,
    adam_lr: float = 3e-3,
    warm_up: int = 50,
    floor: float = 0.01,
    checkpoint_seconds: float = 300.0,
    stop_at: int | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Train in place up to `num_steps`, resuming from `checkpoint` when it exists.

    loss_of(model, batch) returns the mean loss in nats per token. stop_at ends the run early, as an interruption would.
    """
    optimizers = optimizers_for(model, muon_lr=muon_lr, adam_lr=adam_lr)
    base = [group["lr"] for o in optimizers for group in o.param_groups]
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["rng"])
        first = state["step"]

    def save(step: int) -> None:
        optimizer_states = [o.state_dict() for o in optimizers]
        state = {"model": model.state_dict(), "optimizers": optimizer_states, "step": step, "rng": torch.get_rng_state()}
        save_atomically(state, checkpoint)

    last = num_steps if stop_at is None else min(stop_at, num_steps)
    began = reported = saved_at = time.monotonic()
    num_tokens, recent = 0, []
    model.train()
    for step in range(first, last):
        factor = cosine(step, num_steps, warm_up=warm_up, floor=floor)
        groups = [group for o in optimizers for group in o.param_groups]
        for group, lr in zip(groups, base, strict=True):
            group["lr"] = lr * factor
        rows = batch(step)
        loss = loss_of(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        num_tokens += rows.shape[0] * (rows.shape[1] - 1)
        recent.append(loss.item())
        now = time.monotonic()
        if now - reported >= 20 or step + 1 == last:
            eta = (now - began) / (step + 1 - first) * (num_steps - step - 1)
            mean = sum(recent) / len(recent)
            speed = num_tokens / (now - began)
            report(f"step {step + 1}/{num_steps}  loss {mean:.3f}  {speed:.0f} tokens/s  ETA {eta / 60:.1f} min")
            reported, recent = now, []
        if now - saved_at >= checkpoint_seconds:
            save(step + 1)
            saved_at = now
    save(last)
