"""The Spec-Drafter of the study: glancing training on what the target wrote of the training sources."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polydraft.papers.mask_query.network import MaskQueries
from studies.seq2seq.glancing import glancing_loss, start_of
from studies.seq2seq.teacher import PAD, batches, scheduled


def train_drafter(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]], folder: Path, *, seconds: float, report: Callable[[str], None], seed: int = 0,
) -> MaskQueries:  # fmt: skip
    """Train 3 + 1 layers with 8 queries for so many seconds of processor time. pairs: ids of sources, and of the target's outputs."""
    torch.manual_seed(seed)
    network = start_of(model, queries=8, layers=1, encoder_layers=3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    draw = torch.Generator().manual_seed(seed)
    began = saved = time.process_time()
    network.train()
    for step, (source, reference) in enumerate(batches(pairs, 32, seed)):
        done = (time.process_time() - began) / seconds
        if done >= 1:
            break
        scheduled(optimizer, done, 2e-3)
        loss = glancing_loss(network, source, reference, done, start=PAD, pad=PAD, generator=draw)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            report(f"step {step}: loss {loss.item():.3f}, {100 * done:.0f}%")
        if time.process_time() - saved > 60:
            network.save(folder)
            saved = time.process_time()
    network.eval().save(folder)
    return network
