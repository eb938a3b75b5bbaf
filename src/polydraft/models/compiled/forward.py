"""One pass of a compiled Llama: rows of many trees through all layers in one call, and the memory that it reads and fills.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from polydraft.exponential import fma
from polydraft.models.compiled.formats import BLOCK, ROUNDED, num_outputs
from polydraft.models.compiled.kernels import add, norm_part, rms_norm, soften, swiglu
from polydraft.models.compiled.products import matmul, product, round_rows
from polydraft.models.compiled.vectors import PANEL, aligned
from polydraft.models.slots import TREE_ROOM

__all__ = [
    "ModelArrays",
    "Sizes",
    "SlotMemory",
    "Weights",
    "compiled_pass",
    "embed_rows",
    "head_rows",
    "move_columns",
    "whole",
    "workspace",
]

CHUNK = 64
"""Most rows that are in work at once; a pass over more reads the weights again."""


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
    queries: np.ndarray  # [CHUNK H / G, D]
    scores: np.ndarray  # [CHUNK H / G, columns]
    blend: np.ndarray  # [CHUNK H / G, D up to whole panels]
    totals: np.ndarray  # [CHUNK H / G]
    lanes: np.ndarray  # [16]
    found: np.ndarray  # [TREE_ROOM]
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
def _place_heads(qkv, bias, q_norm, k_norm, sizes, cos, sin, keys, values, column):
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
def _attend(sizes, memory, work, layer, first, last):
    """Rows first .. last-1, all of one slot: softmax(q . keys / sqrt(D)) values, every head of a group in one product."""
    D, G = sizes.width, sizes.groups
    heads, slots, padded = sizes.heads // G, memory.keys.shape[1], memory.values.shape[3] * PANEL
    columns, slot, end, zero = memory.values.shape[4], work.rows[first, 1], np.int64(0), np.int64(0)
    for t in range(first, last):
        end = max(end, work.rows[t, 3] + 1)
    panels = (end + PANEL - 1) // PANEL
    rows, scale = (last - first) * heads, np.float32(1.0 / np.sqrt(D))
    for g in range(G):
        for t in range(first, last):
            for h in range(heads):
                r, begin = (t - first) * heads + h, (g * heads + h) * D
                for i in range(D):
                    work.queries[r, i] = work.qkv[t, begin + i] * scale
        at = ((layer * slots + slot) * G + g) * columns
        product(work.queries, zero, D, memory.keys, at * D, D * PANEL, panels, D, work.scores, zero, columns, PANEL, rows)
        for t in range(first, last):
            base, count = work.rows[t, 4], work.rows[t, 5]
            for h in range(heads):
                r = (t - first) * heads + h
                work.totals[r] = soften(work.scores[r], base, work.seen[t], count, panels * PANEL, work.lanes, work.found)
        product(
            work.scores,
            zero,
            columns,
            memory.values,
            at * padded,
            columns * PANEL,
            padded // PANEL,
            panels * PANEL,
            work.blend,
            zero,
            padded,
            PANEL,
            rows,
        )
        for t in range(first, last):
            for h in range(heads):
                r, begin = (t - first) * heads + h, (g * heads + h) * D
                share = np.float32(1.0) / work.totals[r]
                for i in range(D):
                    work.mixed[t, begin + i] = work.blend[r, i] * share


def _embed(embed, token, out):
    """The embedding of a token, from float32 or bfloat16."""


@overload(_embed)
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


@njit(cache=True)
def embed_rows(weights, tokens, out):
    """Embeddings of some tokens."""
    for t in range(len(tokens)):
        _embed(weights.embed, tokens[t], out[t])


@njit
def _multiply(x, w, rounded, y, rows):
    """y[:rows] = x[:rows] @ W.T"""
    zero = np.int64(0)  # a literal 0 would compile everything below twice
    round_rows(x, x.shape[1], w, rounded, zero, rows)
    matmul(x, w, rounded, y, zero, np.int64(len(w)), rows)


@njit(cache=True)
def head_rows(model, states, logits):
    """Logits of some states behind the final norm, at most as many as are in work at once."""
    _multiply(states, model.weights.head, model.work.rounded, logits, np.int64(len(states)))


@njit
def _copy(source, begin, end, target, first):
    for t in range(begin, end):
        for i in range(source.shape[1]):
            target[first + t - begin, i] = source[t, i]


@njit
def _run_rows(model, rows, logits, done, hidden, taken, first):
    """Run the rows in work; the logits wanted go to logits[done:]. Returns how many logits there are now.

    hidden[taken[l], first + t] = what enters layer l.
    """
    weights, sizes, memory, work = model
    layers, zero = len(weights.attention_norm), np.int64(0)
    for t in range(rows):
        _embed(weights.embed, work.rows[t, 0], work.x[t])
    for l in range(layers):
        if taken[l] >= 0:
            _copy(work.x, zero, rows, hidden[taken[l]], first)
        rms_norm(work.x, weights.attention_norm[l], sizes.epsilon, work.normed, rows)
        _multiply(work.normed, weights.qkv[l], work.rounded, work.qkv, rows)
        for t in range(rows):
            slot, position, column = work.rows[t, 1], work.rows[t, 2], work.rows[t, 3]
            keys, values = memory.keys[l, slot], memory.values[l, slot]
            cos, sin = weights.cos[position], weights.sin[position]
            _place_heads(
                work.qkv[t], weights.bias[l], weights.q_norm[l], weights.k_norm[l], sizes, cos, sin, keys, values, column
            )
        t = zero
        while t < rows:
            last = t + 1
            while last < rows and work.rows[last, 1] == work.rows[t, 1]:
                last += 1
            _attend(sizes, memory, work, l, t, last)
            t = last
        _multiply(work.mixed, weights.out[l], work.rounded, work.update, rows)
        add(work.x, work.update, rows)
        rms_norm(work.x, weights.mlp_norm[l], sizes.epsilon, work.normed, rows)
        _multiply(work.normed, weights.gate_up[l], work.rounded, work.gate_up, rows)
        swiglu(work.gate_up, sizes.inner, work.act, rows)
        _multiply(work.act, weights.down[l], work.rounded, work.update, rows)
        add(work.x, work.update, rows)
    rms_norm(work.x, weights.norm, sizes.epsilon, work.normed, rows)
    if taken[layers] >= 0:
        _copy(work.normed, zero, rows, hidden[taken[layers]], first)
    wanted = zero
    for t in range(rows):
        if work.rows[t, 6]:
            _copy(work.normed, t, t + 1, work.normed, wanted)
            wanted += 1
    if wanted > 0:
        _multiply(work.normed, weights.head, work.rounded, logits[done:], wanted)
    return done + wanted


@njit
def _describe(row, seen, token, slot, length, parents, n, wanted):
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


@njit(cache=True)
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
                _describe(
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


@njit
def _move(keys, values, source, target):
    slot, column, to, place = source[0], source[1], target[0], target[1]
    for g in range(keys.shape[1]):
        for i in range(keys.shape[3]):
            keys[to, g, place // PANEL, i, place % PANEL] = keys[slot, g, column // PANEL, i, column % PANEL]
        for p in range(values.shape[2]):
            for i in range(PANEL):
                values[to, g, p, place, i] = values[slot, g, p, column, i]


@njit(cache=True)
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


def workspace(weights: Weights, sizes: Sizes, columns: int, rounded: type[np.generic] | np.dtype) -> Workspace:
    """rounded: what activations are rounded to, `ROUNDED` blocks or bfloat16 as uint16, or float32 where they are not."""
    hidden, mixed = len(weights.norm), sizes.heads * sizes.width
    queries, widest = CHUNK * sizes.heads // sizes.groups, max(hidden, mixed, sizes.inner)
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
        queries=aligned(queries, sizes.width),
        scores=aligned(queries, columns),
        blend=aligned(queries, whole(sizes.width)),
        totals=aligned(queries),
        lanes=aligned(16),
        found=aligned(TREE_ROOM),
        rows=np.zeros((CHUNK, 7), np.int64),
        seen=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
