"""Gated delta nets: a state for each head instead of keys and values, and a whole tree of tokens from the state of the committed text.

Yang, Kautz & Hatamizadeh 2024, Gated Delta Networks (arXiv 2412.06464), equation 10, as Qwen3-Next and Qwen3.5 have it: behind a causal convolution,
with q and k normalised and q scaled by its width, each token of a path does

    S <- exp(g) S;    u = beta (v - k^T S);    S <- S + k u^T;    o = q^T S

With S_0 the state at the border of i's block, G_i the sum of g from the first token behind it to node i, and A(i) the tokens behind it that i's path
goes through:

    u_i = beta_i (v_i - exp(G_i) k_i^T S_0 - sum over l in A(i) of exp(G_i - G_l) (k_i . k_l) u_l)
    o_i = exp(G_i) q_i^T S_0 + sum over l in A(i) and i of exp(G_i - G_l) (q_i . k_l) u_l
    S   = exp(G_a) S_0 + sum over l in A(a) and a of exp(G_a - G_l) k_l u_l^T        behind an accepted node a

So the state is read once for all nodes of a block, a branch costs dot products of keys, and what is rejected was never in it: k, u, g and the inputs of
the convolution of each token are rows of `recurrent`'s memory, which folds blocks of accepted ones into the state. Where a tree or a prompt crosses a
border, the block before it is folded into a state beside that, once for all nodes that it is on the path of.

Trap: G_i - G_l is a sum from l to i in float64, never a difference of two float32 sums: behind strong decays those are large, and their
difference decides.
"""

import math
from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import inverse_norm
from polydraft.models.matrices.products import call_product, number_product
from polydraft.models.matrices.tiles import UNROLL
from polydraft.models.matrices.vectors import PANEL, aligned
from polydraft.models.mixers.cache import whole
from polydraft.models.mixers.program import lasting_code
from polydraft.models.mixers.recurrent import (
    BLOCK,
    FORGOTTEN,
    FoldScratch,
    StateKind,
    StateOrder,
    StateShape,
    add_outer_products,
    block_places,
    border_column,
    border_of,
    fold_begin,
    fold_scratch,
    order_by_state,
    pending_row,
    put_update,
    state_order,
)
from polydraft.models.mixers.short_convolution import convolve, fold_inputs
from polydraft.models.mixers.workspace import NONE, ONE
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp, fma

borrowed = inner(_nrt=False, error_model="numpy")
"""For what a part calls: its arrays are owned by nobody that counts."""


class DeltaSizes(NamedTuple):
    """Heads of keys (and queries) and of values, their widths, taps of the convolution.

    tiled: whether value head j reads key head j % key_heads, as in llama.cpp's files; else j // (value_heads / key_heads).  epsilon: of the norm.
    together: whether what b and a are made of lies together for the value heads of a key head, as in Qwen3-Next.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    tiled: bool = False
    epsilon: float = 1e-6
    together: bool = False


class DeltaWeights(NamedTuple):
    """Of all such layers, beside their products. Channels are q, k and v of all heads."""

    taps: np.ndarray  # [L, taps, channels], the last one is of a token's own input
    rate: np.ndarray  # [L, value heads], -exp(A_log)
    rate_bias: np.ndarray  # [L, value heads]
    norm: np.ndarray  # [L, value width]


class DeltaMemory(NamedTuple):
    """States of all slots, and rows of the tokens behind them; see `recurrent`. product: address of the code that multiplies with states."""

    states: np.ndarray  # [L, slots, value heads, value width / PANEL, key width, PANEL]
    tails: np.ndarray  # [L, slots, taps - 1, channels], inputs of the convolution, the oldest first
    inputs: np.ndarray  # [L, slots, rows, channels]
    keys: np.ndarray  # [L, slots, rows, key heads x key width]
    updates: np.ndarray  # [L, slots, rows, value heads x value width], u
    decays: np.ndarray  # [L, slots, rows, value heads], g
    folded: np.ndarray  # [slots]
    product: int
    sizes: DeltaSizes


class DeltaScratch(NamedTuple):
    """Of each thread, for rows of one slot, in the order of the states that they read."""

    order: StateOrder
    fold: FoldScratch
    state: (
        np.ndarray
    )  # [threads, value width / PANEL, key width, PANEL] of a head, at a border behind what is folded
    pairs: np.ndarray  # [threads, 2 rows, key width]: key and query of each row
    panels: np.ndarray  # [threads, 2 rows / PANEL, key width, PANEL], the same
    dots: np.ndarray  # [threads, rows of memory, 2 rows]
    read: np.ndarray  # [threads, 2 rows, value width]
    value: np.ndarray  # [threads, value width]
    out: np.ndarray  # [threads, value width]


def delta_shape(layers: int, sizes: DeltaSizes) -> StateShape:
    """What so many layers store.

    Example:
        >>> delta_shape(1, DeltaSizes(1, 1, PANEL, PANEL, 4)).state_bytes == 4 * (PANEL**2 + 3 * 3 * PANEL)
        True
    """
    keys = sizes.key_heads * sizes.key_width
    values = sizes.value_heads * sizes.value_width
    state = sizes.value_heads, whole(sizes.value_width) // PANEL, sizes.key_width, PANEL
    channels = 2 * keys + values
    return StateShape(
        layers,
        (state, (sizes.taps - 1, channels)),
        ((channels,), (keys,), (values,), (sizes.value_heads,)),
        sizes,
    )


def new_delta(shape: StateShape, folded: np.ndarray) -> tuple[DeltaMemory, StateKind]:
    """Memory for the slots that `folded` counts, as parts and as `recurrent.RecurrentMemory` take it."""
    states = shape.new_states(len(folded))
    pending = shape.new_pending(len(folded))
    assert shape.sizes.taps <= BLOCK
    memory = DeltaMemory(*states, *pending, folded, number_product(np.dtype(np.float32)), shape.sizes)
    scratch = fold_scratch(shape.sizes.key_width, shape.sizes.value_width, 1)
    return memory, StateKind(states, pending, lambda slot, first: fold_slot(memory, scratch, slot, first))


def delta_scratch(sizes: DeltaSizes, rows: int, memory_rows: int, threads: int) -> DeltaScratch:
    """rows: of a slot that are in work at once."""
    assert sizes.key_width % UNROLL == 0
    pairs = whole(2 * rows)
    width = whole(sizes.value_width)
    return DeltaScratch(
        order=state_order(threads, rows),
        fold=fold_scratch(sizes.key_width, sizes.value_width, threads),
        state=aligned(threads, width // PANEL, sizes.key_width, PANEL),
        pairs=aligned(threads, pairs, sizes.key_width),
        panels=aligned(threads, pairs // PANEL, sizes.key_width, PANEL),
        dots=aligned(threads, memory_rows, pairs),
        read=aligned(threads, pairs, width),
        value=aligned(threads, sizes.value_width),
        out=aligned(threads, sizes.value_width),
    )


@borrowed
def _value_head(sizes, g, m):
    """The m-th value head of key head g."""
    return g + m * sizes.key_heads if sizes.tiled else g * (sizes.value_heads // sizes.key_heads) + m


@borrowed
def _fold_head(memory, scratch, thread, layer, slot, j, state, behind):
    """A block of rows, at `scratch.places`, becomes part of a state of value head j: one product of their keys, by what is left of them, with their
    updates. behind: the state with them, perhaps the same memory."""
    sizes = memory.sizes
    places = scratch.places[thread]
    scaled_keys = scratch.keys[thread]
    sums = scratch.sums[thread]
    K = sizes.key_width
    V = sizes.value_width
    g = j % sizes.key_heads if sizes.tiled else j // (sizes.value_heads // sizes.key_heads)
    keys = memory.keys[layer, slot]
    updates = memory.updates[layer, slot]
    decays = memory.decays[layer, slot]
    total = 0.0
    for l in range(BLOCK):
        total += decays[places[l], j]
    shrunk = exp(np.float32(total))
    for l in range(BLOCK):
        total -= decays[places[l], j]
        share = exp(np.float32(min(total, 0.0)))
        key = keys[places[l], g * K : (g + 1) * K]
        for i in range(K):
            scaled_keys[i, l] = share * key[i]
        put_update(scratch, thread, l, updates[places[l], j * V : (j + 1) * V])
    add_outer_products(scratch, thread)
    for p in range(state.shape[0]):
        for i in range(K):
            row = state[p, i]
            result = behind[p, i]
            added = sums[i, p * PANEL : (p + 1) * PANEL]
            for lane in range(PANEL):
                result[lane] = fma(shrunk, row[lane], added[lane])


@njit(cache=True)
def fold_slot(memory, scratch, slot, first):
    """The block of a slot's rows that begins with the `first` becomes part of its states."""
    thread = np.int64(0)
    places = scratch.places[0]
    for l in range(BLOCK):
        places[l] = first + l
    fold_inputs(memory.inputs, memory.tails, slot, first)
    for layer in range(len(memory.states)):
        for j in range(memory.sizes.value_heads):
            state = memory.states[layer, slot, j]
            _fold_head(memory, scratch, thread, layer, slot, j, state, state)


@borrowed
def _convolve(taps, tail, inputs, row, columns, folded, begin, out):
    """SiLU of the convolution of some channels at one row: over the inputs of the tokens before it on its path, and its own."""
    convolve(row, columns, folded, inputs, tail, taps, taps[0, :0], begin, True, out)
    for i in range(len(out)):
        out[i] = out[i] / (ONE + exp(-out[i]))


@borrowed
def _unit(x, scale):
    """x = scale x / sqrt(sum x^2 + epsilon)."""
    n = np.float32(len(x))
    # the epsilon is that of all models
    factor = scale / np.sqrt(n) * inverse_norm(x, np.int64(0), len(x), np.float32(1e-6) / n)
    for i in range(len(x)):
        x[i] *= factor


@borrowed
def _gated_norm(out, norm, epsilon, gate, mixed):
    """mixed = norm out / sqrt(mean(out^2) + epsilon) silu(gate)."""
    n = len(out)
    factor = inverse_norm(out, np.int64(0), n, epsilon)
    for i in range(n):
        z = gate[i]
        mixed[i] = out[i] * factor * norm[i] * (z / (ONE + exp(-z)))


@borrowed
def _store_inputs(x, inputs, begin, width):
    source = x[begin : begin + width]
    target = inputs[begin : begin + width]
    for i in range(width):
        target[i] = source[i]


@borrowed
def _prepare(weights, memory, layer, folded, rows, columns, first, last, g, projected, scratch, thread):
    """Keys and queries of a head, in the order of states: convolution and norms, in `pairs` and in panels; keys are stored."""
    sizes = memory.sizes
    K = sizes.key_width
    slot = rows[first].slot
    order = scratch.order.rows[thread]
    pairs = scratch.pairs[thread]
    panels = scratch.panels[thread]
    scale = np.float32(1.0 / math.sqrt(K))
    tail = memory.tails[layer, slot]
    inputs = memory.inputs[layer, slot]
    keys = memory.keys[layer, slot]
    taps = weights.taps[layer]
    for rank in range(last - first):
        t = order[rank]
        pair = 2 * rank
        row = rows[t]
        place = rows[t].column - folded
        for role in range(2):
            begin = ((1 - role) * sizes.key_heads + g) * K
            x = pairs[pair + role]
            _store_inputs(projected[t], inputs[place], begin, K)
            _convolve(taps, tail, inputs, row, columns[t], folded, begin, x)
            _unit(x, ONE if role == 0 else scale)
            panel = panels[(pair + role) // PANEL]
            lane = (pair + role) % PANEL
            for i in range(K):
                panel[i, lane] = x[i]
        for i in range(K):
            keys[place, g * K + i] = pairs[pair, i]


@borrowed
def _overlap(memory, layer, folded, rows, columns, begin, end, g, scratch, thread):
    """Dot products of the keys behind a state with keys and queries of the rows that read it, which are the ranks begin .. end-1."""
    K = memory.sizes.key_width
    order = scratch.order.rows[thread]
    dots = scratch.dots[thread]
    row = rows[order[begin]]
    last = np.int64(0)
    keys = memory.keys[layer, row.slot]
    first = border_column(row, columns[order[begin]], border_of(row)) + 1 - folded
    for rank in range(begin, end):
        last = max(last, rows[order[rank]].column - folded)
    panel = 2 * begin // PANEL
    call_product(
        memory.product,
        keys[first].ctypes.data + 4 * g * K,
        4 * keys.shape[1],
        scratch.panels[thread, panel].ctypes.data,
        4 * K * PANEL,
        (2 * end + PANEL - 1) // PANEL - panel,
        K,
        dots[first].ctypes.data + 4 * panel * PANEL,
        4 * dots.shape[1],
        PANEL,
        last + 1 - first,
    )


@borrowed
def _read_state(memory, layer, folded, row, columns, begin, end, j, held, held_column, scratch, thread):
    """What keys and queries of the ranks begin .. end-1 read of value head j's state, the first of them being `row`.

    held, held_column: see `recurrent.fold_begin`, of `scratch.state`; returned as they are then.
    """
    K = memory.sizes.key_width
    read = scratch.read[thread]
    border = border_of(row)
    behind = scratch.state[thread]
    state = memory.states[layer, row.slot, j]
    if border > folded:
        start = fold_begin(row, columns, folded, held, held_column)
        if start > folded:
            state = behind
        for done in range(start, border, BLOCK):
            block_places(row, columns, folded, done + BLOCK, scratch.fold.places[thread])
            _fold_head(memory, scratch.fold, thread, layer, row.slot, j, state, behind)
            state = behind
        held = border
        held_column = border_column(row, columns, border)
    call_product(
        memory.product,
        scratch.pairs[thread, 2 * begin].ctypes.data,
        4 * K,
        state.ctypes.data,
        4 * K * PANEL,
        state.shape[0],
        K,
        read[2 * begin].ctypes.data,
        4 * read.shape[1],
        PANEL,
        2 * (end - begin),
    )
    return held, held_column


@borrowed
def _add_token(share_key, share_query, of_token, value, out):
    """A token of the path enters u and o of a node."""
    for i in range(len(value)):
        u = of_token[i]
        value[i] = fma(-share_key, u, value[i])
        out[i] = fma(share_query, u, out[i])


@borrowed
def _node(row, columns, folded, dots, pair, read, beta, decays, updates, j, value, out):
    """u of one node into its row of memory, and o, of value head j; value: its own, which is used up.  read: what its key and query read of the state."""
    V = len(value)
    place = row.column - folded
    total = np.float64(decays[place, j])
    for i in range(V):
        out[i] = NONE
    back = 1
    before = (row.length + row.num_seen - 1) % BLOCK
    while back <= before and total > FORGOTTEN:
        l = pending_row(row, columns, folded, back)
        share = exp(np.float32(total))
        _add_token(
            share * dots[l, pair], share * dots[l, pair + 1], updates[l, j * V : (j + 1) * V], value, out
        )
        total += decays[l, j]
        back += 1
    decay = exp(np.float32(total)) if total > FORGOTTEN else NONE
    overlap = dots[place, pair + 1]
    by_key = read[pair]
    by_query = read[pair + 1]
    stored = updates[place, j * V : (j + 1) * V]
    for i in range(V):
        u = beta * fma(-decay, by_key[i], value[i])
        stored[i] = u
        out[i] = fma(overlap, u, fma(decay, by_query[i], out[i]))


@borrowed
def _scalar_places(sizes, begin, g, m, j):
    """Where a row has b and a of the m-th value head of key head g, which is j of all."""
    per_key = sizes.value_heads // sizes.key_heads
    if sizes.together:
        return begin + 2 * g * per_key + m, begin + (2 * g + 1) * per_key + m
    return begin + j, begin + sizes.value_heads + j


@borrowed
def _softplus(x):
    """log(1 + exp(x)) in float64."""
    return x if x > 30.0 else math.log1p(math.exp(x))


@borrowed
def delta_heads(weights, memory, layer, rows, seen, first, last, g, projected, mixed, scratch, thread):
    """Rows first .. last-1, all of one slot: the value heads of key head g.

    projected: [rows, channels + value heads x value width + 2 value heads], of each row q, k, v, then z, b
    and a.  mixed: what goes into the last product.
    """
    sizes = memory.sizes
    K = sizes.key_width
    V = sizes.value_width
    H = sizes.value_heads
    slot = rows[first].slot
    folded = memory.folded[slot]
    order = scratch.order.rows[thread]
    ends = scratch.order.ends[thread]
    num_states = order_by_state(rows, seen, first, last, scratch.order, thread)
    _prepare(weights, memory, layer, folded, rows, seen, first, last, g, projected, scratch, thread)
    begin = np.int64(0)
    for s in range(num_states):
        _overlap(memory, layer, folded, rows, seen, begin, ends[s], g, scratch, thread)
        begin = ends[s]
    tail = memory.tails[layer, slot]
    inputs = memory.inputs[layer, slot]
    taps = weights.taps[layer]
    updates = memory.updates[layer, slot]
    decays = memory.decays[layer, slot]
    dots = scratch.dots[thread]
    read = scratch.read[thread]
    value = scratch.value[thread]
    out = scratch.out[thread]
    values = 2 * sizes.key_heads * K
    gates = weights.taps.shape[2]
    for m in range(H // sizes.key_heads):
        j = _value_head(sizes, g, m)
        b, a = _scalar_places(sizes, gates + H * V, g, m, j)
        begin = np.int64(0)
        held = np.int64(0)
        held_column = np.int64(-1)
        for s in range(num_states):
            row = rows[order[begin]]
            columns = seen[order[begin]]
            held, held_column = _read_state(
                memory, layer, folded, row, columns, begin, ends[s], j, held, held_column, scratch, thread
            )
            for rank in range(begin, ends[s]):
                t = order[rank]
                row = rows[t]
                x = projected[t]
                place = rows[t].column - folded
                _store_inputs(x, inputs[place], values + j * V, V)
                _convolve(taps, tail, inputs, row, seen[t], folded, values + j * V, value)
                decays[place, j] = weights.rate[layer, j] * _softplus(x[a] + weights.rate_bias[layer, j])
                beta = ONE / (ONE + exp(-x[b]))
                _node(row, seen[t], folded, dots, 2 * rank, read, beta, decays, updates, j, value, out)
                z = x[gates + j * V : gates + (j + 1) * V]
                _gated_norm(
                    out, weights.norm[layer], np.float32(sizes.epsilon), z, mixed[t, j * V : (j + 1) * V]
                )
            begin = ends[s]


class DeltaNet(NamedTuple):
    """Items are runs of rows times key heads; what a slot's rows leave the next ones read, so that its first run takes all of them.

    x: [rows, outputs of the first product].  mixed: [rows, value heads x value width].
    """

    step: np.ndarray
    rows: np.ndarray
    runs: np.ndarray
    seen_columns: np.ndarray
    weights: DeltaWeights
    memory: DeltaMemory
    x: np.ndarray
    mixed: np.ndarray
    scratch: DeltaScratch


@unowned
def _delta_net(a, begin, end, thread):
    step = a.step[0]
    heads = a.memory.sizes.key_heads
    for unit in range(begin, end):
        run = unit // heads
        g = unit % heads
        first = a.runs[run]
        last = a.runs[run + 1]
        slot = a.rows[first].slot
        if first > 0 and a.rows[first - 1].slot == slot:
            continue
        while last < step.rows and a.rows[last].slot == slot:
            last += 1
        delta_heads(
            a.weights,
            a.memory,
            step.index,
            a.rows,
            a.seen_columns,
            first,
            last,
            g,
            a.x,
            a.mixed,
            a.scratch,
            thread,
        )


@njit(cache=True)
def delta_code(arguments, address):
    return lasting_code(_delta_net, arguments, address)
