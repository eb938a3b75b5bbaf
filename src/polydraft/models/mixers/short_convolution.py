"""Short convolutions over a path: every number of a token's input is mixed with those of the few tokens before it.

LFM2, Liquid AI 2025 (arXiv 2511.23404, section 2): with B, C, x = W_in norm(h), of width D each, a layer adds

    W_out (C * y),    y_t = bias + sum_k taps[k] * z_(t - K + 1 + k),    z = B * x

z of the last K - 1 tokens is what a layer stores. A node of a tree takes it of its parent, grandparent, ..., and behind the root of the committed text:
inputs are pending rows of `recurrent`, and every row's sum has one order, so that its bits depend on the tokens alone.
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.products import rounding_of
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.layer import CONVOLUTION, Block, LayerWeights, Shapes, Weights, biased_product
from polydraft.models.mixers.program import Part, lasting_code
from polydraft.models.mixers.recurrent import BLOCK, StateKind, StateShape, pending_row
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace
from polydraft.numerics.compile_time import borrowed, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import fma


def convolution_shapes(config: Any) -> Shapes:
    """Of LFM2's configuration."""
    h = config.hidden_size
    shapes: Shapes = {
        "conv.conv.weight": (h, 1, config.conv_L_cache),
        "conv.in_proj.weight": (3 * h, h),
        "conv.out_proj.weight": (h, h),
    }
    if config.conv_bias:
        shapes |= {"conv.conv.bias": (h,), "conv.in_proj.bias": (3 * h,), "conv.out_proj.bias": (h,)}
    return shapes


CONVOLUTION_WEIGHTS = LayerWeights(
    CONVOLUTION,
    matrices={"conv_in": ("conv.in_proj",), "conv_out": ("conv.out_proj",)},
    vectors={
        "conv_taps": "conv.conv.weight",
        "conv_taps_bias": "conv.conv.bias",
        "conv_in_bias": "conv.in_proj.bias",
        "conv_out_bias": "conv.out_proj.bias",
    },
    names={
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
    },
    shapes=convolution_shapes,
)


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


@borrowed
def convolve(row, columns, folded, inputs, state, taps, bias, begin, newest_first, out):
    """out = bias + sum_k taps[k] * input of the token K - 1 - k before, of the channels from `begin` on.

    inputs, state: of the row's slot.  taps: [K, D].  bias: [D] or [0].  newest_first: order of the sum.
    """
    last = len(taps) - 1
    for i in range(len(out)):
        out[i] = bias[begin + i] if len(bias) > 0 else np.float32(0.0)
    for term in range(last + 1):
        back = term if newest_first else last - term
        tap = taps[last - back]
        at = pending_row(row, columns, folded, back)
        source = inputs[at] if at >= 0 else state[last + at]
        for i in range(len(out)):
            out[i] = fma(tap[begin + i], source[begin + i], out[i])


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
            np.int64(0),
            False,
            out,
        )
        for i in range(width):
            out[i] *= a.x[t, width + i]
    quantize_rows(a.mixed, width, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def convolve_code(arguments, address):
    return lasting_code(_convolve, arguments, address)


def convolution_block(
    weights: Weights, sizes: Sizes, memory: ConvolutionMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Inputs become pending rows, then every row takes those of its path; see `mixers.short_convolution`."""
    of = weights.others
    into = of["conv_in"]
    out = of["conv_out"]
    taps = of["conv_taps"]
    taps = np.ascontiguousarray(taps[:, :, 0].swapaxes(1, 2))
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, taps.shape[2])
    convolution = GatedConvolution(
        step,
        work.rows,
        work.seen_columns,
        x,
        memory,
        taps,
        of["conv_taps_bias"],
        mixed,
        out.rounding,
        work.rounded,
    )
    parts = (
        *biased_product(step, work.normed, into, x, work, of["conv_in_bias"]),
        Part(keep_inputs_code, KeepInputs(step, work.rows, x, memory)),
        Part(convolve_code, convolution),
        *biased_product(step, mixed, out, work.update, work, of["conv_out_bias"]),
    )
    return Block(into.rounding, parts)
