"""State spaces with one decay a head (Mamba-2): a state for each head, and a whole tree of tokens from the state of the committed text.

Dao & Gu 2024 (arXiv 2405.21060), section 6. Behind a causal convolution and SiLU, each token of a path has x of every head and B, C of every group:

    dt = softplus(dt + bias);    g = dt A;    u = dt x;    S <- exp(g) S + B u^T;    y = C^T S + D x

With S_0 the state at the border of i's block, G_i the sum of g from the first token behind it to node i, and A(i) the tokens behind it that i's path
goes through:

    y_i = exp(G_i) C_i^T S_0 + sum over l in A(i) and i of exp(G_i - G_l) (B_l . C_i) u_l + D x_i
    S   = exp(G_a) S_0 + sum over l in A(a) and a of exp(G_a - G_l) B_l u_l^T        behind an accepted node a

as for gated delta nets, but that no u depends on a state. What goes out is norm(y silu(z)) in groups, see `GatedNorm`.
B, u, g and the inputs of the convolution are pending rows of `recurrent`.
"""

from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import norm_part
from polydraft.models.matrices.products import rounding_of
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.program import lasting_code
from polydraft.models.mixers.recurrent import (
    BLOCK,
    FORGOTTEN,
    FoldScratch,
    StateKind,
    StateOrder,
    StateShape,
    add_outer_products,
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
from polydraft.numerics.compile_time import borrowed, inlined, inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp, fma


class StateSpaceSizes(NamedTuple):
    """heads of `width` numbers, groups of heads with one B and C of `states` numbers, taps of the convolution."""

    heads: int
    width: int
    groups: int
    states: int
    kernel: int

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.states


class StateSpaceMemory(NamedTuple):
    """inputs: [layers, slots, PENDING, channels] of the convolution.  keys, updates, decays: B, u and g, [layers, slots, PENDING, ...].
    last_inputs: [layers, slots, kernel - 1, channels].  states: [layers, slots, heads, states, width].  folded: [slots]."""

    sizes: StateSpaceSizes
    inputs: np.ndarray
    keys: np.ndarray
    updates: np.ndarray
    decays: np.ndarray
    last_inputs: np.ndarray
    states: np.ndarray
    folded: np.ndarray


def state_space_shape(layers: int, sizes: StateSpaceSizes) -> StateShape:
    """What so many layers store.

    Example:
        >>> state_space_shape(1, StateSpaceSizes(2, 4, 1, 8, 4)).state_bytes
        544
    """
    states = (sizes.kernel - 1, sizes.channels), (sizes.heads, sizes.states, sizes.width)
    return StateShape(
        layers, states, ((sizes.channels,), (sizes.groups * sizes.states,), (sizes.inner,), (sizes.heads,))
    )


def new_state_space(shape: StateShape, folded: np.ndarray) -> tuple[StateSpaceMemory, StateKind]:
    """Memory for the slots that `folded` counts, as parts and as `recurrent.RecurrentMemory` take it."""
    (num_inputs, channels), (heads, num_states, width) = shape.states
    _, (keys,), *_ = shape.pending
    sizes = StateSpaceSizes(heads, width, keys // num_states, num_states, num_inputs + 1)
    assert sizes.channels == channels
    states = shape.new_states(len(folded))
    pending = shape.new_pending(len(folded))
    memory = StateSpaceMemory(sizes, *pending, *states, folded)
    scratch = fold_scratch(sizes.states, sizes.width, 1)
    return memory, StateKind(states, pending, lambda slot, first: _fold(memory, scratch, slot, first))


@inlined
def _left_of_keys(memory, scratch, thread, layer, slot, head):
    """exp(G_a - G_l) B_l of a block of pending rows, at `scratch.places`; returns exp(G_a), what is left of the state before it."""
    states = memory.sizes.states
    places = scratch.places[thread]
    scaled_keys = scratch.keys[thread]
    keys = memory.keys[layer, slot]
    decays = memory.decays[layer, slot]
    first = head * memory.sizes.groups // memory.sizes.heads * states
    total = NONE
    for back in range(BLOCK):
        l = BLOCK - 1 - back
        weight = exp(total)
        key = keys[places[l]]
        for n in range(states):
            scaled_keys[n, l] = weight * key[first + n]
        total += decays[places[l], head]
    return exp(total)


@borrowed
def _fold_head(memory, scratch, thread, layer, slot, head, state, behind):
    """A block of pending rows, at `scratch.places`, becomes part of a state of a head: one product of B, by what is left of it, with u.
    behind: the state with them, perhaps the same memory."""
    width = memory.sizes.width
    places = scratch.places[thread]
    sums = scratch.sums[thread]
    updates = memory.updates[layer, slot]
    shrunk = _left_of_keys(memory, scratch, thread, layer, slot, head)
    for l in range(BLOCK):
        put_update(scratch, thread, l, updates[places[l], head * width : (head + 1) * width])
    add_outer_products(scratch, thread)
    for n in range(memory.sizes.states):
        for i in range(width):
            behind[n, i] = fma(shrunk, state[n, i], sums[n, i])


@njit(cache=True, nogil=True)
def _fold(memory, scratch, slot, first):
    """The block of a slot's pending rows that begins with the `first` becomes part of its states."""
    fold_inputs(memory.inputs, memory.last_inputs, slot, first)
    fold_block(_fold_head, memory, scratch, slot, first)


class KeepRows(NamedTuple):
    """What the convolution reads of every row becomes its pending row. x: [rows, inner + channels + heads] of z, (x, B, C), dt."""

    step: np.ndarray
    rows: np.ndarray
    x: np.ndarray
    memory: StateSpaceMemory


@unowned
def _keep_rows(a, begin, end, thread):
    inputs = a.memory.inputs[a.step[0].index]
    first = a.memory.sizes.heads * a.memory.sizes.width
    for t in range(begin, end):
        row = a.rows[t]
        target = inputs[row.slot, row.column - a.memory.folded[row.slot]]
        for i in range(len(target)):
            target[i] = a.x[t, first + i]


@njit(cache=True)
def keep_rows_code(arguments, address):
    return lasting_code(_keep_rows, arguments, address)


class Mix(NamedTuple):
    """x, B, C of every row, into `mixed` [rows, channels], and its B, u and g, which become its pending row.

    taps: [layers, kernel, channels].  bias: [layers, channels] or [layers, 0].  rates: A, [layers, heads].  rate_bias: of dt, likewise.
    """

    step: np.ndarray
    rows: np.ndarray
    seen_columns: np.ndarray
    x: np.ndarray
    memory: StateSpaceMemory
    taps: np.ndarray
    bias: np.ndarray
    rates: np.ndarray
    rate_bias: np.ndarray
    mixed: np.ndarray


@inner(error_model="numpy")
def _softplus(x):
    return x if x > np.float32(20.0) else np.log1p(exp(x))


@inner(error_model="numpy")
def _silu(x):
    return x / (ONE + exp(-x))


@inlined
def _put_pending(a, layer, row, x, mixed):
    """B, g = dt A and u = dt x of a row, which become its pending row."""
    memory = a.memory
    heads = memory.sizes.heads
    width = memory.sizes.width
    first_key = heads * width
    first_step = first_key + len(mixed)
    place = row.column - memory.folded[row.slot]
    keys = memory.keys[layer, row.slot, place]
    updates = memory.updates[layer, row.slot, place]
    decays = memory.decays[layer, row.slot, place]
    for i in range(len(keys)):
        keys[i] = mixed[first_key + i]
    for head in range(heads):
        step_size = _softplus(x[first_step + head] + a.rate_bias[layer, head])
        decays[head] = step_size * a.rates[layer, head]
        for i in range(head * width, (head + 1) * width):
            updates[i] = step_size * mixed[i]


@unowned
def _mix(a, begin, end, thread):
    layer = a.step[0].index
    for t in range(begin, end):
        row = a.rows[t]
        out = a.mixed[t]
        convolve(
            row,
            a.seen_columns[t],
            a.memory.folded[row.slot],
            a.memory.inputs[layer, row.slot],
            a.memory.last_inputs[layer, row.slot],
            a.taps[layer],
            a.bias[layer],
            np.int64(0),
            False,
            out,
        )
        for i in range(len(out)):
            out[i] = _silu(out[i])
        _put_pending(a, layer, row, a.x[t], out)


@njit(cache=True)
def mix_code(arguments, address):
    return lasting_code(_mix, arguments, address)


class Overlap(NamedTuple):
    """B_l . C_i of every row i and each l of its path behind the state, itself first. overlaps: [rows, groups, BLOCK]."""

    step: np.ndarray
    rows: np.ndarray
    seen_columns: np.ndarray
    memory: StateSpaceMemory
    mixed: np.ndarray
    overlaps: np.ndarray


@inner
def _dot(a, first, b, begin, n):
    """Of a[first : first + n] and b[begin : begin + n]: four sums, that wait for one another less."""
    s0 = s1 = s2 = s3 = NONE
    whole = n // 4 * 4
    for i in range(0, whole, 4):
        s0 = fma(a[first + i], b[begin + i], s0)
        s1 = fma(a[first + i + 1], b[begin + i + 1], s1)
        s2 = fma(a[first + i + 2], b[begin + i + 2], s2)
        s3 = fma(a[first + i + 3], b[begin + i + 3], s3)
    for i in range(whole, n):
        s0 = fma(a[first + i], b[begin + i], s0)
    return (s0 + s1) + (s2 + s3)


@unowned
def _overlap(a, begin, end, thread):
    layer = a.step[0].index
    memory = a.memory
    groups = memory.sizes.groups
    states = memory.sizes.states
    queries = memory.sizes.heads * memory.sizes.width + groups * states
    for t in range(begin, end):
        row = a.rows[t]
        folded = memory.folded[row.slot]
        keys = memory.keys[layer, row.slot]
        for back in range((row.length + row.num_seen - 1) % BLOCK + 1):
            place = pending_row(row, a.seen_columns[t], folded, back)
            for g in range(groups):
                a.overlaps[t, g, back] = _dot(
                    keys[place], g * states, a.mixed[t], queries + g * states, states
                )


@njit(cache=True)
def overlap_code(arguments, address):
    return lasting_code(_overlap, arguments, address)


class ScanScratch(NamedTuple):
    """Of each thread. order: of rows.  state: [threads, states, width] of a head, at a border behind what is folded."""

    order: StateOrder
    fold: FoldScratch
    state: np.ndarray


def scan_scratch(sizes: StateSpaceSizes, rows: int, threads: int) -> ScanScratch:
    """rows: of a slot that are in work at once."""
    return ScanScratch(
        state_order(threads, rows),
        fold_scratch(sizes.states, sizes.width, threads),
        aligned(threads, sizes.states, sizes.width),
    )


class Scan(NamedTuple):
    """y of some heads of all rows. skips: D, [layers, heads].  y: [rows, inner]."""

    step: np.ndarray
    rows: np.ndarray
    seen_columns: np.ndarray
    memory: StateSpaceMemory
    skips: np.ndarray
    mixed: np.ndarray
    overlaps: np.ndarray
    y: np.ndarray
    scratch: ScanScratch


@inlined
def _sum_over_path(a, layer, head, group, t, width, y):
    """y += sum over l in A(i) and i of exp(G_i - G_l) (B_l . C_i) u_l; returns G_i, or a sum as small where all before has no weight."""
    row = a.rows[t]
    columns = a.seen_columns[t]
    begin = head * width
    folded = a.memory.folded[row.slot]
    updates = a.memory.updates[layer, row.slot]
    decays = a.memory.decays[layer, row.slot]
    overlaps = a.overlaps[t, group]
    total = NONE
    for back in range((row.length + row.num_seen - 1) % BLOCK + 1):
        place = pending_row(row, columns, folded, back)
        factor = exp(total) * overlaps[back]
        update = updates[place, begin : begin + width]
        for i in range(width):
            y[i] = fma(factor, update[i], y[i])
        total += decays[place, head]
        if total < FORGOTTEN:
            break
    return total


@inlined
def _add_state(a, x, query, weight, state, width, y):
    """y += exp(G_i) C_i^T S_0."""
    for n in range(a.memory.sizes.states):
        factor = weight * x[query + n]
        for i in range(width):
            y[i] = fma(factor, state[n, i], y[i])


@inner
def _scan_row(a, layer, head, t, state):
    sizes = a.memory.sizes
    width = sizes.width
    group = head * sizes.groups // sizes.heads
    begin = head * width
    x = a.mixed[t]
    y = a.y[t, begin : begin + width]
    skip = a.skips[layer, head]
    for i in range(width):
        y[i] = skip * x[begin + i]
    total = _sum_over_path(a, layer, head, group, t, width, y)
    if total >= FORGOTTEN and border_of(a.rows[t]) > 0:
        query = sizes.heads * width + (sizes.groups + group) * sizes.states
        _add_state(a, x, query, exp(total), state, width, y)


@inner
def _scan_slot(a, layer, head, first, last, thread):
    """Rows first .. last-1, all of one slot."""
    order = a.scratch.order.rows[thread]
    ends = a.scratch.order.ends[thread]
    begin = np.int64(0)
    held = np.int64(0)
    held_column = np.int64(-1)
    for s in range(order_by_state(a.rows, a.seen_columns, first, last, a.scratch.order, thread)):
        row = a.rows[order[begin]]
        columns = a.seen_columns[order[begin]]
        state, held, held_column = state_at_border(
            _fold_head, a.memory, a.scratch, thread, layer, row, columns, head, held, held_column
        )
        for rank in range(begin, ends[s]):
            _scan_row(a, layer, head, order[rank], state)
        begin = ends[s]


@unowned
def _scan(a, begin, end, thread):
    step = a.step[0]
    for head in range(begin, end):
        first = np.int64(0)
        for t in range(1, step.rows + 1):
            if t == step.rows or a.rows[t].slot != a.rows[first].slot:
                _scan_slot(a, step.index, head, first, t, thread)
                first = t


@njit(cache=True)
def scan_code(arguments, address):
    return lasting_code(_scan, arguments, address)


class GatedNorm(NamedTuple):
    """norm(y silu(z)), in groups, rounded for the product behind it. x: z first.  gain: [layers, inner], or [layers, 0] for no norm."""

    step: np.ndarray
    x: np.ndarray
    y: np.ndarray
    gain: np.ndarray
    groups: int
    epsilon: np.float32
    rounding: int
    rounded: np.ndarray


@unowned
def _gated_norm(a, begin, end, thread):
    gain = a.gain[a.step[0].index]
    width = a.y.shape[1]
    size = len(gain) // a.groups
    for t in range(begin, end):
        y = a.y[t]
        for i in range(width):
            y[i] *= _silu(a.x[t, i])
        for g in range(a.groups if size > 0 else 0):
            norm_part(y, g * size, gain[g * size : (g + 1) * size], a.epsilon)
    quantize_rows(a.y, width, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def gated_norm_code(arguments, address):
    return lasting_code(_gated_norm, arguments, address)
