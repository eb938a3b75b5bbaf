"""Inputs of each layer beside what the layer before it gave, as Gemma 4 and Gemma 3n have them, and a factor behind each layer.

e      embedding of the row's token, times its scale          t[l]  the token's own numbers for layer l, times the root of their count P
i[l] = (norm(W e / sqrt(h))[l] + t[l]) / sqrt(2)              before the first layer, of all layers
x    = factor[l] (x + norm(up (gelu(gate x) i[l])))           behind the feed-forward of each
"""

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import gate, norm_part, scale_row
from polydraft.models.matrices.products import Packed, output_row, rounding_of
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.dense import Join, Rounding, join_code, rounding_code
from polydraft.models.mixers.layer import LayerWeights, product
from polydraft.models.mixers.program import Part, Work, lasting_code
from polydraft.models.mixers.workspace import CHUNK, ONE, Sizes, Workspace
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit

TOKENS = "model.embed_tokens_per_layer"
PROJECTION = "model.per_layer_model_projection"
NORM = "model.per_layer_projection_norm"
WEIGHTS = LayerWeights(
    matrices={"input_gate": ("per_layer_input_gate",), "input_up": ("per_layer_projection",)},
    vectors={"input_norm": "post_per_layer_input_norm.weight", "layer_scale": "layer_scalar"},
    names={
        TOKENS: "per_layer_token_embd",
        PROJECTION: "per_layer_model_proj",
        NORM: "per_layer_proj_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale.weight",
    },
)
"""Of all layers."""
HALF = np.float32(0.5**0.5)


class LayerInputs(NamedTuple):
    """tokens: [V, L P].  projection: [L P, h].  norm: [P].  gate, up: of each layer.  out_norm: [L, h]."""

    tokens: Packed
    projection: Packed
    norm: np.ndarray
    gate: Packed
    up: Packed
    out_norm: np.ndarray

    @property
    def matrices(self) -> tuple[Packed, ...]:
        """Those that every row is multiplied with."""
        return self.projection, self.gate, self.up


def shapes(layers: int, hidden: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Of what lies outside of the layers. width: P.  vocabulary: tokens that have numbers.

    Example:
        >>> shapes(2, 8, 4, 16)["model.embed_tokens_per_layer.weight"]
        (16, 8)
    """
    return {
        f"{TOKENS}.weight": (vocabulary, layers * width),
        f"{PROJECTION}.weight": (layers * width, hidden),
        f"{NORM}.weight": (width,),
    }


def layer_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Of a layer."""
    return {
        "per_layer_input_gate.weight": (width, hidden),
        "per_layer_projection.weight": (hidden, width),
        "post_per_layer_input_norm.weight": (hidden,),
    }


def matrices(layers: int, tensors: Container[str]) -> dict[str, list[list[str]]]:
    """Field of `LayerInputs` -> tensors of its matrices; none where a model has none."""
    if f"{TOKENS}.weight" not in tensors:
        return {}
    names = {
        field: [[f"model.layers.{layer}.{module}.weight"] for layer in range(layers)]
        for field, (module,) in WEIGHTS.matrices.items()
    }
    return {"input_projection": [[f"{PROJECTION}.weight"]], **names}


class GatherInputs(NamedTuple):
    """inputs: [rows, L P].  projected: [rows, >= L P] W e."""

    rows: np.ndarray
    tokens: Packed
    projected: np.ndarray
    norm: np.ndarray
    epsilon: np.float32
    scale: np.float32
    inputs: np.ndarray


@unowned
def _gather_inputs(a, begin, end, thread):
    width = len(a.norm)
    growth = np.float32(np.sqrt(np.float32(width)))
    for t in range(begin, end):
        inputs = a.inputs[t]
        projected = a.projected[t, : len(inputs)]
        output_row(a.tokens, np.int64(0), a.rows[t].token, inputs)
        scale_row(projected, a.scale)
        for first in range(0, len(inputs), width):
            norm_part(projected, first, a.norm, a.epsilon)
        for i in range(len(inputs)):
            inputs[i] = (projected[i] + inputs[i] * growth) * HALF


@njit(cache=True)
def gather_inputs_code(arguments, address):
    return lasting_code(_gather_inputs, arguments, address)


class Admit(NamedTuple):
    """act = activation(gate) inputs of the layer, rounded for the product behind it. gated: [rows, >= 2 P] gate.  inputs: [rows, L P]."""

    step: np.ndarray
    inputs: np.ndarray
    width: int
    activation: int
    gated: np.ndarray
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _admit(a, begin, end, thread):
    first = a.step[0].index * a.width
    for t in range(begin, end):
        for i in range(a.width):
            a.gated[t, a.width + i] = a.inputs[t, first + i]
    gate(a.gated, a.width, a.activation, a.act, begin, end)
    quantize_rows(a.act, a.width, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def admit_code(arguments, address):
    return lasting_code(_admit, arguments, address)


class Scale(NamedTuple):
    """x *= factor of the layer.  factors: [L, 1]."""

    step: np.ndarray
    x: np.ndarray
    factors: np.ndarray


@unowned
def _scale(a, begin, end, thread):
    factor = a.factors[a.step[0].index, 0]
    for t in range(begin, end):
        scale_row(a.x[t], factor)


@njit(cache=True)
def scale_code(arguments, address):
    return lasting_code(_scale, arguments, address)


def input_parts(
    weights: LayerInputs, sizes: Sizes, work: Workspace, step: np.ndarray
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Before the first layer, and behind the feed-forward of each."""
    hidden = work.x.shape[1]
    width = len(weights.norm)
    inputs = aligned(CHUNK, len(weights.gate.segments) * width)
    projected = aligned(CHUNK, weights.projection.outputs)
    scale = np.float32(hidden**-0.5)
    gathered = GatherInputs(work.rows, weights.tokens, projected, weights.norm, sizes.epsilon, scale, inputs)
    gated = aligned(CHUNK, max(weights.gate.outputs, 2 * width))
    act = aligned(CHUNK, width)
    rounding = weights.up.rounding
    admitted = Admit(step, inputs, width, sizes.activation, gated, act, rounding, work.rounded)
    none = np.zeros((len(weights.out_norm), 0), np.float32)
    joined = Join(step, work.x, work.update, none, weights.out_norm, sizes.epsilon, ONE)
    before = (
        Part(rounding_code, Rounding(step, work.x, hidden, weights.projection.rounding, work.rounded)),
        product(step, work.x, weights.projection, projected, work),
        Part(gather_inputs_code, gathered, Work(grain=1)),
    )
    behind = (
        Part(rounding_code, Rounding(step, work.x, hidden, weights.gate.rounding, work.rounded)),
        product(step, work.x, weights.gate, gated, work),
        Part(admit_code, admitted),
        product(step, act, weights.up, work.update, work),
        Part(join_code, joined),
    )
    return before, behind
