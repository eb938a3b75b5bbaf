"""A whole proposal of a compiled draft model in one call: passes, laws and draws, depth by depth for the whole batch.

The tree of each row is fixed beforehand, see `models/layout.py`. Paths that agree share their rows: a prefix is run through the model
once, whatever the number of its copies, and nodes without children not at all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from polydraft.core import TokenTree
from polydraft.errors import CapacityError
from polydraft.exponential import exp
from polydraft.models.kernels import PANEL
from polydraft.models.layout import layouts
from polydraft.models.llama_pass import compiled_pass
from polydraft.models.slots import TREE_ROOM
from polydraft.noise import choose_row, first_arrivals, uniform_at
from polydraft.sampling import sift

if TYPE_CHECKING:
    from polydraft.models.llama import CompiledLlama

__all__ = ["draft_law", "propose_paths", "read_pending"]

_f32 = np.float32
_STEEPEST = float(np.finfo(_f32).max)
"""Largest inverse of a temperature: 0 times it is 0, where 0 times infinity is no number."""
LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a pass of their own before."""


@njit
def _least_of_largest(x, count):
    """The count-th largest of x. `np.partition` says the same, and takes some three seconds to compile."""
    heap = np.arange(count)  # the least on top
    for j in range(count // 2 - 1, -1, -1):
        sift(heap, x, j, count)
    for i in range(count, len(x)):
        if x[i] > x[heap[0]]:
            heap[0] = i
            sift(heap, x, 0, count)
    return x[heap[0]]


@njit(cache=True, error_model="numpy")
def draft_law(logits, bias, temperature, top_k, top_p, min_p, out):
    """out = the law that a draft token is drawn from; logits are changed."""
    V = out.size
    for i in range(bias.size):
        logits[i] += bias[i]
    best = 0
    for i in range(V):
        if logits[i] > logits[best]:
            best = i
    if temperature == 0.0:
        out[:] = 0
        out[best] = 1
        return
    top, inverse = logits[best], _f32(min(1.0 / temperature, _STEEPEST))
    for i in range(V):
        out[i] = exp((logits[i] - top) * inverse)
    if 0 < top_k < V:
        least = _least_of_largest(out, top_k)
        for i in range(V):
            if out[i] < least:
                out[i] = 0
    if top_p < 1.0:
        order, wanted = np.argsort(-out), top_p * out.sum()
        kept, mass = 0, 0.0
        while kept < V and mass < wanted:
            mass += out[order[kept]]
            kept += 1
        for i in order[kept:]:
            out[i] = 0
    if min_p > 0.0:
        for i in range(V):
            if out[i] < min_p * out[best]:
                out[i] = 0
    share = _f32(1.0 / out.sum())
    for i in range(V):
        out[i] *= share


@njit(cache=True, error_model="numpy")
def _propose(parts, vocab, asked, given, starts, inner, law, bias, coupled):
    """asked [B, 5 + P] = slot, seed, sample, position, number of pending tokens, those tokens, the root last.

    given, starts, inner: see `layout.Layout`.  law [B, 4] = temperature, top_k, top_p, min_p.  Caches grow by what is pending, less the root, behind which the tree lies.
    Returns tokens, parents, rows [B, N] and probs [B, R, V]. coupled: draws by the race, else independent ones.
    """
    slots, keys, counts, pending = asked[:, 0].copy(), asked[:, 1:4], asked[:, 4], asked[:, 5:]
    (B, N), P, distinct = given.shape, pending.shape[1], 1
    for b in range(B):
        distinct = max(distinct, (inner[b] - starts[b, :-1]).sum())
    tokens, parents, rows = np.zeros((B, N), np.int64), given.copy(), np.full((B, N), -1, np.int64)
    probs = np.zeros((B, distinct, vocab), _f32)
    first, row_of = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)  # earliest copy of a node, its row of probs
    fed, above = np.zeros((B, P + N), np.int64), np.full((B, P + N), -1, np.int64)  # the tree that the model sees
    begins, ends, wanted, used = np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64)
    whole = parts.weights.head.shape[0] * PANEL
    taken = np.full(parts.weights.attention_norm.shape[0] + 1, -1, np.int64)
    states, drawn = np.empty((0, 0, 0), _f32), np.empty(N, np.int64)
    extra, mask = np.empty((B, 3, 0), np.int64), np.empty((B, 0, 0), np.bool_)
    for b in range(B):
        tokens[b, 0] = pending[b, counts[b] - 1]
        for i in range(counts[b]):
            fed[b, i], above[b, i] = pending[b, i], i - 1
    for d in range(inner.shape[1] - 1):
        R = 0
        for b in range(B):
            wanted[b] = counts[b] - 1 + starts[b, d]
            begins[b] = 0 if d == 0 else wanted[b]
            ends[b] = counts[b] - 1 + inner[b, d] if inner[b, d] > starts[b, d] else begins[b]
            R += inner[b, d] - starts[b, d]
        logits = np.empty((R, whole), _f32)
        compiled_pass(parts, slots, fed, above, begins, ends, wanted, logits, states, taken, extra, mask)
        r = 0
        for b in range(B):
            root, here, end = counts[b] - 1, starts[b, d + 1], starts[b, d + 2]
            for node in range(starts[b, d], inner[b, d]):
                if first[b, node] != node:
                    continue
                row_of[b, node] = used[b]
                draft_law(logits[r], bias[b], law[b, 0], int(law[b, 1]), law[b, 2], law[b, 3], probs[b, used[b]])
                used[b] += 1
                r += 1
            for n in range(here, end):
                parent = parents[b, n]
                source = row_of[b, first[b, parent]]
                if tokens[b, parent] < 0:
                    tokens[b, n] = -1
                elif not coupled:
                    tokens[b, n] = choose_row(probs[b, source], uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, n))
                elif not (parents[b, here:n] == parent).any():  # all children of a node at once
                    many = (parents[b, n:end] == parent).sum()
                    first_arrivals(probs[b, source], keys[b, 0], keys[b, 1], keys[b, 2] + d, drawn[:many])
                    turn = 0
                    for m in range(n, end):
                        if parents[b, m] == parent:
                            tokens[b, m] = drawn[turn] if turn == 0 or drawn[turn] != drawn[turn - 1] else -1
                            turn += 1
                if tokens[b, n] < 0:  # no draft, which the caller sees
                    continue
                rows[b, n] = source
                first[b, n] = n
                for m in range(here, n):
                    if tokens[b, m] == tokens[b, n] and (d == 0 or first[b, parents[b, m]] == first[b, parent]):
                        first[b, n] = first[b, m]
                        break
                if first[b, n] == n:
                    fed[b, root + n], above[b, root + n] = tokens[b, n], root + first[b, parent]
    for b in range(B):
        if inner[b, 0] > 0:
            parts.memory.lengths[slots[b]] += counts[b] - 1
    return tokens, parents, rows, probs


def read_pending(
    model: "CompiledLlama", slots: Sequence[int], pending: Sequence[Sequence[int]], drafting: Sequence[object], num_rows: int
) -> list[Sequence[int]]:
    """What is left of `pending` for a proposal of `num_rows` rows, the root's included; what does not fit beside them is read now.

    Raises:
        CapacityError: more rows than the cache has room for behind the committed tokens.
    """
    if num_rows > TREE_ROOM:
        raise CapacityError(
            f"a draft of {num_rows} nodes was asked for; a pass takes at most {TREE_ROOM}. Draft fewer or shorter paths."
        )
    most = min(LONGEST_PENDING, TREE_ROOM + 1 - num_rows)
    for slot, ids, drafts in zip(slots, pending, drafting, strict=True):
        if drafts and len(ids) > most:
            model.prefill([slot], [ids[:-most]])
    return [ids[-most:] if drafts else ids[-1:] for ids, drafts in zip(pending, drafting, strict=True)]


def propose_paths(
    model: "CompiledLlama",
    slots: Sequence[int],
    pending: Sequence[Sequence[int]],
    keys: tuple[Sequence[int], Sequence[int], Sequence[int]],
    trees: Sequence[tuple[int, ...]],
    law: Sequence[tuple[float, float, float, float]],
    bias: np.ndarray,
    *,
    coupled: bool = False,
) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
    """A tree for every row in one compiled call: the tree, each node's row, and the rows that tokens were drawn from.

    trees: of every row, the parents of a fixed `core.Budget`.
    pending: committed tokens that the cache lacks, the root last; they are cached where there is a draft.
    keys: seeds, sample indices and positions of the noise.
    law: temperature, top_k, top_p, min_p of every row.  bias: added to logits, float32, [B, V] or [B, 0].
    coupled: the children of a node are its smallest clock / q, and -1 where there are more of them than tokens (Kobus & Gunduz 2025, arXiv 2504.15475); else every token is an independent draw of its row.

    Raises:
        CapacityError: a tree of more nodes than a pass takes.
    """
    places, drafting = layouts(tuple(trees)), [len(parents) > 1 for parents in trees]
    left = read_pending(model, slots, pending, drafting, places.parents.shape[1])
    longest = max(map(len, left))
    asked = np.array(
        [[slot, *key, len(ids), *ids, *[0] * (longest - len(ids))] for slot, ids, *key in zip(slots, left, *keys, strict=True)]
    )
    found = _propose(model.parts, model.vocab_size, asked, *places, np.array(law), bias, coupled)
    model.scored([slot for slot, drafts in zip(slots, drafting, strict=True) if drafts], places.parents.shape[1])
    model.passes += places.inner.shape[1] - 1
    tokens, parents, rows, probs = found
    return TokenTree.of(tokens, parents), torch.from_numpy(rows), torch.from_numpy(probs)
