"""Attention over a tree in one call that reads each key once, under a name that transformers knows."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from polydraft.errors import IncompatibleError

GROUPED = "polydraft_grouped"
"""Name under which transformers knows `_grouped_attention`."""


def _grouped_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K C D"],
    value: Float[Tensor, "B K C E"],
    attention_mask: Float[Tensor, "B 1 GT C"],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **options: object,
) -> tuple[Float[Tensor, "B T H E"], None]:
    """Scaled dot-product attention whose mask repeats the T rows for each of the G = H / K query heads of a key head.

    The query heads that share a key head become rows of one matrix: keys and values are never repeated in memory.
    softcap: c tanh(x / c) of the scaled products (Gemma 2).  s_aux: [H] logits of sinks, which take mass and have no value (gpt-oss).

    Raises:
        IncompatibleError: the layer asks for another bias.
    """
    if options.get("position_bias") is not None:
        raise IncompatibleError(
            f"{type(module).__name__} attends with 'position_bias'. Load it with attn_implementation='eager'."
        )
    B, H, T, D = query.shape
    num_groups = H // key.shape[1]
    if (
        attention_mask.shape[2] != num_groups * T
    ):  # a layer whose keys in the cache have fewer heads than those it attends with
        attention_mask = attention_mask[:, :, :T].repeat(1, 1, num_groups, 1)
    packed = query.reshape(B, key.shape[1], -1, D)
    if softcap is None and s_aux is None:
        out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        products = packed @ key.mT * (D**-0.5 if scaling is None else scaling)
        logits = (products if softcap is None else softcap * torch.tanh(products / softcap)) + attention_mask
        if s_aux is not None:
            sinks = (
                s_aux.view(1, -1, num_groups, 1, 1).expand(B, -1, -1, T, 1).reshape(B, key.shape[1], -1, 1)
            )
            logits = torch.cat([logits, sinks.to(logits.dtype)], -1)
        out = logits.float().softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
    return out.reshape(B, H, T, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped_attention)
