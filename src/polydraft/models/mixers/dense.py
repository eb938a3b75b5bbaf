"""Products with weights, and what stands between two of them: norms, and rounding as the next product takes it."""

from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import add, copy_row, layer_norm, norm_part, rms_norm
from polydraft.models.matrices.products import Packed, matmul, matmul_to, rounding_of
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.mixers.program import lasting_code
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit


class Product(NamedTuple):
    """y = x W^T, panels of W.  rounded: x as `quantize_rows` left it."""

    step: np.ndarray
    x: np.ndarray
    w: Packed
    rounded: np.ndarray
    y: np.ndarray


@unowned
def _product(a, begin, end, thread):
    step = a.step[0]
    matmul(a.x, a.w, step.index, a.rounded, a.y, begin, end, step.rows, step.of_prompt != 0)


@njit(cache=True)
def product_code(arguments, address):
    return lasting_code(_product, arguments, address)


class Head(NamedTuple):
    """logits = x W^T, panels of W; they go to the step's address.  outputs: of W."""

    step: np.ndarray
    x: np.ndarray
    w: Packed
    rounded: np.ndarray
    outputs: int


@unowned
def _head(a, begin, end, thread):
    step = a.step[0]
    matmul_to(a.x, a.w, np.int64(0), a.rounded, step.logits, 4 * a.outputs, begin, end, step.rows, False)


@njit(cache=True)
def head_code(arguments, address):
    return lasting_code(_head, arguments, address)


class Norm(NamedTuple):
    """normed = norm(x), rounded for the product behind it.

    gain, bias: [layers, h] or [layers, 0]; without a gain x stays as it is.  centred: whether the norm takes the mean away.
    """

    step: np.ndarray
    x: np.ndarray
    gain: np.ndarray
    epsilon: np.float32
    normed: np.ndarray
    rounding: int
    rounded: np.ndarray
    bias: np.ndarray = np.zeros((1, 0), np.float32)
    centred: bool = False


@unowned
def _norm(a, begin, end, thread):
    layer = a.step[0].index
    if a.gain.shape[1] == 0:
        for t in range(begin, end):
            copy_row(a.x[t], a.normed[t])
    elif a.centred:
        layer_norm(a.x, a.gain[layer], a.bias[layer], a.epsilon, a.normed, begin, end)
    else:
        rms_norm(a.x, a.gain[layer], a.epsilon, a.normed, begin, end)
    quantize_rows(a.normed, a.x.shape[1], rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def norm_code(arguments, address):
    return lasting_code(_norm, arguments, address)


class Rounding(NamedTuple):
    """Writes x, of a width, rounded for the product behind it."""

    step: np.ndarray
    x: np.ndarray
    width: int
    rounding: int
    rounded: np.ndarray


@unowned
def _rounding(a, begin, end, thread):
    quantize_rows(a.x, a.width, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def rounding_code(arguments, address):
    return lasting_code(_rounding, arguments, address)


class Join(NamedTuple):
    """x += scale (update + bias), normalised where the layer has a norm for it.  bias, gain: [layers, h] or [layers, 0]."""

    step: np.ndarray
    x: np.ndarray
    update: np.ndarray
    bias: np.ndarray
    gain: np.ndarray
    epsilon: np.float32
    scale: np.float32


@unowned
def _join(a, begin, end, thread):
    bias = a.bias[a.step[0].index]
    gain = a.gain[a.step[0].index]
    for t in range(begin, end):
        for i in range(len(bias)):
            a.update[t, i] += bias[i]
    for t in range(begin, end if len(gain) > 0 else begin):
        norm_part(a.update[t], np.int64(0), gain, a.epsilon)
    add(a.x, a.update, a.scale, begin, end)


@njit(cache=True)
def join_code(arguments, address):
    return lasting_code(_join, arguments, address)


class Bias(NamedTuple):
    """y += bias, of the layers that have the product.  bias: [layers, outputs]."""

    step: np.ndarray
    y: np.ndarray
    bias: np.ndarray


@unowned
def _bias(a, begin, end, thread):
    bias = a.bias[a.step[0].index]
    for t in range(begin, end):
        for i in range(len(bias)):
            a.y[t, i] += bias[i]


@njit(cache=True)
def bias_code(arguments, address):
    return lasting_code(_bias, arguments, address)


class Add(NamedTuple):
    """y += x, or y = x where it replaces."""

    x: np.ndarray
    y: np.ndarray
    replaces: bool


@unowned
def _add(a, begin, end, thread):
    for t in range(begin, end):
        for i in range(a.x.shape[1]):
            a.y[t, i] = a.x[t, i] if a.replaces else a.y[t, i] + a.x[t, i]


@njit(cache=True)
def add_code(arguments, address):
    return lasting_code(_add, arguments, address)
