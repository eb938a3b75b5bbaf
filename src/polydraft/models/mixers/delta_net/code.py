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
    border_column,
    border_of,
    fold_block,
    fold_scratch,
    order_by_state,
    pending_row,
    put_update,
    state_at_border,
    state_order,
)
from polydraft.models.mixers.short_convolution import convolve, fold_inputs
from polydraft.models.mixers.workspace import NONE, ONE
from polydraft.numerics.compile_time import borrowed, inlined, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp, fma


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


class HeadRows(NamedTuple):
    """Key head g of some rows, all of one slot, in a layer. rows: of `workspace.ROW`.  seen: the columns of each, see `recurrent`.

    folded: tokens in the slot's state.
    """

    rows: np.ndarray
    seen: np.ndarray
    layer: int
    slot: int
    folded: int
    g: int
    thread: int


class ValueHead(NamedTuple):
    """Value head j, and where a row of the first product has its v, z, b and a."""

    j: int
    v: int
    z: int
    b: int
    a: int


@inlined
def _value_head(sizes, g, m):
    """The m-th value head of key head g."""
    per_key = sizes.value_heads // sizes.key_heads
    j = g + m * sizes.key_heads if sizes.tiled else g * per_key + m
    width = sizes.value_width
    v = 2 * sizes.key_heads * sizes.key_width
    z = v + sizes.value_heads * width
    scalars = z + sizes.value_heads * width
    b = scalars + j
    a = b + sizes.value_heads
    if sizes.together:
        b = scalars + 2 * g * per_key + m
        a = b + per_key
    return ValueHead(j, v + j * width, z + j * width, b, a)


@inlined
def _left_of_keys(memory, scratch, thread, layer, slot, j):
    """exp(G_a - G_l) k_l of a block of rows, at `scratch.places`, for value head j; returns exp(G_a), what is left of the state before it."""
    sizes = memory.sizes
    K = sizes.key_width
    g = j % sizes.key_heads if sizes.tiled else j // (sizes.value_heads // sizes.key_heads)
    places = scratch.places[thread]
    scaled_keys = scratch.keys[thread]
    keys = memory.keys[layer, slot]
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
    return shrunk


@borrowed
def _fold_head(memory, scratch, thread, layer, slot, j, state, behind):
    """A block of rows, at `scratch.places`, becomes part of a state of value head j: one product of their keys, by what is left of them, with their
    updates. behind: the state with them, perhaps the same memory."""
    V = memory.sizes.value_width
    places = scratch.places[thread]
    sums = scratch.sums[thread]
    updates = memory.updates[layer, slot]
    shrunk = _left_of_keys(memory, scratch, thread, layer, slot, j)
    for l in range(BLOCK):
        put_update(scratch, thread, l, updates[places[l], j * V : (j + 1) * V])
    add_outer_products(scratch, thread)
    for p in range(state.shape[0]):
        for i in range(state.shape[1]):
            row = state[p, i]
            result = behind[p, i]
            added = sums[i, p * PANEL : (p + 1) * PANEL]
            for lane in range(PANEL):
                result[lane] = fma(shrunk, row[lane], added[lane])


@njit(cache=True)
def fold_slot(memory, scratch, slot, first):
    """The block of a slot's rows that begins with the `first` becomes part of its states."""
    fold_inputs(memory.inputs, memory.tails, slot, first)
    fold_block(_fold_head, memory, scratch, slot, first)


@borrowed
def _unit(x, scale):
    """x = scale x / sqrt(sum x^2 + epsilon)."""
    n = np.float32(len(x))
    # the epsilon is that of all models
    factor = scale / np.sqrt(n) * inverse_norm(x, np.int64(0), len(x), np.float32(1e-6) / n)
    for i in range(len(x)):
        x[i] *= factor


@inlined
def _sigmoid(x):
    return ONE / (ONE + exp(-x))


@borrowed
def _gated_norm(out, norm, epsilon, gate, mixed):
    """mixed = norm out / sqrt(mean(out^2) + epsilon) silu(gate)."""
    n = len(out)
    factor = inverse_norm(out, np.int64(0), n, epsilon)
    for i in range(n):
        z = gate[i]
        mixed[i] = out[i] * factor * norm[i] * (z / (ONE + exp(-z)))


@inlined
def _put_in_panels(x, panels, n):
    """x becomes the n-th column of what dot products read."""
    panel = panels[n // PANEL]
    lane = n % PANEL
    for i in range(len(x)):
        panel[i, lane] = x[i]


@inlined
def _convolve_row(weights, memory, of, t, x, begin, out):
    """SiLU of the convolution of some channels of a row, whose inputs are stored for the rows behind it. x: the row."""
    inputs = memory.inputs[of.layer, of.slot]
    row = of.rows[t]
    source = x[begin : begin + len(out)]
    stored = inputs[row.column - of.folded, begin : begin + len(out)]
    for i in range(len(out)):
        stored[i] = source[i]
    tail = memory.tails[of.layer, of.slot]
    taps = weights.taps[of.layer]
    convolve(row, of.seen[t], of.folded, inputs, tail, taps, taps[0, :0], begin, True, out)
    for i in range(len(out)):
        out[i] = out[i] / (ONE + exp(-out[i]))


@borrowed
def _prepare(weights, memory, of, num_rows, projected, scratch):
    """k and q of all rows, in the order of states: convolution and norms, in `pairs` and in panels; keys are stored."""
    sizes = memory.sizes
    K = sizes.key_width
    order = scratch.order.rows[of.thread]
    pairs = scratch.pairs[of.thread]
    scale = np.float32(1.0 / math.sqrt(K))
    keys = memory.keys[of.layer, of.slot]
    for rank in range(num_rows):
        t = order[rank]
        for role in range(2):
            x = pairs[2 * rank + role]
            begin = ((1 - role) * sizes.key_heads + of.g) * K
            _convolve_row(weights, memory, of, t, projected[t], begin, x)
            _unit(x, ONE if role == 0 else scale)
            _put_in_panels(x, scratch.panels[of.thread], 2 * rank + role)
        place = of.rows[t].column - of.folded
        for i in range(K):
            keys[place, of.g * K + i] = pairs[2 * rank, i]


@inlined
def _first_behind_state(of, t):
    """The place of the first token of a row's path that is not in the state it reads."""
    row = of.rows[t]
    return border_column(row, of.seen[t], border_of(row)) + 1 - of.folded


@borrowed
def _overlap(memory, of, begin, end, scratch):
    """k_i . k_l and q_i . k_l of the rows i with ranks begin .. end-1, which read one state, and the tokens l behind that."""
    K = memory.sizes.key_width
    order = scratch.order.rows[of.thread]
    dots = scratch.dots[of.thread]
    keys = memory.keys[of.layer, of.slot]
    first = _first_behind_state(of, order[begin])
    last = np.int64(0)
    for rank in range(begin, end):
        last = max(last, of.rows[order[rank]].column - of.folded)
    panel = 2 * begin // PANEL
    panels = scratch.panels[of.thread, panel : (2 * end + PANEL - 1) // PANEL]
    call_product(
        memory.product,
        keys[first].ctypes.data + 4 * of.g * K,
        4 * keys.shape[1],
        panels.ctypes.data,
        4 * K * PANEL,
        len(panels),
        K,
        dots[first].ctypes.data + 4 * panel * PANEL,
        4 * dots.shape[1],
        PANEL,
        last + 1 - first,
    )


@inlined
def _read_state(memory, of, begin, end, state, scratch):
    """k^T S_0 and q^T S_0 of the ranks begin .. end-1."""
    pairs = scratch.pairs[of.thread, 2 * begin : 2 * end]
    read = scratch.read[of.thread, 2 * begin : 2 * end]
    K = memory.sizes.key_width
    call_product(
        memory.product,
        pairs.ctypes.data,
        4 * K,
        state.ctypes.data,
        4 * K * PANEL,
        state.shape[0],
        K,
        read.ctypes.data,
        4 * read.shape[1],
        PANEL,
        len(pairs),
    )


@borrowed
def _add_token(share_key, share_query, of_token, value, out):
    """A token of the path enters u and o of a node."""
    for i in range(len(value)):
        u = of_token[i]
        value[i] = fma(-share_key, u, value[i])
        out[i] = fma(share_query, u, out[i])


@inlined
def _sum_over_path(memory, of, j, t, pair, scratch):
    """u and o of what a row i reads behind the state: value -= sum over l in A(i) of exp(G_i - G_l) (k_i . k_l) u_l, and out = that of q_i.

    Returns G_i, or a sum as small where all before has no weight.
    """
    row = of.rows[t]
    value = scratch.value[of.thread]
    out = scratch.out[of.thread]
    begin = j * len(value)
    dots = scratch.dots[of.thread]
    updates = memory.updates[of.layer, of.slot]
    decays = memory.decays[of.layer, of.slot]
    total = np.float64(decays[row.column - of.folded, j])
    out[:] = NONE
    back = 1
    before = (row.length + row.num_seen - 1) % BLOCK
    while back <= before and total > FORGOTTEN:
        l = pending_row(row, of.seen[t], of.folded, back)
        share = exp(np.float32(total))
        of_token = updates[l, begin : begin + len(value)]
        _add_token(share * dots[l, pair], share * dots[l, pair + 1], of_token, value, out)
        total += decays[l, j]
        back += 1
    return total


@inlined
def _add_state(memory, of, j, t, pair, total, beta, scratch):
    """u of a row, into its place, from its value and what its key reads of the state; o, from what its query reads of that and from u."""
    V = memory.sizes.value_width
    place = of.rows[t].column - of.folded
    value = scratch.value[of.thread]
    out = scratch.out[of.thread]
    by_key = scratch.read[of.thread, pair]
    by_query = scratch.read[of.thread, pair + 1]
    overlap = scratch.dots[of.thread, place, pair + 1]
    stored = memory.updates[of.layer, of.slot, place, j * V : (j + 1) * V]
    decay = exp(np.float32(total)) if total > FORGOTTEN else NONE
    for i in range(V):
        u = beta * fma(-decay, by_key[i], value[i])
        stored[i] = u
        out[i] = fma(overlap, u, fma(decay, by_query[i], out[i]))


@borrowed
def _softplus(x):
    """log(1 + exp(x)) in float64."""
    return x if x > 30.0 else math.log1p(math.exp(x))


@inlined
def _put_decay(weights, memory, of, head, t, x):
    """g = -exp(A_log) softplus(a + bias) of a row, into its place."""
    rate = weights.rate[of.layer, head.j]
    bias = weights.rate_bias[of.layer, head.j]
    decays = memory.decays[of.layer, of.slot, of.rows[t].column - of.folded]
    decays[head.j] = rate * _softplus(x[head.a] + bias)


@inlined
def _value_row(weights, memory, of, head, t, pair, x, mixed, scratch):
    """v, g and beta of one row, from them u and o, and of o what goes into the last product. pair: of its key and query."""
    V = memory.sizes.value_width
    begin = head.j * V
    out = scratch.out[of.thread]
    _convolve_row(weights, memory, of, t, x, head.v, scratch.value[of.thread])
    _put_decay(weights, memory, of, head, t, x)
    total = _sum_over_path(memory, of, head.j, t, pair, scratch)
    _add_state(memory, of, head.j, t, pair, total, _sigmoid(x[head.b]), scratch)
    epsilon = np.float32(memory.sizes.epsilon)
    gate = x[head.z : head.z + V]
    _gated_norm(out, weights.norm[of.layer], epsilon, gate, mixed[begin : begin + V])


@inlined
def _value_rows(weights, memory, of, head, num_states, projected, mixed, scratch):
    """The recurrence of a value head over all rows: those of one state, which is read once, after those of another."""
    order = scratch.order.rows[of.thread]
    ends = scratch.order.ends[of.thread]
    begin = np.int64(0)
    held = np.int64(0)
    held_column = np.int64(-1)
    for s in range(num_states):
        row = of.rows[order[begin]]
        columns = of.seen[order[begin]]
        state, held, held_column = state_at_border(
            _fold_head, memory, scratch, of.thread, of.layer, row, columns, head.j, held, held_column
        )
        _read_state(memory, of, begin, ends[s], state, scratch)
        for rank in range(begin, ends[s]):
            t = order[rank]
            _value_row(weights, memory, of, head, t, 2 * rank, projected[t], mixed[t], scratch)
        begin = ends[s]


@borrowed
def delta_heads(weights, memory, layer, rows, seen, first, last, g, projected, mixed, scratch, thread):
    """Rows first .. last-1, all of one slot: the value heads of key head g.

    projected: [rows, channels + value heads x value width + 2 value heads], of each row q, k, v, then z, b
    and a.  mixed: what goes into the last product.
    """
    slot = rows[first].slot
    of = HeadRows(rows, seen, layer, slot, memory.folded[slot], g, thread)
    num_states = order_by_state(rows, seen, first, last, scratch.order, thread)
    _prepare(weights, memory, of, last - first, projected, scratch)
    begin = np.int64(0)
    for s in range(num_states):
        end = scratch.order.ends[thread, s]
        _overlap(memory, of, begin, end, scratch)
        begin = end
    for m in range(memory.sizes.value_heads // memory.sizes.key_heads):
        head = _value_head(memory.sizes, g, m)
        _value_rows(weights, memory, of, head, num_states, projected, mixed, scratch)


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
