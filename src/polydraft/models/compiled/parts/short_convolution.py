"""Short convolutions over a path: every number of a token's input is mixed with those of the few tokens before it.

LFM2, Liquid AI 2025 (arXiv 2511.23404, section 2): with B, C, x = W_in norm(h), of width D each, a layer adds

    W_out (C * y),    y_t = bias + sum_k taps[k] * z_(t - K + 1 + k),    z = B * x

z of the last K - 1 tokens is what a layer stores. A node of a tree takes it of its parent, grandparent, ..., and behind the root of the committed text:
inputs are pending rows of `recurrent`, and every row's sum has one order, so that its bits depend on the tokens alone.
"""

from typing import NamedTuple

import numpy as np

from polydraft.models.compiled.program import lasting_code
from polydraft.models.compiled.recurrent import BLOCK, StateKind, StateShape, pending_row
from polydraft.models.compiled.rounding import quantize_rows
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import fma


class ConvolutionMemory(NamedTuple):
    """inputs: [layers, slots, PENDING, D].  state: [layers, slots, K - 1, D], the last one last.  folded: [slots], see `recurrent`."""

    inputs: np.ndarray
    state: np.ndarray
    folded: np.ndarray


def convolution_shape(layers: int, width: int, kernel: int) -> StateShape:
    """What so many layers store.

    Example:
        >>> convolution_shape(2, 64, 3).state_bytes
        1024
    """
    return StateShape(layers, states=((kernel - 1, width),), pending=((width,),))


def new_convolution(shape: StateShape, folded: np.ndarray) -> tuple[ConvolutionMemory, StateKind]:
    """Memory for the slots that `folded` counts, as parts and as `recurrent.RecurrentMemory` take it."""
    (state,) = shape.new_states(len(folded))
    (inputs,) = shape.new_pending(len(folded))
    assert state.shape[2] <= BLOCK
    return ConvolutionMemory(inputs, state, folded), StateKind(
        (state,), (inputs,), lambda slot, first: fold_inputs(inputs, state, slot, first)
    )


@njit(cache=True)
def fold_inputs(inputs, state, slot, first):
    """The state after the block of pending rows of a slot that begins with the `first`: its last inputs."""
    num_inputs = state.shape[2]
    for layer in range(len(state)):
        for k in range(num_inputs):
            at = first + BLOCK - num_inputs + k
            for i in range(state.shape[3]):
                state[layer, slot, k, i] = inputs[layer, slot, at, i]


@inner
def convolve(row, columns, folded, inputs, state, taps, bias, out):
    """out = bias + sum_k taps[k] * input of the token K - 1 - k before.  inputs, state: of the row's slot.  taps: [K, D].  bias: [D] or [0]."""
    last = len(taps) - 1
    width = taps.shape[1]
    for i in range(width):
        out[i] = bias[i] if len(bias) > 0 else np.float32(0.0)
    for k in range(last + 1):
        at = pending_row(row, columns, folded, last - k)
        source, at, tap = (inputs, at, taps[k]) if at >= 0 else (state, at + last, taps[k])
        for i in range(width):
            out[i] = fma(tap[i], source[at, i], out[i])


class KeepInputs(NamedTuple):
    """z = B * x of every row becomes its pending row.  x: [rows, 3 D] of B, C, x."""

    step: np.ndarray
    rows: np.ndarray
    x: np.ndarray
    memory: ConvolutionMemory


@unowned
def _keep_inputs(a, begin, end, thread):
    inputs = a.memory.inputs[a.step[0].index]
    width = a.memory.inputs.shape[3]
    for t in range(begin, end):
        row = a.rows[t]
        x = a.x[t]
        z = inputs[row.slot, row.column - a.memory.folded[row.slot]]
        for i in range(width):
            z[i] = x[i] * x[2 * width + i]


@njit(cache=True)
def keep_inputs_code(arguments, address):
    return lasting_code(_keep_inputs, arguments, address)


class GatedConvolution(NamedTuple):
    """mixed = C * y, rounded for the product behind it.  taps: [layers, K, D].  bias: [layers, D] or [layers, 0]."""

    step: np.ndarray
    rows: np.ndarray
    seen_columns: np.ndarray
    x: np.ndarray
    memory: ConvolutionMemory
    taps: np.ndarray
    bias: np.ndarray
    mixed: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _convolve(a, begin, end, thread):
    layer = a.step[0].index
    width = a.taps.shape[2]
    inputs = a.memory.inputs[layer]
    state = a.memory.state[layer]
    taps = a.taps[layer]
    bias = a.bias[layer]
    for t in range(begin, end):
        row = a.rows[t]
        out = a.mixed[t]
        convolve(
            row,
            a.seen_columns[t],
            a.memory.folded[row.slot],
            inputs[row.slot],
            state[row.slot],
            taps,
            bias,
            out,
        )
        for i in range(width):
            out[i] *= a.x[t, width + i]
    quantize_rows(a.mixed, width, a.rounding, a.rounded, begin, end)


@njit(cache=True)
def convolve_code(arguments, address):
    return lasting_code(_convolve, arguments, address)
