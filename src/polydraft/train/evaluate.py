"""Held-out figures of the pair: loss of target, draft and trigram table, and how often a sampled draft token is kept.

acceptance         mean over positions of sum_v min(p(v), q(v)) at temperature 1
top-1 agreement    share of positions where the most likely tokens of p and q coincide
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from polydraft.train.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT
from polydraft.train.trigram import TrigramTable


def documents_of(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Split a stream at its end-of-text tokens; each document keeps the one before and the one after it."""
    marks = np.flatnonzero(tokens == END_OF_TEXT_ID)
    for start, end in pairwise(marks):
        yield tokens[start : end + 1]


@torch.inference_mode()
def pair_figures(target: nn.Module, draft: nn.Module, tokens: np.ndarray, *, context: int = MAX_CONTEXT) -> dict[str, float]:
    """Mean nats per token of both models and their agreement, every token scored once with at least half a `context` before it
    where the document has that much.
    """
    totals = dict.fromkeys(("target", "draft", "acceptance", "top1"), 0.0)
    num_tokens = 0
    for document in documents_of(tokens):
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


def figures(target: nn.Module, draft: nn.Module, table: TrigramTable, tokens: np.ndarray, num_bytes: int) -> dict[str, float]:
    """All held-out figures; losses in nats per token. The table's discounts are tuned on the held-out tokens, in its favour."""
    pair = pair_figures(target, draft, tokens)
    per_byte = pair["num_tokens"] / num_bytes / math.log(2)
    trigram = float(table.tuned(tokens).nats(tokens).mean())
    return {
        "num_tokens": pair["num_tokens"],
        "num_bytes": num_bytes,
        "target_nats_per_token": pair["target"],
        "draft_nats_per_token": pair["draft"],
        "trigram_nats_per_token": trigram,
        "target_bits_per_byte": pair["target"] * per_byte,
        "draft_bits_per_byte": pair["draft"] * per_byte,
        "trigram_bits_per_byte": trigram * per_byte,
        "acceptance": pair["acceptance"],
        "top1_agreement": pair["top1"],
    }
