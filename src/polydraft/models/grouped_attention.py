"""Attention over a tree in one call that reads each key once, under a name that transformers knows."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from polydraft.errors import IncompatibleError

__all__ = ["GROUPED"]

GROUPED = "polydraft_grouped"
"""Name under which transformers knows `_grouped_attention`."""


def _grouped_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K C D"],
    value: Float[Tensor, "B K C E"],
    attention_mask: Float[Tensor, "B 1 GT C"],
    scaling: float | None = None,
    **options: object,
) -> tuple[Float[Tensor, "B T H E"], None]:
    """Scaled dot-product attention whose mask repeats the T rows for each of the G = H / K query heads of a key head.

    The query heads that share a key head become rows of one matrix: keys and values are never repeated in memory.

    Raises:
        IncompatibleError: the layer asks for more than a mask and a scale.
    """
    for option in ("position_bias", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise IncompatibleError(f"{type(module).__name__} attends with {option!r}. Load it with attn_implementation='eager'.")
    B, H, T, D = query.shape
    num_groups = H // key.shape[1]
    if attention_mask.shape[2] != num_groups * T:  # a layer whose keys in the cache have fewer heads than those it attends with
        attention_mask = attention_mask[:, :, :T].repeat(1, 1, num_groups, 1)
    packed = query.reshape(B, key.shape[1], -1, D)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, H, T, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, _grouped_attention)
