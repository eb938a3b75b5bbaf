"""A mixture of experts in the place of a feed-forward, see `routing`: its router, the choice, the experts' products for all rows that chose
them, and what is summed of them; beside it perhaps an expert of all rows."""

from typing import NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import activate, gate
from polydraft.models.matrices.products import Packed
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.mixers.experts.routing import (
    Choices,
    Routing,
    choose,
    clamped_gate,
    combine,
    gather,
    group,
    multiply_experts,
)
from polydraft.models.mixers.program import lasting_code
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp


class Choose(NamedTuple):
    """bias, choice, factors: [M, E] or [M, 0], see `experts.choose`."""

    step: np.ndarray
    bias: np.ndarray
    choice: np.ndarray
    factors: np.ndarray
    routing: Routing
    choices: Choices


@unowned
def _choose(a, begin, end, thread):
    layer = a.step[0].index
    c = a.choices
    for t in range(begin, end):
        choose(
            c.logits[t],
            a.bias[layer],
            a.choice[layer],
            a.factors[layer],
            a.routing,
            c.eligible[t],
            c.experts[t],
            c.weights[t],
        )


@njit(cache=True)
def choose_code(arguments, address):
    return lasting_code(_choose, arguments, address)


class Group(NamedTuple):
    """One item: rows by expert. It counts the active ones."""

    step: np.ndarray
    choices: Choices


@unowned
def _group(a, begin, end, thread):
    step = a.step[0]
    step.counted = group(a.choices, step.rows)


@njit(cache=True)
def group_code(arguments, address):
    return lasting_code(_group, arguments, address)


class Gather(NamedTuple):
    """Rows to their places, as they are and rounded; what no product reads has no width."""

    x: np.ndarray
    rounded: np.ndarray
    choices: Choices
    gathered: np.ndarray
    gathered_rounded: np.ndarray


@unowned
def _gather(a, begin, end, thread):
    gather(a.x, a.choices, a.gathered, begin, end)
    gather(a.rounded, a.choices, a.gathered_rounded, begin, end)


@njit(cache=True)
def gather_code(arguments, address):
    return lasting_code(_gather, arguments, address)


class MultiplyExperts(NamedTuple):
    """y = x W^T of each place with its expert's matrix; items are panels of the active experts."""

    step: np.ndarray
    x: np.ndarray
    w: Packed
    experts: int
    rounded: np.ndarray
    y: np.ndarray
    choices: Choices


@unowned
def _multiply(a, begin, end, thread):
    multiply_experts(a.x, a.w, a.step[0].index * a.experts, a.rounded, a.y, a.choices, begin, end)


@njit(cache=True)
def multiply_code(arguments, address):
    return lasting_code(_multiply, arguments, address)


class Activate(NamedTuple):
    """Each place of some rows through the gate, or the activation alone, rounded for the product behind it.  x: [places, 2 I or I].  inner: I."""

    x: np.ndarray
    inner: int
    activation: int
    gated: bool
    choices: Choices
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _activate(a, begin, end, thread):
    for t in range(begin, end):
        for j in range(a.choices.places.shape[1]):
            place = a.choices.places[t, j]
            if a.gated:
                gate(a.x, a.inner, a.activation, a.act, place, place + 1)
            else:
                activate(a.x, a.inner, a.activation, a.x[place, :0], a.act, place, place + 1)
            quantize_rows(a.act, a.inner, a.rounding, a.rounded, place, place + 1)


@njit(cache=True)
def activate_code(arguments, address):
    return lasting_code(_activate, arguments, address)


class ClampedActivate(NamedTuple):
    """`Activate` with gpt-oss' gate.  bias: [M, E, 2 I]."""

    step: np.ndarray
    x: np.ndarray
    inner: int
    bias: np.ndarray
    limit: np.float32
    alpha: np.float32
    choices: Choices
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _clamped(a, begin, end, thread):
    bias = a.bias[a.step[0].index]
    c = a.choices
    for t in range(begin, end):
        for j in range(c.places.shape[1]):
            place = c.places[t, j]
            clamped_gate(a.x[place], a.inner, bias[c.experts[t, j]], a.limit, a.alpha, a.act[place])
            quantize_rows(a.act, a.inner, a.rounding, a.rounded, place, place + 1)


@njit(cache=True)
def clamped_code(arguments, address):
    return lasting_code(_clamped, arguments, address)


class Combine(NamedTuple):
    """out = sum of what a row's experts gave, by weight.  y: [places, >= h].  bias: [M, E, h or 0].

    x: [rows, h] what went into the layer.  shared: [rows, >= h or 0] what the expert of all rows gave.  shared_gate: [M, h or 0] its share is a sigmoid
    of the product with x, or 1.
    """

    step: np.ndarray
    y: np.ndarray
    bias: np.ndarray
    choices: Choices
    x: np.ndarray
    shared: np.ndarray
    shared_gate: np.ndarray
    width: int
    out: np.ndarray


@unowned
def _combine(a, begin, end, thread):
    layer = a.step[0].index
    weights = a.shared_gate[layer]
    for t in range(begin, end):
        out = a.out[t, : a.width]
        combine(a.y, a.bias[layer], a.choices, t, out)
        if a.shared.shape[1] > 0:
            share = np.float32(1.0)
            product = np.float32(0.0)
            if len(weights) > 0:
                for i in range(len(weights)):
                    product += weights[i] * a.x[t, i]
                share /= np.float32(1.0) + exp(-product)
            for i in range(len(out)):
                out[i] += share * a.shared[t, i]


@njit(cache=True)
def combine_code(arguments, address):
    return lasting_code(_combine, arguments, address)
