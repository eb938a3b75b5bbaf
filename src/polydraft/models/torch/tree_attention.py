"""Attention of tree nodes: which columns of the cache a node sees.

A node sees the committed tokens of its own sequence, its ancestors and itself. The mask is additive: 0 or -inf. Attention under it is one call that
reads each key once, under a name that transformers knows.
"""

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from polydraft.errors import IncompatibleError
from polydraft.numerics.compiled_code import njit


@njit(cache=True)
def _nodes(
    mask: np.ndarray, positions: np.ndarray, lengths: np.ndarray, parents: np.ndarray, since: int
) -> None:
    for b in range(parents.shape[0]):
        for n in range(since, parents.shape[1]):
            row = mask[b, n - since]
            row[: lengths[b]] = 0
            row[lengths[b] :] = -np.inf
            depth = -1
            m = n
            while m >= 0:
                row[lengths[b] + m] = 0
                depth += 1
                m = parents[b, m]
            positions[b, n - since] = lengths[b] + depth


def node_mask(
    lengths: Int64[np.ndarray, " B"],
    parents: Int64[np.ndarray, "B N"],
    since: int = 0,
) -> tuple[Float32[np.ndarray, "B T C"], Int64[np.ndarray, "B T"]]:
    """Mask and positions of the nodes from `since` on.

    lengths: committed tokens.  parents: as in `TokenTree`; a padding node counts as a root.
    Node m sits in column length + m. C = longest length + N.

    Example:
        >>> mask, positions = node_mask(np.array([2]), np.array([[-1, 0, 0]]))
        >>> (mask[0] == 0).astype(int).tolist(), positions.tolist()
        ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], [[2, 3, 3]])
    """
    B, N = parents.shape
    mask = np.empty((B, N - since, int(lengths.max()) + N), np.float32)
    positions = np.empty((B, N - since), np.int64)
    _nodes(mask, positions, lengths, parents, since)
    return mask, positions


@njit(cache=True)
def _depths(columns: np.ndarray, lengths: np.ndarray, parents: np.ndarray) -> None:
    for b in range(parents.shape[0]):
        for n in range(parents.shape[1]):
            m = parents[b, n]
            columns[b, lengths[b] + n] = lengths[b] if m < 0 else columns[b, lengths[b] + m] + 1


def column_positions(
    lengths: Int64[np.ndarray, " B"], parents: Int64[np.ndarray, "B N"]
) -> Int64[np.ndarray, "B C"]:
    """Positions of what lies in the columns that `node_mask` is over; behind a shorter text's rows they mean nothing.

    Example:
        >>> column_positions(np.array([2]), np.array([[-1, 0, 0, 1]])).tolist()
        [[0, 1, 2, 3, 3, 4]]
    """
    B, N = parents.shape
    columns = np.tile(np.arange(int(lengths.max()) + N), (B, 1))
    _depths(columns, lengths, parents)
    return columns


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
