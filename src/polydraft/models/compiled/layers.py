"""The layers of a compiled Llama: the memory that they read and fill, and the parts of a pass that threads share.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.compile_time import inner, unowned
from polydraft.compiled_code import njit
from polydraft.exponential import fma
from polydraft.models.compiled.cache import SlotMemory, keep, whole
from polydraft.models.compiled.kernels import SILU, add, cap, gate, norm_part, rms_norm, scale_row, soften
from polydraft.models.compiled.products import Packed, call_product, matmul, matmul_to
from polydraft.models.compiled.rounding import round_rows, rounded_bytes
from polydraft.models.compiled.tiles import UNROLL
from polydraft.models.compiled.vectors import PANEL, aligned
from polydraft.models.slots import TREE_ROOM
from polydraft.threads import share, shared_arguments, shared_code, sync

__all__ = [
    "CHUNK",
    "NONE",
    "ONE",
    "ModelArrays",
    "Sizes",
    "Weights",
    "Workspace",
    "attend",
    "cut_runs",
    "finish_logits",
    "model_arrays",
    "multiply",
    "multiply_shared",
    "place_heads",
    "run_head",
    "run_layer",
    "workspace",
]

CHUNK = 64
"""Most rows that are in work at once; a pass over more reads the weights again."""
RUN, FEW = 16, np.int64(4)
"""Rows of a slot whose attention is one unit of work; rows that are not worth sharing."""
UNITS, LEAST = 4, 1 << 17
"""Units that a product is cut into for each thread, and bytes of weights of the smallest."""
inlined = inner(inline="always")
"""For the levels between a pass and its parts, which each hand on all of a model's arrays."""
ENTER, QKV, PLACE, ATTEND, MIX, OUT, MIDDLE, GATE_UP, GATE, DOWN, LEAVE, HEAD = map(np.int64, range(12))
"""Parts of a pass that threads share; each begins when the one before has ended."""


ROW = np.dtype([(name, np.int64) for name in ("token", "slot", "position", "column", "length", "num_seen", "has_logits")])
"""A row of a pass. length: committed tokens of its slot.  num_seen: columns beyond them that it attends to.  has_logits: whether they are asked for."""
CODE = 5
"""Place of an address in `Workspace.step`."""


ONE, NONE = np.float32(1.0), np.float32(0.0)


class Weights(NamedTuple):
    """All layers stacked: first axis = layer; absent parts are empty."""

    embed: Packed  # [V, h]
    head: Packed
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    attention_out_norm: np.ndarray  # [L, h] or [L, 0]
    mlp_norm: np.ndarray  # [L, h]
    mlp_out_norm: np.ndarray  # [L, h] or [L, 0]
    qkv: Packed
    bias: np.ndarray  # [L, (H + 2 G) D] or [L, 0]
    q_norm: np.ndarray  # [L, D] or [L, 0]
    k_norm: np.ndarray  # [L, D] or [L, 0]
    out: Packed
    gate_up: Packed
    down: Packed
    cos: np.ndarray  # [rotaries, columns, half of the rotated numbers of a head]
    sin: np.ndarray
    rotaries: np.ndarray  # [L] which of them a layer has, or -1
    windows: np.ndarray  # [L] tokens that a row attends to, itself included, or 0 for all


class Sizes(NamedTuple):
    """H heads of q, G heads of k and v, D their width, I the width between gate and down, outputs: V in whole panels.

    attention_scale: of scores.  activation: SILU or GELU.  caps: soft caps of scores and logits, 0 for none.
    """

    heads: int
    groups: int
    width: int
    inner: int
    outputs: int
    epsilon: np.float32
    attention_scale: np.float32
    embedding_scale: np.float32 = ONE
    residual_scale: np.float32 = ONE
    logit_scale: np.float32 = ONE
    attention_cap: np.float32 = NONE
    logit_cap: np.float32 = NONE
    activation: int = SILU


class Workspace(NamedTuple):
    """Activations of up to CHUNK rows, and what each is."""

    x: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    update: np.ndarray
    gate_up: np.ndarray
    act: np.ndarray
    rounded: np.ndarray  # [CHUNK, bytes] the input of the next product as `round_rows` leaves it
    queries: np.ndarray  # [threads, RUN H / G, D], zeros up to whole steps of a product
    scores: np.ndarray  # [threads, RUN H / G, columns]
    blend: np.ndarray  # [threads, RUN H / G, D up to whole panels]
    totals: np.ndarray  # [threads, RUN H / G]
    lanes: np.ndarray  # [threads, 16]
    scores_seen: np.ndarray  # [threads, TREE_ROOM]
    runs: np.ndarray  # [CHUNK + 1]
    sync: np.ndarray  # see `threads`
    step: (
        np.ndarray
    )  # [6] of the part that is open: part, layer, rows, address, pieces of a group's heads; address of the code of all
    rows: np.ndarray  # [CHUNK] of ROW
    seen_columns: np.ndarray  # [CHUNK, TREE_ROOM]


class ModelArrays(NamedTuple):
    """All that a compiled function needs of a model."""

    weights: Weights
    sizes: Sizes
    memory: SlotMemory
    work: Workspace


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
    for i in range(len(bias)):
        qkv[i] += bias[i]
    for j in range(H + G):
        if len(q_norm) > 0:
            norm_part(qkv, j * D, q_norm if j < H else k_norm, sizes.epsilon)
        _rotate(qkv, j * D, cos, sin)
    keys, values, together, bits = memory.keys[layer, slot], memory.values[layer, slot], memory.together, qkv.view(np.uint32)
    for j in range(G):
        for i in range(D):
            keep(keys[j, column // PANEL], together, i, column % PANEL, bits[(H + j) * D + i])
            keep(values[j, i // PANEL], together, column, i % PANEL, bits[(H + G + j) * D + i])


@inner(error_model="numpy")
def attend(sizes, memory, work, layer, window, first, last, g, head, heads, thread):
    """Rows first .. last-1, all of one slot: softmax(scale q . keys) values, so many heads of group g, from `head` on, in one product.

    window: tokens that a row attends to, itself included; 0 for all. Panels of columns that no row attends to are left out.
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
    rows, scale = (last - first) * heads, sizes.attention_scale
    for t in range(first, last):
        for h in range(heads):
            r, begin = (t - first) * heads + h, offset + h * D
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


@inner
def multiply(x, w, k, rounded, y, rows):
    """y[:rows] = x[:rows] @ W.T, W the k-th of packed matrices."""
    zero, k = np.int64(0), np.int64(k)  # a literal 0 would compile everything below twice
    round_rows(x, x.shape[1], w, rounded, zero, rows)
    matmul(x, w, k, rounded, y, zero, w.panels, rows)


@inner
def _grain(panels, stride, threads):
    """Panels of a unit: some units a thread, so that one that lost its core is not waited for long, and each worth claiming."""
    return max(-(-panels // (UNITS * threads)), min(panels, LEAST // stride + 1))


@unowned
def _do_panels(arguments, begin, end, thread):
    """Panels begin .. end-1 of a product."""
    x, w, k, rounded, y, rows = arguments
    matmul(x, w, k, rounded, y, begin, end, rows)


@inner
def multiply_shared(work, x, w, k, rounded, y, rows):
    """`multiply` on as many threads as a pass with this workspace."""
    zero, k, threads = np.int64(0), np.int64(k), len(work.queries)
    round_rows(x, x.shape[1], w, rounded, zero, rows)
    code = shared_code(_do_panels, (x, w, k, rounded, y, rows))
    share(work.sync, threads, code, np.int64(w.panels), _grain(w.panels, w.panel_bytes, threads))


@inner
def _join(work, out_norm, sizes, begin, end):
    """x += what attention or feed-forward gave, normalised where the layer has a norm for it."""
    for t in range(begin, end if len(out_norm) > 0 else begin):
        norm_part(work.update[t], np.int64(0), out_norm, sizes.epsilon)
    add(work.x, work.update, sizes.residual_scale, begin, end)


@unowned
def _do(arguments, begin, end, thread):
    """Items begin .. end-1 of a part of a pass: rows, panels of a matrix, or some heads of some rows of a slot."""
    model, step = arguments
    weights, sizes, memory, work = model
    part, layer, rows, address = step[0], step[1], step[2], step[3]
    if part == ENTER:
        rms_norm(work.x, weights.attention_norm[layer], sizes.epsilon, work.normed, begin, end)
        round_rows(work.normed, work.normed.shape[1], weights.qkv, work.rounded, begin, end)
    elif part == QKV:
        matmul(work.normed, weights.qkv, layer, work.rounded, work.qkv, begin, end, rows)
    elif part == PLACE:
        bias, q_norm, k_norm = weights.bias[layer], weights.q_norm[layer], weights.k_norm[layer]
        for t in range(begin, end):
            row = work.rows[t]
            rotary, half = weights.rotaries[layer], weights.cos.shape[2] if weights.rotaries[layer] >= 0 else 0
            cos, sin = weights.cos[rotary, row.position, :half], weights.sin[rotary, row.position, :half]
            place_heads(work.qkv[t], bias, q_norm, k_norm, sizes, cos, sin, memory, layer, row.slot, row.column)
    elif part == ATTEND:
        heads, pieces = sizes.heads // sizes.groups, step[4]
        for unit in range(begin, end):
            run, g, piece = unit // pieces // sizes.groups, unit // pieces % sizes.groups, unit % pieces
            head, last = piece * heads // pieces, (piece + 1) * heads // pieces
            attend(
                sizes,
                memory,
                work,
                layer,
                weights.windows[layer],
                work.runs[run],
                work.runs[run + 1],
                g,
                head,
                last - head,
                thread,
            )
    elif part == MIX:
        round_rows(work.mixed, work.mixed.shape[1], weights.out, work.rounded, begin, end)
    elif part == OUT:
        matmul(work.mixed, weights.out, layer, work.rounded, work.update, begin, end, rows)
    elif part == MIDDLE:
        _join(work, weights.attention_out_norm[layer], sizes, begin, end)
        rms_norm(work.x, weights.mlp_norm[layer], sizes.epsilon, work.normed, begin, end)
        round_rows(work.normed, work.normed.shape[1], weights.gate_up, work.rounded, begin, end)
    elif part == GATE_UP:
        matmul(work.normed, weights.gate_up, layer, work.rounded, work.gate_up, begin, end, rows)
    elif part == GATE:
        gate(work.gate_up, sizes.inner, sizes.activation, work.act, begin, end)
        round_rows(work.act, work.act.shape[1], weights.down, work.rounded, begin, end)
    elif part == DOWN:
        matmul(work.act, weights.down, layer, work.rounded, work.update, begin, end, rows)
    elif part == LEAVE:
        _join(work, weights.mlp_out_norm[layer], sizes, begin, end)
    else:
        matmul_to(work.normed, weights.head, np.int64(0), work.rounded, address, 4 * sizes.outputs, begin, end, rows)


@inner
def cut_runs(rows, count, runs):
    """Cut rows into runs of the same slot, few enough to share; returns how many: run k is runs[k] .. runs[k + 1] - 1."""
    num, runs[0] = np.int64(0), 0
    for t in range(1, count + 1):
        if t == count or rows[t].slot != rows[t - 1].slot or t - runs[num] == RUN:
            num += 1
            runs[num] = t
    return num


@unowned
def run_parts(model, first, last, layer, rows, runs, address):
    """Do parts first .. last-1 of a pass one after the other, with whoever helps. runs: of `cut_runs`.  address: where logits go."""
    weights, sizes, work = model.weights, model.sizes, model.work
    step, threads = work.step, len(work.queries)
    code = step[CODE], shared_arguments((model, step))
    step[1], step[2], step[3] = layer, rows, address
    for part in range(first, last):
        step[0] = part
        count, grain = rows, FEW
        if part == QKV:
            count, grain = weights.qkv.panels, _grain(weights.qkv.panels, weights.qkv.panel_bytes, threads)
        elif part == OUT:
            count, grain = weights.out.panels, _grain(weights.out.panels, weights.out.panel_bytes, threads)
        elif part == GATE_UP:
            count, grain = weights.gate_up.panels, _grain(weights.gate_up.panels, weights.gate_up.panel_bytes, threads)
        elif part == DOWN:
            count, grain = weights.down.panels, _grain(weights.down.panels, weights.down.panel_bytes, threads)
        elif part == HEAD:
            count, grain = weights.head.panels, _grain(weights.head.panels, weights.head.panel_bytes, threads)
        elif part == ATTEND:
            count, grain = runs * sizes.groups, np.int64(1)
            step[4] = max(1, min(sizes.heads // sizes.groups, threads // count))
            count *= step[4]
        elif part == GATE:
            grain = np.int64(1)
        share(work.sync, threads, code, count, grain)


@njit(cache=True)
def _code_of_parts(model, step):
    return shared_code(_do, (model, step))[0]


def model_arrays(weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace) -> ModelArrays:
    """With the code of their parts: called by its address, it is compiled once and not again in each function above it."""
    model = ModelArrays(weights, sizes, memory, work)
    work.step[CODE] = _code_of_parts(model, work.step)
    return model


@inlined
def run_layer(model, layer, rows, runs):
    """Run the rows in work, whose states are in work.x, through a layer. runs: of `cut_runs`."""
    run_parts(model, ENTER, HEAD, layer, rows, runs, np.int64(0))


@inlined
def run_head(model, rows, logits):
    """Logits of rows whose states are in work.normed, in panels."""
    work, zero = model.work, np.int64(0)
    round_rows(work.normed, work.normed.shape[1], model.weights.head, work.rounded, zero, rows)
    run_parts(model, HEAD, HEAD + 1, zero, rows, zero, np.int64(logits.ctypes.data))
    finish_logits(model.sizes, logits, rows)


@inner
def finish_logits(sizes, logits, rows):
    """Scale and cap what the head gave."""
    for t in range(rows):
        scale_row(logits[t], sizes.logit_scale)
        if sizes.logit_cap > NONE:
            cap(logits[t], np.int64(0), len(logits[t]), sizes.logit_cap)


def workspace(weights: Any, sizes: Sizes, columns: int, threads: int, widest: int = 0) -> Workspace:
    """widest: activations that are none of a layer's."""
    hidden, mixed = len(weights.norm), sizes.heads * sizes.width
    queries, widest = RUN * sizes.heads // sizes.groups, max(hidden, mixed, sizes.inner, widest)
    return Workspace(
        x=aligned(CHUNK, hidden),
        normed=aligned(CHUNK, hidden),
        qkv=aligned(CHUNK, weights.qkv.outputs),
        mixed=aligned(CHUNK, mixed),
        update=aligned(CHUNK, max(weights.out.outputs, weights.down.outputs)),
        gate_up=aligned(CHUNK, weights.gate_up.outputs),
        act=aligned(CHUNK, sizes.inner),
        rounded=aligned(CHUNK, rounded_bytes(widest), dtype=np.uint8),
        queries=aligned(threads, queries, whole(sizes.width, UNROLL)),
        scores=aligned(threads, queries, columns),
        blend=aligned(threads, queries, whole(sizes.width)),
        totals=aligned(threads, queries),
        lanes=aligned(threads, 16),
        scores_seen=aligned(threads, TREE_ROOM),
        runs=np.zeros(CHUNK + 1, np.int64),
        sync=sync,
        step=np.zeros(6, np.int64),
        rows=np.zeros(CHUNK, ROW),
        seen_columns=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
