"""All that a pass over trees is told, as one table of integers [S, L] that is made on the host and sent in one go.

    ids        token of each row; rows whose embedding is given beside the table have -1
    position   of each row, behind the committed tokens
    offset     of the column that a row writes, behind the committed ones; -1 for padding
    sees       the columns behind the committed ones that a row sees, one bit each: its path, itself, auxiliary rows
    slot, length

S and T, sequences and rows, are the only shapes: how much is committed is a number in the table. A row of padding sees the root, so
that no sum is empty, and sequences of padding have length 0 in slot 0, where they write to a column that nobody sees.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from numba import njit
from torch import Tensor

from polydraft import tree as trees
from polydraft.core import AuxRows, TokenTree
from polydraft.models.slots import TREE_ROOM

__all__ = ["WORDS", "Fields", "Rows", "fields", "filled", "length_of", "visible", "with_aux"]

WORDS = TREE_ROOM // 64


class Rows(NamedTuple):
    """The rows of a pass, on the host. [B, M] each, but for parents [B, N] and sees [B, M, M].

    ids: None where only the device knows them.  offset: nodes of the tree, auxiliary rows behind them, -1 for padding.
    node: whose path a row sees; -1: none.  position: None where it is the depth of that node.
    sees: which rows see which others beside their path; None: only themselves.
    """

    ids: Int64[np.ndarray, "B M"] | None
    offset: Int64[np.ndarray, "B M"]
    node: Int64[np.ndarray, "B M"]
    parents: Int64[np.ndarray, "B N"]
    position: Int64[np.ndarray, "B M"] | None = None
    sees: Bool[np.ndarray, "B M M"] | None = None


class Fields(NamedTuple):
    """The parts of a table, where it is."""

    ids: Int[Tensor, "S T"]
    position: Int[Tensor, "S T"]
    offset: Int[Tensor, "S T"]
    sees: Int[Tensor, "S T words"]
    slot: Int[Tensor, " S"]
    length: Int[Tensor, " S"]


def length_of(rows: int) -> int:
    """L for so many rows."""
    return rows * (3 + WORDS) + 2


def fields(table: Int[Tensor, "S L"]) -> Fields:
    """The parts of a table."""
    T = (table.shape[1] - 2) // (3 + WORDS)
    ids, position, offset, sees, slot, length = table.split([T, T, T, WORDS * T, 1, 1], 1)
    return Fields(ids, position, offset, sees.unflatten(1, (T, WORDS)), slot[:, 0], length[:, 0])


@njit(cache=True)
def _fill(table, T, slots, lengths, ids, offset, node, parents, position, sees):
    for b in range(len(slots)):
        table[b, -2], table[b, -1] = slots[b], lengths[slots[b]]
        for r in range(offset.shape[1]):
            column = offset[b, r]
            if column < 0:
                continue
            bits = table[b, 3 * T + WORDS * r : 3 * T + WORDS * (r + 1)]
            bits[:] = 0
            bits[column >> 6] |= np.int64(1) << np.int64(column & 63)
            depth, n = -1, node[b, r]
            while n >= 0:
                bits[n >> 6] |= np.int64(1) << np.int64(n & 63)
                depth, n = depth + 1, parents[b, n]
            for y in range(sees.shape[2]):
                if sees[b, r, y]:
                    bits[offset[b, y] >> 6] |= np.int64(1) << np.int64(offset[b, y] & 63)
            if ids.size:
                table[b, r] = ids[b, r]
            table[b, T + r] = position[b, r] if position.size else depth
            table[b, 2 * T + r] = column


_NONE, _NO_SEES = np.empty((0, 0), np.int64), np.empty((0, 0, 0), np.bool_)


def filled(shape: tuple[int, int], slots: np.ndarray, lengths: np.ndarray, rows: Rows) -> Int64[np.ndarray, "S L"]:
    """The table of a pass. shape: S and T.  lengths: of all slots.

    Example:
        >>> rows = Rows(np.array([[5, 9]]), np.array([[0, 1]]), np.array([[0, 1]]), np.array([[-1, 0]]))
        >>> parts = fields(torch.from_numpy(filled((2, 2), np.array([3]), np.array([0, 0, 0, 7]), rows)))
        >>> parts.ids.tolist(), parts.position.tolist(), parts.slot.tolist(), parts.length.tolist()
        ([[5, 9], [0, 0]], [[0, 1], [0, 0]], [3, 0], [7, 0])
        >>> visible(parts.sees, 2)[0].int().tolist()
        [[1, 0], [1, 1]]
    """
    S, T = shape
    table = np.zeros((S, length_of(T)), np.int64)
    table[:, 2 * T : 3 * T] = -1
    table[:, 3 * T : -2 : WORDS] = 1
    ids, offset, node, parents, position, sees = rows
    _fill(
        table,
        T,
        slots,
        lengths,
        _NONE if ids is None else ids,
        offset,
        node,
        parents,
        _NONE if position is None else position,
        _NO_SEES if sees is None else sees,
    )
    return table


def with_aux(rows: Rows, aux: AuxRows, num_nodes: int) -> Rows:
    """Auxiliary rows, of ids or with id -1 where their embeddings are given, behind the rows of nodes."""
    (B, M), X, nodes = rows.offset.shape, aux.nodes.shape[1], aux.nodes.cpu().numpy()
    ids = np.full((B, X), -1) if aux.inputs.ndim == 3 else aux.inputs.cpu().numpy()
    sees = np.zeros((B, M + X, M + X), np.bool_)
    sees[:, M:, M:] = aux.mask.cpu().numpy()
    offset = np.broadcast_to(np.arange(num_nodes, num_nodes + X), (B, X))
    depths = trees.depths(TokenTree.of(np.zeros_like(rows.parents), rows.parents)).numpy()
    position = np.where(rows.node >= 0, np.take_along_axis(depths, np.maximum(rows.node, 0), 1), 0)
    assert rows.ids is not None
    pairs = (rows.ids, ids), (rows.offset, offset), (rows.node, nodes), (position, aux.positions.cpu().numpy())
    ids, offset, node, position = (np.concatenate(pair, 1) for pair in pairs)
    return Rows(ids, offset, node, rows.parents, position, sees)


def visible(sees: Int[Tensor, "S T words"], width: int) -> Bool[Tensor, "S T W"]:
    """The bits of the first columns."""
    column = torch.arange(width, device=sees.device)
    return (sees[..., column >> 6] >> (column & 63)) & 1 > 0
