"""The held-out figures of the embedded pair: losses of target, draft and a trigram table, and how often a sampled draft token is kept."""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from studies.embedded_pair.evaluate import pair_figures
from studies.embedded_pair.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT
from studies.embedded_pair.trigram import TrigramTable


def figures(
    target: nn.Module, draft: nn.Module, table: TrigramTable, tokens: np.ndarray, num_bytes: int
) -> dict[str, float]:
    """All held-out figures; losses in nats per token. The table's discounts are tuned on the held-out tokens, in its favour."""
    pair = pair_figures(target, draft, tokens, context=MAX_CONTEXT, end_of_text_id=END_OF_TEXT_ID)
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
