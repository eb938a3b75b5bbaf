"""Attention: a row's queries, keys and values get their biases, norms and rotation, then it attends to its slot's columns.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import (
    bfloat16_bits,
    cap,
    centre_part,
    copy_row,
    inverse_norm,
    norm_part,
)
from polydraft.models.matrices.products import call_product
from polydraft.models.matrices.vectors import PANEL
from polydraft.models.mixers.cache import BYTES_TOGETHER, COLUMNS, SlotMemory, keep_keys, keep_values
from polydraft.models.mixers.cache_tiles import WEIGHTS, quantize_query
from polydraft.models.mixers.layer import NO_BIAS, HeadNorms
from polydraft.models.mixers.program import lasting_code
from polydraft.models.mixers.softmax import (
    LANES_OF_TOTAL,
    MIN_TOP,
    TERMS,
    block_top,
    power_of_two,
    powers,
    soften_block,
    soften_tile,
    soften_to_halves,
    tile_top,
)
from polydraft.models.mixers.workspace import NONE, ONE, SPAN, Sizes, Workspace
from polydraft.numerics.compile_time import borrowed, inlined, inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import LOG2_E, exp, fma


@inner
def _rotate(x, begin, cos, sin):
    half = len(cos)
    for i in range(half):
        a = x[begin + i]
        b = x[begin + i + half]
        x[begin + i] = fma(a, cos[i], -(b * sin[i]))
        x[begin + i + half] = fma(b, cos[i], a * sin[i])


@inner
def _norm_heads(x, begin, step, count, width, gain, norms, epsilon):
    """Norms of some heads, `step` numbers apart, or of all of them together. gain: of one head, or of each."""
    if norms.whole:
        norm_part(x, begin, gain, epsilon)
        return
    several = len(gain) > width
    for j in range(count):
        at = begin + j * step
        if norms.centred:
            centre_part(x, at, width)
        first = j * width if several else np.int64(0)
        norm_part(x, at, gain[first : first + width], epsilon)


@inner
def place_heads(qkv, bias, q_norm, k_norm, norms, sizes, cos, sin, query_scale, memory, layer, slot, column):
    """Bias, norms and rotation of one row's q and k; its keys and values go to one column of a slot. layer: of the memory, or -1 for none."""
    H = sizes.heads
    G = sizes.groups
    D = sizes.width
    step = 2 * D if sizes.gated else D
    first = H * step
    for i in range(len(bias)):
        qkv[i] += bias[i]
    made = np.int64(0) if layer < 0 else np.int64(G)
    for j in range(made if sizes.keys_as_values else np.int64(0)):
        begin = first + j * D
        copy_row(qkv[begin : begin + D], qkv[begin + G * D : begin + (G + 1) * D])
    for j in range(made if sizes.value_norm else np.int64(0)):
        begin = first + (G + j) * D
        scale = inverse_norm(qkv, begin, np.int64(D), sizes.epsilon)
        for i in range(D):
            qkv[begin + i] *= scale
    for turn in range(2):
        if len(q_norm) > 0 and norms.behind == (turn == 1):
            _norm_heads(qkv, np.int64(0), step, H, D, q_norm, norms, sizes.epsilon)
            if made > 0:
                _norm_heads(qkv, first, D, G, D, k_norm, norms, sizes.epsilon)
        if turn == 0:
            for j in range(H + made):
                _rotate(qkv, j * step if j < H else first + (j - H) * D, cos, sin)
    if query_scale != ONE:
        for i in range(H * step):
            qkv[i] *= query_scale
    for j in range(made):
        keep_keys(memory, layer, slot, j, column, qkv, first + j * D, D)
        keep_values(memory, layer, slot, j, column, qkv, first + (G + j) * D, D)


TILE = 64
MOST_SCORES = 4096
MATRIX_SCORES = 16384
"""Columns whose scores are in work at once, and scores of few rows: they stay in the first cache, and keys are read once for all rows of a run.
With the matrix unit, which is through with a tile sooner, the second cache will do: a piece of a prompt behind 8,000 tokens takes 13% less.
Bits depend on none of these."""


class Heads(NamedTuple):
    """Rows first .. last-1, all of one slot, and `num_heads` heads of a group in a layer. window: tokens that a row attends to, itself included; 0 for all."""

    layer: int
    slot: int
    group: int
    window: int
    first: int
    last: int
    num_heads: int
    thread: int


@borrowed
def _window_start(row, window):
    """The first position that a row attends to."""
    return np.int64(0) if window == 0 else max(np.int64(0), row.position + 1 - window)


@borrowed
def _round_to_halves(x, words):
    bits = x.view(np.uint32)
    halves = words.view(np.uint16)
    for i in range(len(x)):
        halves[i] = bfloat16_bits(bits[i])


@borrowed
def _take_queries(sizes, memory, work, heads, offset):
    """Queries, scaled so that scores are in units of log2."""
    D = sizes.width
    apart = 2 if sizes.gated else 1
    queries = work.queries[heads.thread]
    scale = sizes.attention_scale if sizes.attention_cap > NONE else sizes.attention_scale * LOG2_E
    for t in range(heads.first, heads.last):
        for h in range(heads.num_heads):
            r = (t - heads.first) * heads.num_heads + h
            begin = apart * (offset + h * D)
            for i in range(D):
                queries[r, i] = work.qkv[t, begin + i] * scale
            if memory.together == BYTES_TOGETHER:
                quantize_query(queries[r], work.words[heads.thread, r], D)
            elif memory.rounded:
                _round_to_halves(queries[r], work.words[heads.thread, r])


@borrowed
def _score_rows(memory, work, heads, column, panels, x, xs):
    """The same of keys that lie as values do: they are turned panel by panel."""
    rows = memory.values[heads.layer, heads.slot, heads.group]
    keys = work.turned_keys[heads.thread].ctypes.data
    scores = work.scores[heads.thread].ctypes.data
    zero = np.int64(0)
    for panel in range(panels):
        at = rows.ctypes.data + 4 * PANEL * ((column + panel * PANEL) // memory.together)
        call_product(
            memory.to_keys, zero, zero, at, 4 * PANEL * rows.shape[1], rows.shape[0], zero, keys, zero, zero, zero
        )  # fmt: skip
        call_product(
            memory.scores, x, xs, keys, zero, np.int64(1), rows.shape[0] * PANEL, scores + 4 * PANEL * panel, 4 * SPAN,
            PANEL, (heads.last - heads.first) * heads.num_heads,
        )  # fmt: skip


@borrowed
def _score(sizes, memory, work, heads, column, panels):
    """Scores over panels of columns from `column` on."""
    layer = heads.layer
    slot = heads.slot
    g = heads.group
    thread = heads.thread
    keys = memory.keys[layer, slot, g]
    queries = work.queries[thread]
    scores = work.scores[thread]
    words = work.words[thread]
    inputs = queries.shape[1]
    rows = (heads.last - heads.first) * heads.num_heads
    x = queries.ctypes.data
    xs = 4 * inputs
    if memory.rounded:
        x = words.ctypes.data
        xs = 4 * words.shape[1]
    if keys.shape[1] == 0:
        _score_rows(memory, work, heads, column, panels, x, xs)
    elif memory.together == BYTES_TOGETHER:
        scales = memory.scales[layer, slot, g]
        at = keys[column // PANEL].ctypes.data
        call_product(
            memory.scores, x, xs, at, scales.ctypes.data + 4 * column, panels, sizes.width,
            scores.ctypes.data, 4 * SPAN, 4 * scales.shape[1], rows,
        )  # fmt: skip
    else:
        at = keys[column // PANEL].ctypes.data
        stride = 4 // memory.together * inputs * PANEL
        call_product(
            memory.scores, x, xs, at, stride, panels, inputs, scores.ctypes.data, 4 * SPAN, PANEL, rows
        )
    if sizes.attention_cap > NONE:
        for r in range(rows):
            cap(scores[r], np.int64(0), panels * PANEL, sizes.attention_cap)
            for c in range(panels * PANEL):
                scores[r, c] *= LOG2_E


@borrowed
def _raise_top(top, tops, r, totals, blend):
    """Scale what a row has so far to a larger top, without rounding."""
    top = np.float32(np.ceil(top))
    if top > tops[r]:
        factor = power_of_two(tops[r] - top)
        for k in range(LANES_OF_TOTAL):
            totals[r, k] *= factor
        for i in range(blend.shape[1]):
            blend[r, i] *= factor
        tops[r] = top


@borrowed
def _soften(memory, work, scores, low, high, count, r, thread):
    """Scores of a row over `count` columns, a multiple of TERMS -> weights of the columns low .. high-1, for `_add_values`."""
    tops = work.tops[thread]
    totals = work.totals[thread]
    blend = work.blend[thread]
    for c in range(min(low, count)):
        scores[c] = np.float32(-np.inf)
    for c in range(max(high, np.int64(0)), count):
        scores[c] = np.float32(-np.inf)
    at = scores.ctypes.data
    lanes = totals[r].ctypes.data
    if memory.together < BYTES_TOGETHER:
        _raise_top(tile_top(at, count), tops, r, totals, blend)
        if memory.rounded:
            soften_to_halves(at, count, tops[r], lanes)
        else:
            soften_tile(at, count, tops[r], lanes)
        return
    block_tops = work.block_tops[thread]
    inverses = work.inverses[thread].ctypes.data
    logs = work.path_logs[thread].ctypes.data
    for k in range(count // TERMS):
        block_tops[k] = np.ceil(block_top(at + WEIGHTS * k, logs + WEIGHTS * k))
        _raise_top(block_tops[k], tops, r, totals, blend)
    for k in range(count // TERMS):
        top = max(block_tops[k], MIN_TOP)
        factor = power_of_two(top - tops[r])
        soften_block(at + WEIGHTS * k, inverses + WEIGHTS * k, top, factor, lanes)


@borrowed
def _take_scales(memory, work, heads, column, count):
    """Logarithms of the scales of values, and what divides by them."""
    thread = heads.thread
    if memory.together == BYTES_TOGETHER:
        logs = work.path_logs[thread]
        scales = memory.scales[heads.layer, heads.slot, heads.group, memory.scales.shape[3] - 1]
        for c in range(count):
            logs[c] = scales[column + c]
        powers(logs.ctypes.data, work.inverses[thread].ctypes.data, count)


@borrowed
def _add_values(memory, work, scores, values, stride, count, begin, rows, thread):
    """Add weights times values of `count` columns to rows from `begin` on. values: address of the first panel.  stride: bytes to the next."""
    blend = work.blend[thread]
    call_product(
        memory.sums, scores.ctypes.data, 4 * SPAN, values, stride, blend.shape[1] // PANEL, count,
        blend[begin].ctypes.data, 4 * blend.shape[1], PANEL if memory.together < BYTES_TOGETHER else np.int64(0), rows,
    )  # fmt: skip


@borrowed
def _attend_tiles(sizes, memory, work, heads, begin, end, is_chain):
    """Attend to columns begin .. end-1, a tile at a time. is_chain: whether all that a row attends to lies side by side."""
    first = heads.first
    last = heads.last
    thread = heads.thread
    values = memory.values[heads.layer, heads.slot, heads.group]
    scores = work.scores[thread]
    rows = (last - first) * heads.num_heads
    most = MATRIX_SCORES if memory.rounded and memory.together < BYTES_TOGETHER else MOST_SCORES
    word = 4 * PANEL // memory.together
    tile = min(max(TILE, most // rows // TILE * TILE), SPAN // TILE * TILE)
    for column in range(begin, end, tile):
        count = min(tile, (end - column + COLUMNS - 1) // COLUMNS * COLUMNS)
        _score(sizes, memory, work, heads, column, count // PANEL)
        _take_scales(memory, work, heads, column, count)
        for t in range(first, last):
            row = work.rows[t]
            low = _window_start(row, heads.window) - column
            high = row.length - column
            if is_chain:
                high += row.num_seen
            for h in range(heads.num_heads):
                r = (t - first) * heads.num_heads + h
                _soften(memory, work, scores[r], low, high, count, r, thread)
        at = values.ctypes.data + word * column
        _add_values(
            memory,
            work,
            scores,
            at,
            word * values.shape[1] * memory.together,
            count,
            np.int64(0),
            rows,
            thread,
        )


@borrowed
def _gather(memory, work, heads, begin, row, path_columns, count):
    """Values of columns begin .. of committed tokens and then of the path, side by side, and the logarithms of their scales."""
    layer = heads.layer
    slot = heads.slot
    g = heads.group
    thread = heads.thread
    together = memory.together
    size = 32 // memory.together
    committed = row.length - begin
    mask = np.uint32((1 << size) - 1) if size < 32 else np.uint32(0xFFFFFFFF)
    words = memory.values[layer, slot, g].view(np.uint32)
    gathered = work.path_values[thread]
    for p in range(work.blend.shape[2] // PANEL):
        for j in range(count):
            here = (p * SPAN + j) // together * PANEL
            if j % together == 0:
                for i in range(PANEL):
                    gathered[here + i] = 0
            if j < committed + row.num_seen:
                column = begin + j if j < committed else path_columns[j - committed]
                read = np.uint32(column % together * size)
                write = np.uint32(j % together * size)
                source = words[p, column // together]
                for i in range(PANEL):
                    gathered[here + i] |= ((source[i, 0] >> read) & mask) << write
    if together == BYTES_TOGETHER:
        logs = work.path_logs[thread]
        scales = memory.scales[layer, slot, g, memory.scales.shape[3] - 1]
        for j in range(count):
            column = (
                begin + j
                if j < committed
                else path_columns[j - committed]
                if j < committed + row.num_seen
                else begin
            )
            logs[j] = scales[column]
        powers(logs.ctypes.data, work.inverses[thread].ctypes.data, count)


@borrowed
def _attend_paths(sizes, memory, work, heads, begin, end):
    """Attend to the last committed columns, from `begin` on, and to each row's path in a tree, position by position as where it lies alone."""
    first = heads.first
    last = heads.last
    num_heads = heads.num_heads
    thread = heads.thread
    scores = work.scores[thread]
    path_scores = work.path_scores[thread]
    values = work.path_values[thread].ctypes.data
    _score(sizes, memory, work, heads, begin, (end - begin + PANEL - 1) // PANEL)
    for t in range(first, last):
        row = work.rows[t]
        path_columns = work.seen_columns[t]
        committed = row.length - begin
        positions = committed + row.num_seen
        count = (positions + COLUMNS - 1) // COLUMNS * COLUMNS
        _gather(memory, work, heads, begin, row, path_columns, count)
        for h in range(num_heads):
            r = (t - first) * num_heads + h
            for j in range(positions):
                path_scores[h, j] = scores[r, j if j < committed else path_columns[j - committed] - begin]
            _soften(
                memory,
                work,
                path_scores[h],
                _window_start(row, heads.window) - begin,
                positions,
                count,
                r,
                thread,
            )
        stride = 4 * PANEL * SPAN // memory.together
        _add_values(
            memory, work, path_scores, values, stride, count, (t - first) * num_heads, num_heads, thread
        )


class Columns(NamedTuple):
    """Columns that some rows attend to, begin .. end-1. base: tokens before the rows' paths, whose columns are their positions.

    is_chain: whether the columns of paths follow on them, so that what a row attends to lies side by side.
    """

    base: int
    begin: int
    end: int
    is_chain: bool


@inlined
def _columns_of_rows(work, heads):
    base = work.rows[heads.first].length
    begin = base
    end: Any = np.int64(base)
    is_chain = True
    for t in range(heads.first, heads.last):
        row = work.rows[t]
        begin = min(begin, _window_start(row, heads.window))
        for j in range(row.num_seen):
            end = max(end, work.seen_columns[t, j] + 1)
            is_chain = is_chain and work.seen_columns[t, j] == base + j
    return Columns(base, begin, end, is_chain)


@inlined
def _start_softmax(work, heads, offset, sinks):
    """No values yet, and the top of what has no value."""
    blend = work.blend[heads.thread]
    totals = work.totals[heads.thread]
    tops = work.tops[heads.thread]
    for r in range((heads.last - heads.first) * heads.num_heads):
        sink = sinks[offset + r % heads.num_heads] * LOG2_E if len(sinks) > 0 else MIN_TOP
        tops[r] = np.ceil(sink)
        for k in range(LANES_OF_TOTAL):
            totals[r, k] = NONE
        for i in range(blend.shape[1]):
            blend[r, i] = NONE


@inlined
def _put_means(sizes, work, heads, offset, sinks):
    """The weighted means of values, to the columns of their heads; perhaps by a gate, which lies behind the query."""
    D = sizes.width
    V = sizes.value_width if sizes.value_width > 0 else D
    num_heads = heads.num_heads
    blend = work.blend[heads.thread]
    totals = work.totals[heads.thread]
    tops = work.tops[heads.thread]
    for t in range(heads.first, heads.last):
        for h in range(num_heads):
            r = (t - heads.first) * num_heads + h
            at = (offset + h) * V
            total = NONE
            for k in range(LANES_OF_TOTAL):
                total += totals[r, k]
            if len(sinks) > 0:
                total += exp((sinks[offset + h] * LOG2_E - tops[r]) / LOG2_E)
            share = ONE / total
            for i in range(V):
                work.mixed[t, at + i] = blend[r, i] * share
            if sizes.gated:
                for i in range(D):
                    work.mixed[t, at + i] /= ONE + exp(-work.qkv[t, 2 * at + D + i])


@borrowed
def attend(sizes, memory, work, heads, offset, sinks):
    """softmax(scale q . keys) values, tile by tile of columns; those that no row attends to are left out.

    offset: the first of the heads among all.  sinks: [H] a score more in the softmax of each head, which has no value, or nothing.
    """
    seen = _columns_of_rows(work, heads)
    _take_queries(sizes, memory, work, heads, offset * sizes.width)
    _start_softmax(work, heads, offset, sinks)
    start = seen.begin // COLUMNS * COLUMNS
    behind = seen.end if seen.is_chain else seen.base // COLUMNS * COLUMNS
    _attend_tiles(sizes, memory, work, heads, start, behind, seen.is_chain)
    if not seen.is_chain:
        _attend_paths(sizes, memory, work, heads, behind, seen.end)
    _put_means(sizes, work, heads, offset, sinks)


class PlaceHeads(NamedTuple):
    """Biases, norms and rotation of queries and keys; keys and values go to their column. All by layer, as in `layer.Weights`.

    qkv: [rows, (H + 2 G) D].
    """

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
    stores: np.ndarray
    memory: SlotMemory
    norms: HeadNorms = HeadNorms()
    query_scales: np.ndarray = NO_BIAS


@unowned
def _place(a, begin, end, thread):
    layer = a.step[0].index
    bias = a.bias[layer]
    q_norm = a.q_norm[layer]
    k_norm = a.k_norm[layer]
    rotary = a.rotaries[layer]
    half = a.cos.shape[2] if rotary >= 0 else 0
    for t in range(begin, end):
        row = a.rows[t]
        cos = a.cos[rotary, row.position, :half]
        sin = a.sin[rotary, row.position, :half]
        scale = a.query_scales[row.position] if len(a.query_scales) > 0 else ONE
        place_heads(
            a.qkv[t],
            bias,
            q_norm,
            k_norm,
            a.norms,
            a.sizes,
            cos,
            sin,
            scale,
            a.memory,
            a.stores[layer],
            row.slot,
            row.column,
        )


@njit(cache=True)
def place_code(arguments, address):
    return lasting_code(_place, arguments, address)


class Attention(NamedTuple):
    """Items are runs of rows times groups times pieces of a group's heads.  windows, sources: [layers].  sinks: [layers, H or 0], see `attend`."""

    step: np.ndarray
    sizes: Sizes
    windows: np.ndarray
    sinks: np.ndarray
    sources: np.ndarray
    memory: SlotMemory
    work: Workspace


@unowned
def _attend(a, begin, end, thread):
    step = a.step[0]
    sizes = a.sizes
    work = a.work
    runs = a.work.runs
    num_heads = sizes.heads // sizes.groups
    pieces = step.pieces
    layer = step.index
    for unit in range(begin, end):
        run = unit // pieces // sizes.groups
        g = unit // pieces % sizes.groups
        piece = unit % pieces
        head = piece * num_heads // pieces
        behind = (piece + 1) * num_heads // pieces
        slot = work.rows[runs[run]].slot
        window = a.windows[layer]
        heads = Heads(a.sources[layer], slot, g, window, runs[run], runs[run + 1], behind - head, thread)
        attend(sizes, a.memory, work, heads, g * num_heads + head, a.sinks[layer])


@njit(cache=True)
def attend_code(arguments, address):
    return lasting_code(_attend, arguments, address)
