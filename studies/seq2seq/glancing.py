"""Glancing training of the Spec-Drafter: look once, reveal a share of what was wrong, learn the rest.

Xia et al. 2022 (SpecDec, arXiv 2203.16487), with glancing as of Qian et al. 2021 (arXiv 2008.07905).

    cut      a place in the reference; the tokens before it are committed, the k behind it are asked for
    first    a pass with k queries and no gradient; the tokens that it gets wrong are counted
    second   a share of the wrong ones, drawn at random, is shown in the place of their queries; cross-entropy on all others

The share falls linearly while training goes on. References should be the target's own outputs (sequence-level distillation).
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from polydraft.errors import InvalidInputError
from polydraft.papers.mask_query.network import MaskQueries, QuerySizes

FIRST = 0.5
LAST = 0.1
"""Shares of the wrong tokens that are revealed at the beginning and at the end."""


def reveal(
    wanted: Int[Tensor, "B k"],
    guessed: Int[Tensor, "B k"],
    share: float,
    uniforms: Float[Tensor, "B k"],
    ignored: int,
) -> Int[Tensor, "B k"]:
    """Tokens that are shown, -1 elsewhere: of each row's wrong ones the share, rounded, with the smallest uniforms.

    Example:
        >>> reveal(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[5, 1, 1, 1]]), 0.5, torch.tensor([[0.1, 0.4, 0.2, 0.0]]), 0).tolist()
        [[-1, -1, 7, -1]]
    """
    wrong = (wanted != guessed) & (wanted != ignored)
    order = uniforms.masked_fill(~wrong, 2.0).argsort(1).argsort(1)
    return wanted.masked_fill(~(wrong & (order < (share * wrong.sum(1, keepdim=True)).round())), -1)


def glancing_loss(
    network: MaskQueries,
    source: Int[Tensor, "B S"],
    reference: Int[Tensor, "B T"],
    done: float,
    *,
    start: int,
    pad: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Loss of one batch in nats a token. reference: outputs with their end token, padded.  done: share of the training that is over."""
    B, T = reference.shape
    k = network.sizes.queries
    lengths = (reference != pad).sum(1)
    cuts = (torch.rand(B, generator=generator) * lengths).long()
    inputs = torch.cat([torch.full_like(reference[:, :1], start), reference], 1)
    spread = cuts[:, None] + torch.arange(k)
    labels = reference.gather(1, spread.clamp(max=T - 1)).masked_fill(spread >= lengths[:, None], pad)
    memory, hidden = network.read(source, source != pad)
    committed = inputs[:, : int(cuts.max()) + 1]
    counts = cuts + 1
    with torch.no_grad():
        guessed = network(memory, hidden, committed, counts).argmax(-1)
    share = FIRST + (LAST - FIRST) * done
    revealed_tokens = reveal(labels, guessed, share, torch.rand(B, k, generator=generator), pad)
    logits = network(memory, hidden, committed, counts, revealed=revealed_tokens)
    return cross_entropy(
        logits.flatten(0, 1), labels.masked_fill((revealed_tokens >= 0) | (labels == pad), -100).flatten()
    )


def start_of(
    model: Any, *, queries: int = 8, layers: int = 1, encoder_layers: int | None = None
) -> MaskQueries:
    """A fresh drafter for an encoder-decoder of transformers, whose encoder, and whose embeddings, it starts with.

    encoder_layers: at least the model's; those beyond are fresh.

    Raises:
        InvalidInputError: fewer layers than the model's encoder has, or no queries.
    """
    config = model.config
    name = "encoder_layers" if hasattr(config, "encoder_layers") else "num_layers"
    deep = encoder_layers or getattr(config, name)
    if deep < getattr(config, name) or queries < 1:
        raise InvalidInputError(
            f"encoder_layers={deep} and queries={queries} were given; expected at least {getattr(config, name)} layers, as the model has, and one query."
        )
    heads = getattr(config, "encoder_attention_heads", None) or config.num_heads
    family = {**config.to_diff_dict(), "model_type": config.model_type, name: deep}
    drafter = MaskQueries(QuerySizes(config.vocab_size, config.d_model, heads, queries, layers), family)
    drafter.encoder.load_state_dict(model.get_encoder().state_dict(), strict=False)
    with torch.no_grad():
        target_rows = model.get_input_embeddings().weight
        drafter.embedding.weight.copy_(target_rows * (drafter.sizes.width**-0.5 / target_rows.std()))
    return drafter
