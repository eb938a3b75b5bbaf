"""A whole proposal of a compiled draft model in one call: passes, laws and draws, depth by depth for the whole batch.

K paths hang below the root, or below a trunk that is drawn first, all of one length or the first longer than the others; nodes lie
depth by depth, paths in order. Paths that agree share their rows: a prefix is run through the model once, whatever the number of its
copies, and the ends of short paths not at all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from polydraft.core import TokenTree
from polydraft.exponential import exp
from polydraft.models.kernels import PANEL
from polydraft.models.llama_pass import compiled_pass
from polydraft.noise import choose_row, first_arrivals, uniform_at

if TYPE_CHECKING:
    from polydraft.models.llama import CompiledLlama

__all__ = ["propose_paths"]

_f32 = np.float32
LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a pass of their own before."""


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _law(logits, bias, temperature, top_k, top_p, min_p, out):
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
    top, inverse = logits[best], _f32(1.0 / temperature)
    for i in range(V):
        out[i] = exp((logits[i] - top) * inverse)
    if 0 < top_k < V:
        least = np.partition(out, V - top_k)[V - top_k]
        for i in range(V):
            if out[i] < least:
                out[i] = 0
    if top_p < 1.0:
        order, wanted = np.argsort(-out), top_p * out.sum()
        kept, mass = 0, 0.0
        while kept < V and mass < wanted:
            mass += out[order[kept]]
            kept += 1
        out[order[kept:]] = 0
    if min_p > 0.0:
        for i in range(V):
            if out[i] < min_p * out[best]:
                out[i] = 0
    share = _f32(1.0 / out.sum())
    for i in range(V):
        out[i] *= share


@njit(cache=True)
def _begin(depth, width, trunk, short):
    """The first node whose parent is `depth` below the root."""
    end = min(depth, short) if short > 0 else depth
    return 1 + depth + (width - 1) * max(0, end - trunk)


@njit(cache=True, error_model="numpy")
def _propose(parts, vocab, asked, law, bias, coupled):
    """asked [B, 9 + P] = slot, depth, width, trunk, short, seed, sample, position, number of pending tokens, those tokens, the root last.

    law [B, 4] = temperature, top_k, top_p, min_p.  Caches grow by what is pending.
    Returns tokens, parents, rows [B, N] and probs [B, R, V]. coupled: draws by the race, else independent ones.
    """
    slots, depths, widths, trunks, shorts = asked[:, 0].copy(), asked[:, 1], asked[:, 2], asked[:, 3], asked[:, 4]
    keys, counts, pending = asked[:, 5:8], asked[:, 8], asked[:, 9:]
    B = slots.size
    N, distinct, P = 1, 1, pending.shape[1]
    for b in range(B):
        N = max(N, _begin(depths[b], widths[b], trunks[b], shorts[b]))
        distinct = max(distinct, _begin(depths[b] - 1, widths[b], trunks[b], shorts[b]))
    tokens, parents, rows = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64), np.full((B, N), -1, np.int64)
    probs = np.zeros((B, distinct, vocab), _f32)
    first, row_of = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)  # earliest copy of a node, its row of probs
    fed, above = np.zeros((B, P + N), np.int64), np.full((B, P + N), -1, np.int64)  # the tree that the model sees
    begins, ends, wanted, used = np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64)
    whole = parts.weights.head.shape[0] * PANEL
    taken = np.full(parts.weights.attention_norm.shape[0] + 1, -1, np.int64)
    states, drawn = np.empty((0, 0, 0), _f32), np.empty(widths.max(), np.int64)
    extra, mask = np.empty((B, 3, 0), np.int64), np.empty((B, 0, 0), np.bool_)
    for b in range(B):
        tokens[b, 0] = pending[b, counts[b] - 1]
        for i in range(counts[b]):
            fed[b, i], above[b, i] = pending[b, i], i - 1
    for d in range(depths.max()):
        R = 0
        for b in range(B):
            root = counts[b] - 1
            begins[b] = 0 if d == 0 else root + _begin(d - 1, widths[b], trunks[b], shorts[b])
            ends[b] = begins[b] if d >= depths[b] else root + _begin(d, widths[b], trunks[b], shorts[b])
            if d == shorts[b] < depths[b] and d > 0:
                ends[b] = begins[b] + 1
            wanted[b] = root if d == 0 else begins[b]
            R += ends[b] - wanted[b] if ends[b] > wanted[b] else 0
        logits = np.empty((R, whole), _f32)
        compiled_pass(parts, slots, fed, above, begins, ends, wanted, logits, states, taken, extra, mask)
        r = 0
        for b in range(B):
            for n in range(wanted[b], ends[b]):
                node = n - counts[b] + 1
                if first[b, node] != node:
                    continue
                row_of[b, node] = used[b]
                _law(logits[r], bias[b], law[b, 0], int(law[b, 1]), law[b, 2], law[b, 3], probs[b, used[b]])
                used[b] += 1
                r += 1
            if d >= depths[b]:
                continue
            here, trunk = _begin(d, widths[b], trunks[b], shorts[b]), trunks[b]
            above_here = _begin(d - 1, widths[b], trunks[b], shorts[b])
            for k in range(_begin(d + 1, widths[b], trunks[b], shorts[b]) - here):
                n, root = here + k, counts[b] - 1
                parent = d if d <= trunk else above_here + k
                source = row_of[b, first[b, parent]]
                parents[b, n], rows[b, n] = parent, source
                if not coupled:
                    tokens[b, n] = choose_row(probs[b, source], uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, n))
                elif d != trunk:
                    first_arrivals(probs[b, source], keys[b, 0], keys[b, 1], keys[b, 2] + d, drawn[:1])
                    tokens[b, n] = drawn[0]
                else:
                    if k == 0:
                        first_arrivals(probs[b, source], keys[b, 0], keys[b, 1], keys[b, 2] + d, drawn[: widths[b]])
                    tokens[b, n] = drawn[k]
                first[b, n] = n
                for m in range(n - k, n):
                    if tokens[b, m] == tokens[b, n] and (d == 0 or first[b, parents[b, m]] == first[b, parent]):
                        first[b, n] = first[b, m]
                        break
                if first[b, n] == n:
                    fed[b, root + n], above[b, root + n] = tokens[b, n], root + first[b, parent]
    for b in range(B):
        if depths[b] > 0:
            parts.memory.lengths[slots[b]] += counts[b]
    return tokens, parents, rows, probs


def propose_paths(
    model: "CompiledLlama",
    slots: Sequence[int],
    pending: Sequence[Sequence[int]],
    keys: tuple[Sequence[int], Sequence[int], Sequence[int]],
    sizes: Sequence[tuple[int, int, int, int]],
    law: Sequence[tuple[float, float, float, float]],
    bias: np.ndarray,
    *,
    coupled: bool = False,
) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
    """K paths for every row in one compiled call: the tree, each node's row, and the rows that tokens were drawn from.

    sizes: paths, depth, trunk and depth of the paths after the first of every row, trunk < depth or 0, short < depth or 0.
    pending: committed tokens that the cache lacks, the root last; they are cached where the depth is not 0.
    keys: seeds, sample indices and positions of the noise.
    law: temperature, top_k, top_p, min_p of every row.  bias: added to logits, float32, [B, V] or [B, 0].
    coupled: children of the node that branches are the smallest clock / q, and so is the one child of each node below
        (Kobus & Gunduz 2025, arXiv 2504.15475); else every token is an independent draw of its row.
    """
    depths = [depth for _, depth, *_ in sizes]
    for slot, ids, depth in zip(slots, pending, depths, strict=True):
        if depth and len(ids) > LONGEST_PENDING:
            model.prefill([slot], [ids[:-LONGEST_PENDING]])
    left = [ids[-LONGEST_PENDING:] if depth else ids[-1:] for ids, depth in zip(pending, depths, strict=True)]
    longest = max(map(len, left))
    asked = np.array(
        [
            [slot, depth, width, trunk, short, *key, len(ids), *ids, *[0] * (longest - len(ids))]
            for slot, (width, depth, trunk, short), ids, *key in zip(slots, sizes, left, *keys, strict=True)
        ]
    )
    found = _propose(model.parts, model.vocab_size, asked, np.array(law), bias, coupled)
    model.passes += max(depths, default=0)
    tokens, parents, rows, probs = found
    return TokenTree.of(tokens, parents), torch.from_numpy(rows), torch.from_numpy(probs)
