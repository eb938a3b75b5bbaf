"""Attention: a row's queries, keys and values get their biases, norms and rotation, then it attends to its slot's columns.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import NamedTuple

import numpy as np

from polydraft.models.compiled.cache import SlotMemory, keep
from polydraft.models.compiled.kernels import cap, norm_part, soften
from polydraft.models.compiled.products import call_product
from polydraft.models.compiled.program import lasting_code
from polydraft.models.compiled.vectors import PANEL
from polydraft.models.compiled.workspace import NONE, Sizes, Workspace
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp, fma

__all__ = ["Attention", "Place", "attend", "attend_code", "place_code", "place_heads"]


@inner
def _rotate(x, begin, cos, sin):
    half = len(cos)
    for i in range(half):
        a, b = x[begin + i], x[begin + i + half]
        x[begin + i] = fma(a, cos[i], -(b * sin[i]))
        x[begin + i + half] = fma(b, cos[i], a * sin[i])


@inner
def place_heads(qkv, bias, q_norm, k_norm, sizes, cos, sin, memory, layer, slot, column):
    """Bias, norms and rotation of one row's q and k; its keys and values go to one column of a slot."""
    H, G, D = sizes.heads, sizes.groups, sizes.width
    step = 2 * D if sizes.gated else D
    first = H * step
    for i in range(len(bias)):
        qkv[i] += bias[i]
    for j in range(H + G):
        begin = j * step if j < H else first + (j - H) * D
        if len(q_norm) > 0:
            norm_part(qkv, begin, q_norm if j < H else k_norm, sizes.epsilon)
        _rotate(qkv, begin, cos, sin)
    keys, values, together, bits = memory.keys[layer, slot], memory.values[layer, slot], memory.together, qkv.view(np.uint32)
    for j in range(G):
        for i in range(D):
            keep(keys[j, column // PANEL], together, i, column % PANEL, bits[first + j * D + i])
            keep(values[j, i // PANEL], together, column, i % PANEL, bits[first + (G + j) * D + i])


@inner(error_model="numpy")
def attend(sizes, memory, work, layer, window, sinks, first, last, g, head, heads, thread):
    """Rows first .. last-1, all of one slot: softmax(scale q . keys) values, so many heads of group g, from `head` on, in one product.

    window: tokens that a row attends to, itself included; 0 for all. Panels of columns that no row attends to are left out.
    sinks: [H] a score more in the softmax of each head, which has no value, or nothing.
    """
    D, G = sizes.width, sizes.groups
    slots, padded, offset = memory.keys.shape[1], memory.values.shape[3] * PANEL, (g * (sizes.heads // G) + head) * D
    columns, slot, end = memory.values.shape[4] * memory.together, work.rows[first].slot, np.int64(0)
    size = 4 // memory.together
    queries, scores, blend, totals = work.queries[thread], work.scores[thread], work.blend[thread], work.totals[thread]
    inputs, nearest = queries.shape[1], np.int64(0) if window == 0 else columns
    for t in range(first, last):
        end = max(end, work.rows[t].column + 1)
        if window > 0:
            nearest = min(nearest, max(np.int64(0), work.rows[t].position + 1 - window), work.rows[t].length)
    skipped_panels = nearest // PANEL
    shift, panels = skipped_panels * PANEL, (end + PANEL - 1) // PANEL - skipped_panels
    rows, scale, apart = (last - first) * heads, sizes.attention_scale, 2 if sizes.gated else 1
    for t in range(first, last):
        for h in range(heads):
            r, begin = (t - first) * heads + h, apart * (offset + h * D)
            for i in range(D):
                queries[r, i] = work.qkv[t, begin + i] * scale
    at = size * ((layer * slots + slot) * G + g) * columns
    call_product(
        memory.product,
        queries.ctypes.data,
        4 * inputs,
        memory.keys.ctypes.data + (at + size * shift) * inputs,
        size * inputs * PANEL,
        panels,
        inputs,
        scores.ctypes.data,
        4 * columns,
        PANEL,
        rows,
    )
    for t in range(first, last):
        base, count = work.rows[t].length, work.rows[t].num_seen
        start = np.int64(0) if window == 0 else max(np.int64(0), work.rows[t].position + 1 - window)
        skipped, start = max(np.int64(0), start - base), max(np.int64(0), min(start, base) - shift)
        for h in range(heads):
            r = (t - first) * heads + h
            if sizes.attention_cap > NONE:
                cap(scores[r], np.int64(0), end - shift, sizes.attention_cap)
            totals[r] = soften(
                scores[r],
                start,
                base - shift,
                work.seen_columns[t],
                skipped,
                count,
                shift,
                panels * PANEL,
                sinks[g * (sizes.heads // G) + head + h] if len(sinks) > 0 else np.float32(-np.inf),
                work.lanes[thread],
                work.scores_seen[thread],
            )
    call_product(
        memory.product,
        scores.ctypes.data,
        4 * columns,
        memory.values.ctypes.data + at * padded + size * shift * PANEL,
        size * columns * PANEL,
        padded // PANEL,
        panels * PANEL,
        blend.ctypes.data,
        4 * padded,
        PANEL,
        rows,
    )
    for t in range(first, last):
        for h in range(heads):
            r, begin = (t - first) * heads + h, offset + h * D
            share = np.float32(1.0) / totals[r]
            for i in range(D):
                work.mixed[t, begin + i] = blend[r, i] * share
            if sizes.gated:
                for i in range(D):
                    work.mixed[t, begin + i] /= np.float32(1.0) + exp(-work.qkv[t, 2 * begin + D + i])


class Place(NamedTuple):
    """Biases, norms and rotation of queries and keys; keys and values go to their column. All by layer, as in `layers.Weights`."""

    step: np.ndarray
    sizes: Sizes
    rows: np.ndarray
    qkv: np.ndarray
    bias: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    rotaries: np.ndarray
    memory: SlotMemory


@unowned
def _place(a, begin, end, thread):
    layer = a.step[0].index
    bias, q_norm, k_norm, rotary = a.bias[layer], a.q_norm[layer], a.k_norm[layer], a.rotaries[layer]
    half = a.cos.shape[2] if rotary >= 0 else 0
    for t in range(begin, end):
        row = a.rows[t]
        cos, sin = a.cos[rotary, row.position, :half], a.sin[rotary, row.position, :half]
        place_heads(a.qkv[t], bias, q_norm, k_norm, a.sizes, cos, sin, a.memory, layer, row.slot, row.column)


@njit(cache=True)
def place_code(arguments, address):
    return lasting_code(_place, arguments, address)


class Attention(NamedTuple):
    """Items are runs of rows times groups times pieces of a group's heads.  windows: [layers].  sinks: [layers, H or 0], see `attend`."""

    step: np.ndarray
    sizes: Sizes
    windows: np.ndarray
    sinks: np.ndarray
    memory: SlotMemory
    work: Workspace


@unowned
def _attend(a, begin, end, thread):
    step, sizes = a.step[0], a.sizes
    heads, pieces = sizes.heads // sizes.groups, step.pieces
    for unit in range(begin, end):
        run, g, piece = unit // pieces // sizes.groups, unit // pieces % sizes.groups, unit % pieces
        head, last = piece * heads // pieces, (piece + 1) * heads // pieces
        first, end_row, window = a.work.runs[run], a.work.runs[run + 1], a.windows[step.index]
        attend(sizes, a.memory, a.work, step.index, window, a.sinks[step.index], first, end_row, g, head, last - head, thread)


@njit(cache=True)
def attend_code(arguments, address):
    return lasting_code(_attend, arguments, address)
