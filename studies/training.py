"""A resumable training loop, with one cosine schedule and checkpoints by wall time.

The loop's state is (model, optimizers, step). Batches are a function of the step, so a resumed run equals an unbroken one
bit for bit.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from polydraft.files.atomic import replacing
from polydraft.train.loop import optimizers_for


def cosine(step: int, num_steps: int, *, warm_up: int, floor: float) -> float:
    """Factor of the learning rate: linear warm-up, then a half cosine down to `floor`."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


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
        state = {
            "model": model.state_dict(),
            "optimizers": optimizer_states,
            "step": step,
            "rng": torch.get_rng_state(),
        }
        with replacing(checkpoint) as file:
            torch.save(state, file)

    last = num_steps if stop_at is None else min(stop_at, num_steps)
    began = reported = saved_at = time.monotonic()
    num_tokens = 0
    recent = []
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
            report(
                f"step {step + 1}/{num_steps}  loss {mean:.3f}  {speed:.0f} tokens/s  ETA {eta / 60:.1f} min"
            )
            reported = now
            recent = []
        if now - saved_at >= checkpoint_seconds:
            save(step + 1)
            saved_at = now
    save(last)
