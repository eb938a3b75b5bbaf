"""Batches of a stream of tokens, by phases, and the loss of the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from polydraft.errors import InvalidInputError


@dataclass(frozen=True)
class Phase:
    """`num_steps` batches of `batch_size` rows of `length` tokens."""

    num_steps: int
    batch_size: int
    length: int

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.batch_size * self.length


def shuffled_rows(tokens: np.ndarray, phases: Sequence[Phase], *, seed: int) -> Callable[[int], Tensor]:
    """Map a step to its batch, int64 [batch_size, length + 1]. Each phase cuts its own part of the stream into rows and
    shuffles them: rows read in document order would teach the model the documents at hand instead of the language.

    tokens: [num_tokens], read once from the start. Raises InvalidInputError when it is shorter than the phases need.
    """
    needed = sum(phase.num_tokens for phase in phases) + 1
    if len(tokens) < needed:
        raise InvalidInputError(
            f"got {len(tokens)} tokens, expected at least {needed}: lower the steps or raise the package cap"
        )
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(phase.num_steps * phase.batch_size) for phase in phases]

    def batch(step: int) -> Tensor:
        start = 0
        for phase, order in zip(phases, orders, strict=True):
            if step < phase.num_steps:
                rows = order[step * phase.batch_size : (step + 1) * phase.batch_size, None]
                return torch.from_numpy(
                    tokens[start + rows * phase.length + np.arange(phase.length + 1)].astype(np.int64)
                )
            step -= phase.num_steps
            start += phase.num_tokens
        raise InvalidInputError(f"got a step {step} past the end of the schedule")

    return batch


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token. rows: [B, N + 1] token ids."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
