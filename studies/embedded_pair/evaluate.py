"""Figures of a target and a draft on held-out text: the loss of both, and how often a sampled draft token is kept.

acceptance         mean over positions of sum_v min(p(v), q(v)) at temperature 1
top-1 agreement    share of positions where the most likely tokens of p and q coincide
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import nn


def documents_of(tokens: np.ndarray, end_of_text_id: int) -> Iterator[np.ndarray]:
    """Split a stream at its end-of-text tokens; each document keeps the one before and the one after it."""
    marks = np.flatnonzero(tokens == end_of_text_id)
    for start, end in pairwise(marks):
        yield tokens[start : end + 1]


@torch.inference_mode()
def pair_figures(
    target: nn.Module, draft: nn.Module, tokens: np.ndarray, *, context: int, end_of_text_id: int
) -> dict[str, float]:
    """Mean nats per token of both models and their agreement, every token scored once with at least half a `context` before it
    where the document has that much.
    """
    totals = dict.fromkeys(("target", "draft", "acceptance", "top1"), 0.0)
    num_tokens = 0
    for document in documents_of(tokens, end_of_text_id):
        ids = torch.from_numpy(document.astype(np.int64))
        for start in range(0, max(1, len(ids) - 1 - context // 2), context // 2):
            window = ids[start : start + context + 1]
            fresh = 0 if start == 0 else context // 2
            log_p = target(window[None, :-1], use_cache=False).logits[0, fresh:].float().log_softmax(-1)
            log_q = draft(window[None, :-1], use_cache=False).logits[0, fresh:].float().log_softmax(-1)
            nexts = window[1 + fresh :, None]
            totals["target"] -= log_p.gather(-1, nexts).sum().item()
            totals["draft"] -= log_q.gather(-1, nexts).sum().item()
            totals["acceptance"] += torch.minimum(log_p, log_q).exp().sum().item()
            totals["top1"] += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
            num_tokens += len(nexts)
    return {"num_tokens": num_tokens, **{name: total / num_tokens for name, total in totals.items()}}
