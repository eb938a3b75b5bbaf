"""One pass of a compiled Llama: rows of many trees through all layers in one call, and the memory that it reads and fills.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import overload

from polydraft.exponential import fma
from polydraft.models.compiled.formats import BLOCK, ROUNDED, num_outputs
from polydraft.models.compiled.kernels import add, norm_part, rms_norm, soften, swiglu
from polydraft.models.compiled.products import matmul, product
from polydraft.models.compiled.rounding import round_rows
from polydraft.models.compiled.threads import HELPERS, JOB, claim, finish, finished, floats_at, new_sync, publish, stopped
from polydraft.models.compiled.vectors import PANEL, aligned
from polydraft.models.slots import TREE_ROOM

__all__ = [
    "CHUNK",
    "ModelArrays",
    "Sizes",
    "SlotMemory",
    "Weights",
    "Workspace",
    "attend",
    "compiled_pass",
    "cut_runs",
    "describe",
    "draft_pass",
    "embed_row",
    "embed_rows",
    "head_rows",
    "help_out",
    "move_columns",
    "multiply",
    "place_heads",
    "run_layer",
    "whole",
    "workspace",
]

CHUNK = 64
"""Most rows that are in work at once; a pass over more reads the weights again."""
RUN, FEW = 16, np.int64(4)
"""Rows of a slot whose attention is one unit of work; rows that are not worth sharing."""
PIECES, MOST_PANELS = 8, np.int64(8)
"""Units for each thread in a product, and panels of a unit: the last one to end is waited for."""
ENTER, QKV, PLACE, ATTEND, MIX, OUT, MIDDLE, GATE_UP, GATE, DOWN, LEAVE, HEAD = map(np.int64, range(12))
"""Parts of a pass that threads share; each begins when the one before has ended."""


class Weights(NamedTuple):
    """All layers stacked: first axis = layer. Matrices are in panels, see `formats`; absent parts are empty."""

    embed: np.ndarray  # [V, h] float32, or bfloat16 as uint16
    head: np.ndarray
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    mlp_norm: np.ndarray  # [L, h]
    qkv: np.ndarray
    bias: np.ndarray  # [L, (H + 2 G) D] or [L, 0]
    q_norm: np.ndarray  # [L, D] or [L, 0]
    k_norm: np.ndarray  # [L, D] or [L, 0]
    out: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    cos: np.ndarray  # [columns, D / 2]
    sin: np.ndarray  # [columns, D / 2]


class Sizes(NamedTuple):
    """H heads of q, G heads of k and v, D their width, I the width between gate and down, outputs: V in whole panels."""

    heads: int
    groups: int
    width: int
    inner: int
    outputs: int
    epsilon: np.float32


class SlotMemory(NamedTuple):
    """Panels over columns for keys, over the width for values, so that attention is two packed products.

    keys: [L, slots, G, columns / PANEL, D, PANEL].  values: [L, slots, G, D / PANEL, columns, PANEL].
    lengths: [slots] committed columns.
    """

    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


class Workspace(NamedTuple):
    """Activations of up to CHUNK rows, and what each is: token, slot, position, column, length of its slot, seen beyond it, wanted."""

    x: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    update: np.ndarray
    gate_up: np.ndarray
    act: np.ndarray
    rounded: np.ndarray  # the input of the next product as `round_rows` leaves it; float32 where products take it as it is
    queries: np.ndarray  # [threads, RUN H / G, D]
    scores: np.ndarray  # [threads, RUN H / G, columns]
    blend: np.ndarray  # [threads, RUN H / G, D up to whole panels]
    totals: np.ndarray  # [threads, RUN H / G]
    lanes: np.ndarray  # [threads, 16]
    found: np.ndarray  # [threads, TREE_ROOM]
    runs: np.ndarray  # [CHUNK + 1]
    sync: np.ndarray  # see `threads`
    rows: np.ndarray  # [CHUNK, 7]
    seen: np.ndarray  # [CHUNK, TREE_ROOM]


class ModelArrays(NamedTuple):
    """All that a compiled function needs of a model."""

    weights: Weights
    sizes: Sizes
    memory: SlotMemory
    work: Workspace


@njit
def _rotate(x, begin, cos, sin):
    half = len(cos)
    for i in range(half):
        a, b = x[begin + i], x[begin + i + half]
        x[begin + i] = fma(a, cos[i], -(b * sin[i]))
        x[begin + i + half] = fma(b, cos[i], a * sin[i])


@njit
def place_heads(qkv, bias, q_norm, k_norm, sizes, cos, sin, keys, values, column):
    """Bias, norms and rotation of one row's q and k; its keys and values go to one column of the cache."""
    H, G, D = sizes.heads, sizes.groups, sizes.width
    for i in range(len(bias)):
        qkv[i] += bias[i]
    for j in range(H + G):
        if len(q_norm) > 0:
            norm_part(qkv, j * D, q_norm if j < H else k_norm, sizes.epsilon)
        _rotate(qkv, j * D, cos, sin)
    panel, lane = column // PANEL, column % PANEL
    for j in range(G):
        for i in range(D):
            keys[j, panel, i, lane] = qkv[(H + j) * D + i]
            values[j, i // PANEL, column, i % PANEL] = qkv[(H + G + j) * D + i]


@njit(error_model="numpy")
def attend(sizes, memory, work, layer, first, last, g, thread):
    """Rows first .. last-1, all of one slot: softmax(q . keys / sqrt(D)) values, every head of group g in one product."""
    D, G = sizes.width, sizes.groups
    heads, slots, padded = sizes.heads // G, memory.keys.shape[1], memory.values.shape[3] * PANEL
    columns, slot, end, zero = memory.values.shape[4], work.rows[first, 1], np.int64(0), np.int64(0)
    queries, scores, blend, totals = work.queries[thread], work.scores[thread], work.blend[thread], work.totals[thread]
    for t in range(first, last):
        end = max(end, work.rows[t, 3] + 1)
    panels = (end + PANEL - 1) // PANEL
    rows, scale = (last - first) * heads, np.float32(1.0 / np.sqrt(D))
    for t in range(first, last):
        for h in range(heads):
            r, begin = (t - first) * heads + h, (g * heads + h) * D
            for i in range(D):
                queries[r, i] = work.qkv[t, begin + i] * scale
    at = ((layer * slots + slot) * G + g) * columns
    product(queries, zero, D, memory.keys, at * D, D * PANEL, panels, D, scores, zero, columns, PANEL, rows)
    for t in range(first, last):
        base, count = work.rows[t, 4], work.rows[t, 5]
        for h in range(heads):
            r = (t - first) * heads + h
            totals[r] = soften(scores[r], base, work.seen[t], count, panels * PANEL, work.lanes[thread], work.found[thread])
    product(
        scores, zero, columns, memory.values, at * padded, columns * PANEL, padded // PANEL, panels * PANEL, blend, zero, padded, PANEL, rows
    )  # fmt: skip
    for t in range(first, last):
        for h in range(heads):
            r, begin = (t - first) * heads + h, (g * heads + h) * D
            share = np.float32(1.0) / totals[r]
            for i in range(D):
                work.mixed[t, begin + i] = blend[r, i] * share


def embed_row(embed, token, out):
    """The embedding of a token, from float32 or bfloat16."""


@overload(embed_row)
def _embed_row(embed, token, out):
    if embed.dtype == types.float32:

        def run(embed, token, out):
            out[:] = embed[token]
    else:

        def run(embed, token, out):
            bits = out.view(np.uint32)
            for i in range(len(out)):
                bits[i] = np.uint32(embed[token, i]) << np.uint32(16)

    return run


@njit(cache=True, nogil=True)
def embed_rows(weights, tokens, out):
    """Embeddings of some tokens."""
    for t in range(len(tokens)):
        embed_row(weights.embed, tokens[t], out[t])


@njit
def multiply(x, w, rounded, y, rows):
    """y[:rows] = x[:rows] @ W.T"""
    zero = np.int64(0)  # a literal 0 would compile everything below twice
    round_rows(x, x.shape[1], w, rounded, zero, rows)
    matmul(x, w, rounded, y, zero, np.int64(len(w)), rows)


@njit(cache=True, nogil=True)
def head_rows(model, states, logits):
    """Logits of some states behind the final norm, at most as many as are in work at once."""
    multiply(states, model.weights.head, model.work.rounded, logits, np.int64(len(states)))


@njit
def _copy(source, begin, end, target, first):
    for t in range(begin, end):
        for i in range(source.shape[1]):
            target[first + t - begin, i] = source[t, i]


@njit
def _do(model, part, layer, rows, address, begin, end, thread):
    """Units begin .. end-1 of a part of a pass: rows, panels of a matrix, or pairs of some rows of a slot and a group of heads."""
    weights, sizes, memory, work = model
    if part == ENTER:
        rms_norm(work.x, weights.attention_norm[layer], sizes.epsilon, work.normed, begin, end)
        round_rows(work.normed, work.normed.shape[1], weights.qkv, work.rounded, begin, end)
    elif part == QKV:
        matmul(work.normed, weights.qkv[layer], work.rounded, work.qkv, begin, end, rows)
    elif part == PLACE:
        bias, q_norm, k_norm = weights.bias[layer], weights.q_norm[layer], weights.k_norm[layer]
        for t in range(begin, end):
            slot, position, column = work.rows[t, 1], work.rows[t, 2], work.rows[t, 3]
            keys, values = memory.keys[layer, slot], memory.values[layer, slot]
            cos, sin = weights.cos[position], weights.sin[position]
            place_heads(work.qkv[t], bias, q_norm, k_norm, sizes, cos, sin, keys, values, column)
    elif part == ATTEND:
        for unit in range(begin, end):
            run = unit // sizes.groups
            attend(sizes, memory, work, layer, work.runs[run], work.runs[run + 1], unit % sizes.groups, thread)
    elif part == MIX:
        round_rows(work.mixed, work.mixed.shape[1], weights.out, work.rounded, begin, end)
    elif part == OUT:
        matmul(work.mixed, weights.out[layer], work.rounded, work.update, begin, end, rows)
    elif part == MIDDLE:
        add(work.x, work.update, begin, end)
        rms_norm(work.x, weights.mlp_norm[layer], sizes.epsilon, work.normed, begin, end)
        round_rows(work.normed, work.normed.shape[1], weights.gate_up, work.rounded, begin, end)
    elif part == GATE_UP:
        matmul(work.normed, weights.gate_up[layer], work.rounded, work.gate_up, begin, end, rows)
    elif part == GATE:
        swiglu(work.gate_up, sizes.inner, work.act, begin, end)
        round_rows(work.act, work.act.shape[1], weights.down, work.rounded, begin, end)
    elif part == DOWN:
        matmul(work.act, weights.down[layer], work.rounded, work.update, begin, end, rows)
    elif part == LEAVE:
        add(work.x, work.update, begin, end)
    else:
        logits = carray(floats_at(address), (rows, sizes.outputs))
        matmul(work.normed, weights.head, work.rounded, logits, begin, end, rows)


@njit
def _take(model, thread):
    """Do units of the phase that is open until all are claimed; returns how many."""
    sync, done = model.work.sync, 0
    unit = claim(sync)
    while unit >= 0:
        part, layer, rows, address, units, grain = (
            sync[JOB],
            sync[JOB + 1],
            sync[JOB + 2],
            sync[JOB + 3],
            sync[JOB + 4],
            sync[JOB + 5],
        )
        _do(model, part, layer, rows, address, unit * grain, min(units, (unit + 1) * grain), thread)
        finish(sync)
        done += 1
        unit = claim(sync)
    return done


@njit(cache=True, nogil=True)
def help_out(model, thread):
    """Do units of all phases, until nothing was to do for a while."""
    turns = 0
    while not stopped(model.work.sync, turns):
        turns = 0 if _take(model, thread) > 0 else turns + 1


@njit
def _share(model, part, layer, rows, address, units, grain):
    """Do a part of a pass, with whoever helps."""
    sync, zero = model.work.sync, np.int64(0)
    if sync[HELPERS] == 0 or units <= grain:
        _do(model, part, layer, rows, address, zero, units, zero)
        return
    sync[JOB], sync[JOB + 1], sync[JOB + 2], sync[JOB + 3], sync[JOB + 4], sync[JOB + 5] = (
        part,
        layer,
        rows,
        address,
        units,
        grain,
    )
    items = (units + grain - 1) // grain
    publish(sync, items)
    _take(model, zero)
    finished(sync, items)


@njit
def _by_panels(model, part, layer, rows, address, panels):
    grain = panels // (PIECES * (model.work.sync[HELPERS] + 1))
    _share(model, part, layer, rows, address, panels, min(max(grain, 1), MOST_PANELS))


@njit
def cut_runs(rows, count, runs):
    """Cut rows into runs of the same slot, few enough to share; returns how many: run k is runs[k] .. runs[k + 1] - 1."""
    num, runs[0] = np.int64(0), 0
    for t in range(1, count + 1):
        if t == count or rows[t, 1] != rows[t - 1, 1] or t - runs[num] == RUN:
            num += 1
            runs[num] = t
    return num


@njit
def run_layer(model, layer, rows, runs):
    """Run the rows in work, whose states are in work.x, through a layer. runs: of `cut_runs`."""
    weights, zero = model.weights, np.int64(0)
    _share(model, ENTER, layer, rows, zero, rows, FEW)
    _by_panels(model, QKV, layer, rows, zero, weights.qkv.shape[1])
    _share(model, PLACE, layer, rows, zero, rows, FEW)
    _share(model, ATTEND, layer, rows, zero, runs * model.sizes.groups, np.int64(1))
    _share(model, MIX, layer, rows, zero, rows, FEW)
    _by_panels(model, OUT, layer, rows, zero, weights.out.shape[1])
    _share(model, MIDDLE, layer, rows, zero, rows, FEW)
    _by_panels(model, GATE_UP, layer, rows, zero, weights.gate_up.shape[1])
    _share(model, GATE, layer, rows, zero, rows, FEW)
    _by_panels(model, DOWN, layer, rows, zero, weights.down.shape[1])
    _share(model, LEAVE, layer, rows, zero, rows, FEW)


@njit
def _run_rows(model, rows, logits, done, hidden, taken, first):
    """Run the rows in work; the logits wanted go to logits[done:]. Returns how many logits there are now.

    hidden[taken[l], first + t] = what enters layer l.
    """
    weights, sizes, _, work = model
    layers, zero = len(weights.attention_norm), np.int64(0)
    runs = cut_runs(work.rows, rows, work.runs)
    for t in range(rows):
        embed_row(weights.embed, work.rows[t, 0], work.x[t])
    for l in range(layers):
        if taken[l] >= 0:
            _copy(work.x, zero, rows, hidden[taken[l]], first)
        run_layer(model, l, rows, runs)
    rms_norm(work.x, weights.norm, sizes.epsilon, work.normed, zero, rows)  # pyright: ignore[reportArgumentType]
    if taken[layers] >= 0:
        _copy(work.normed, zero, rows, hidden[taken[layers]], first)
    wanted = zero
    for t in range(rows):
        if work.rows[t, 6]:
            _copy(work.normed, t, t + 1, work.normed, wanted)
            wanted += 1
    if wanted > 0:
        round_rows(work.normed, work.normed.shape[1], weights.head, work.rounded, zero, wanted)
        _by_panels(model, HEAD, zero, wanted, logits[done:].ctypes.data, np.int64(len(weights.head)))
    return done + wanted


@njit
def describe(row, seen, token, slot, length, parents, n, wanted):
    """What row of the pass node n of a tree is."""
    depth, m = 0, parents[n]
    while m >= 0:
        depth += 1
        m = parents[m]
    m = n
    for j in range(depth, -1, -1):
        seen[j] = length + m
        m = parents[m]
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = token, slot, length + depth, length + n, length, depth + 1, wanted


@njit
def _describe_extra(row, seen, token, slot, length, parents, node, position, mask, x):
    """What auxiliary row x is: it sees the path of its node, the auxiliary rows of its mask, and itself."""
    count, m, N = np.int64(0), node, len(parents)
    while m >= 0:
        seen[count] = length + m
        count += 1
        m = parents[m]
    for y in range(len(mask)):
        if mask[y] or y == x:
            seen[count] = length + N + y
            count += 1
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = token, slot, length + position, length + N + x, length, count, 1


@njit(cache=True, nogil=True)
def compiled_pass(model, slots, tokens, parents, begins, ends, wanted, logits, hidden, taken, extra, mask):
    """One pass over nodes begins[b] .. ends[b]-1 of every tree; the nodes before were fed by the passes before.

    tokens, parents: [B, N]; nodes below 0 in `parents`, but for node 0, are padding.  logits[r]: of the r-th node, row by
    row, that is no padding and at or behind wanted[b].  hidden: [layers asked for, nodes, h].  taken: [L + 1] its index, or -1.
    extra: [B, 3, X] token, position and node of auxiliary rows, which follow each tree's nodes; mask: [B, X, X], see `AuxRows`.
    """
    work, lengths = model.work, model.memory.lengths
    rows, done, first = np.int64(0), np.int64(0), np.int64(0)
    for b in range(len(slots)):
        for n in range(begins[b], ends[b]):
            if rows == len(work.rows):
                done = _run_rows(model, rows, logits, done, hidden, taken, first)
                first, rows = first + rows, np.int64(0)
            if n == 0 or parents[b, n] >= 0:
                describe(
                    work.rows[rows], work.seen[rows], tokens[b, n], slots[b], lengths[slots[b]], parents[b], n, n >= wanted[b]
                )
                rows += 1
        for x in range(extra.shape[2]):
            if rows == len(work.rows):
                done = _run_rows(model, rows, logits, done, hidden, taken, first)
                first, rows = first + rows, np.int64(0)
            token, position, node = extra[b, 0, x], extra[b, 1, x], extra[b, 2, x]
            row, seen, length = work.rows[rows], work.seen[rows], lengths[slots[b]]
            _describe_extra(row, seen, token, slots[b], length, parents[b], node, position, mask[b, x], x)
            rows += 1
    if rows > 0:
        _run_rows(model, rows, logits, done, hidden, taken, first)


def draft_pass(model, slots, tokens, parents, begins, ends, wanted, logits) -> None:
    """A pass as compiled proposals make it, of whatever kind of model: `compiled_pass` without hidden states and auxiliary rows."""


@overload(draft_pass)
def _(model, slots, tokens, parents, begins, ends, wanted, logits):
    if getattr(model, "instance_class", None) is not ModelArrays:
        return None

    def run(model, slots, tokens, parents, begins, ends, wanted, logits):
        hidden, taken = np.empty((0, 0, 0), np.float32), np.full(len(model.weights.attention_norm) + 1, -1, np.int64)
        extra, mask = np.empty((len(slots), 3, 0), np.int64), np.empty((len(slots), 0, 0), np.bool_)
        compiled_pass(model, slots, tokens, parents, begins, ends, wanted, logits, hidden, taken, extra, mask)

    return run


@njit
def _move(keys, values, source, target):
    slot, column, to, place = source[0], source[1], target[0], target[1]
    for g in range(keys.shape[1]):
        for i in range(keys.shape[3]):
            keys[to, g, place // PANEL, i, place % PANEL] = keys[slot, g, column // PANEL, i, column % PANEL]
        for p in range(values.shape[2]):
            for i in range(PANEL):
                values[to, g, p, place, i] = values[slot, g, p, column, i]


@njit(cache=True, nogil=True)
def move_columns(memory, source, target):
    """Copy columns, (slot, column) each, one after the other."""
    for m in range(len(source)):
        for layer in range(len(memory.keys)):
            _move(memory.keys[layer], memory.values[layer], source[m], target[m])


def whole(size: int) -> int:
    """Up to whole panels.

    Example:
        >>> whole(3) % PANEL
        0
    """
    return -(-size // PANEL) * PANEL


def workspace(
    weights: Any, sizes: Sizes, columns: int, rounded: type[np.generic] | np.dtype, threads: int, widest: int = 0
) -> Workspace:
    """rounded: what activations are rounded to, `ROUNDED` blocks or bfloat16 as uint16, or float32 where they are not.
    widest: activations that are none of a layer's.
    """
    hidden, mixed = len(weights.norm), sizes.heads * sizes.width
    queries, widest = RUN * sizes.heads // sizes.groups, max(hidden, mixed, sizes.inner, widest)
    per_row = {np.dtype(np.float32): 0, np.dtype(np.uint16): widest, ROUNDED: -(-widest // BLOCK)}[np.dtype(rounded)]
    return Workspace(
        x=aligned(CHUNK, hidden),
        normed=aligned(CHUNK, hidden),
        qkv=aligned(CHUNK, num_outputs(weights.qkv)),
        mixed=aligned(CHUNK, mixed),
        update=aligned(CHUNK, max(num_outputs(weights.out), num_outputs(weights.down))),
        gate_up=aligned(CHUNK, num_outputs(weights.gate_up)),
        act=aligned(CHUNK, sizes.inner),
        rounded=aligned(CHUNK, per_row, dtype=rounded),
        queries=aligned(threads, queries, sizes.width),
        scores=aligned(threads, queries, columns),
        blend=aligned(threads, queries, whole(sizes.width)),
        totals=aligned(threads, queries),
        lanes=aligned(threads, 16),
        found=aligned(threads, TREE_ROOM),
        runs=np.zeros(CHUNK + 1, np.int64),
        sync=new_sync(),
        rows=np.zeros((CHUNK, 7), np.int64),
        seen=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
