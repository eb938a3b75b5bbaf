"""Distil a draft on the target's distributions, partly on text that the target generated.

Zhou et al. 2023, DistillSpec (arXiv 2310.08461).
    p  target distribution at a position      q  draft distribution there
    KL = sum p ln(p / q)             TV = 1 - sum min(p, q), one minus the acceptance of a sampled token
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


def distillation_loss(target: nn.Module, *, tv_weight: float) -> Callable[[nn.Module, Tensor], Tensor]:
    """Loss of a draft on rows [B, N + 1]: (1 - tv_weight) KL(p || q) + tv_weight TV(p, q), a mean over positions."""

    def loss(draft: nn.Module, rows: Tensor) -> Tensor:
        inputs = rows[:, :-1]
        with torch.no_grad():
            log_p = target(inputs, use_cache=False).logits.log_softmax(-1)
        log_q = draft(inputs, use_cache=False).logits.log_softmax(-1)
        p = log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1).mean()
        tv = 1 - torch.minimum(p, log_q.exp()).sum(-1).mean()
        return (1 - tv_weight) * kl + tv_weight * tv

    return loss


@torch.inference_mode()
def sample_texts(target: nn.Module, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue prompts [B, M] at temperature 1 to rows [B, length], past the end-of-text token."""
    step = target(prompts, use_cache=True)
    rows = [prompts]
    for _ in range(length - prompts.shape[1]):
        tokens = torch.multinomial(step.logits[:, -1].softmax(-1), 1, generator=generator)
        rows.append(tokens)
        step = target(tokens, past_key_values=step.past_key_values, use_cache=True)
    return torch.cat(rows, dim=1)


def sample_corpus(
    target: nn.Module,
    stream: np.ndarray,
    path: Path,
    *,
    num_rows: int,
    length: int,
    prompt_length: int,
    end_of_text_id: int,
    seed: int,
) -> np.ndarray:
    """Target-written rows, uint16 [num_rows, length], grown in `path` 256 rows at a time; resumes from what is there.

    Odd rows start at the end-of-text token, even ones with `prompt_length` tokens of `stream` at a random place.
    """
    batch_size = 256
    rows = np.load(path) if path.exists() else np.zeros((0, length), dtype=np.uint16)
    while len(rows) < num_rows:
        chunk = len(rows) // batch_size
        places = np.random.default_rng([seed, chunk]).integers(
            0, len(stream) - prompt_length, batch_size // 2
        )
        prompted = torch.from_numpy(stream[places[:, None] + np.arange(prompt_length)].astype(np.int64))
        free = torch.full((batch_size // 2, 1), end_of_text_id)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + chunk)
        halves = [sample_texts(target, prompts, length, generator) for prompts in (prompted, free)]
        new = torch.stack(halves, dim=1).flatten(0, 1).numpy().astype(np.uint16)
        rows = np.concatenate([rows, new])
        partial = path.with_suffix(".partial.npy")
        np.save(partial, rows)
        os.replace(partial, path)
    return rows[:num_rows]


def mixed_batches(
    corpus_batch: Callable[[int], Tensor], samples: np.ndarray, *, rows_per_batch: int, num_steps: int
) -> Callable[[int], Tensor]:
    """Corpus rows with `rows_per_batch` target-written rows of the same length below them, for the first `num_steps` steps.

    samples: [num_rows, length + 1]; read in order, cyclically.
    """

    def batch(step: int) -> Tensor:
        rows = corpus_batch(step)
        if step >= num_steps:
            return rows
        picked = (step * rows_per_batch + np.arange(rows_per_batch)) % len(samples)
        return torch.cat([rows, torch.from_numpy(samples[picked].astype(np.int64))])

    return batch
