"""Attention of a static pass: over the committed tokens of each sequence, and over the rows of its tree that each row sees.

    S  sequences    T  rows of each    H  query heads    G  heads of keys and values    D  their width

No mask over committed columns is made: a row sees as many as are committed. A tree's mask is W columns wide, at most. `tree` takes Triton's
kernels on a GPU (`triton_attention.py`: long contexts are split over blocks), and torch operations elsewhere. `causal` is PyTorch's own
attention, flash on a GPU, with the causal mask that it knows without making it.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from polydraft.models.static.table import Fields, visible
from polydraft.staging import has_kernels

__all__ = ["causal", "tree"]


def tree(
    q: Float[Tensor, "S T H D"],
    keys: Float[Tensor, "slots C G D"],
    values: Float[Tensor, "slots C G D"],
    table: Tensor,
    parts: Fields,
    reach: int,
    width: int,
) -> Float[Tensor, "S T HD"]:
    """What rows of trees take from committed tokens and from each other.

    table, parts: see `table`.  reach, width: no sequence has more committed tokens, no tree more columns.
    """
    if has_kernels(q.device):
        from polydraft.models.static.triton_attention import tree_attention

        return tree_attention(q, keys, values, table)
    (S, T, H, D), G = q.shape, keys.shape[2]
    rows = q.view(S, T, G, -1, D).permute(0, 2, 3, 1, 4).reshape(S, G, -1, D)  # heads that share a key become rows of one matrix
    behind = (parts.length[:, None] + torch.arange(width, device=q.device)).clamp(max=keys.shape[1] - 1)
    near = [x[parts.slot[:, None], behind].transpose(1, 2) for x in (keys, values)]
    far = [x[:, :reach][parts.slot].transpose(1, 2) for x in (keys, values)]
    committed = torch.arange(reach, device=q.device) < parts.length[:, None]
    scores = (rows @ far[0].transpose(2, 3)).float().masked_fill(~committed[:, None, None], -torch.inf)
    sees = visible(parts.sees, width)[:, None].repeat(1, 1, H // G, 1)
    scored = (rows @ near[0].transpose(2, 3)).float().masked_fill(~sees, -torch.inf)
    shares = (torch.cat([scores, scored], -1) * D**-0.5).softmax(-1).to(q.dtype)
    mixed = shares[..., :reach] @ far[1] + shares[..., reach:] @ near[1]
    return mixed.view(S, G, -1, T, D).permute(0, 3, 1, 2, 4).reshape(S, T, -1)


def causal(q: Float[Tensor, "T H D"], keys: Float[Tensor, "C G D"], values: Float[Tensor, "C G D"]) -> Float[Tensor, "T HD"]:
    """What the last T of C tokens take from all up to their own."""
    T, C = len(q), len(keys)
    given = (x.transpose(0, 1)[None] for x in (q, keys, values))
    bias = causal_lower_right(T, C) if T > 1 else None
    mixed = scaled_dot_product_attention(*given, attn_mask=bias, enable_gqa=q.shape[1] != keys.shape[1])
    return mixed[0].transpose(0, 1).flatten(1)
