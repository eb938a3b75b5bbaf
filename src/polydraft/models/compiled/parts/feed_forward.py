"""The gate of a feed-forward: activation(left) right, rounded for the product behind it."""

from typing import NamedTuple

import numpy as np

from polydraft.models.compiled.kernels import gate
from polydraft.models.compiled.program import lasting_code
from polydraft.models.compiled.rounding import quantize_rows
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit


class Gate(NamedTuple):
    """x: [rows, 2 I].  inner: I.  activation: of `kernels`."""

    x: np.ndarray
    inner: int
    activation: int
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _gate(a, begin, end, thread):
    gate(a.x, a.inner, a.activation, a.act, begin, end)
    quantize_rows(a.act, a.inner, a.rounding, a.rounded, begin, end)


@njit(cache=True)
def gate_code(arguments, address):
    return lasting_code(_gate, arguments, address)
