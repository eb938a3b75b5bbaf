"""What a compiled forward pass does beside its products: normalisation, gates.

All sums of one row are made in an order that depends on that row alone. No function has a fast-math flag: flagged, its bits would
depend on what it is compiled into, and on whether it was compiled or loaded (see `polydraft.numerics.exponential`).
"""

import numpy as np

from polydraft.numerics.compile_time import inner
from polydraft.numerics.exponential import exp, fma

SILU, GELU = map(np.int64, range(2))
"""Activations of a gated feed-forward: x sigmoid(x), and the tanh form of GELU."""
_GELU_LINE = np.float32((8 / np.pi) ** 0.5)
_GELU_CUBE = np.float32(0.044715)


@inner
def bfloat16_bits(bits):
    """Bits of a float32 -> those of the nearest bfloat16, halves to even."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@inner(error_model="numpy")
def inverse_norm(x, begin, n, epsilon):
    """1 / sqrt(mean(x^2) + epsilon) of x[begin : begin + n]: eight sums, that wait for one another less, of fused terms."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
    end = begin + n // 8 * 8
    for i in range(begin, end, 8):
        s0 = fma(x[i], x[i], s0)
        s1 = fma(x[i + 1], x[i + 1], s1)
        s2 = fma(x[i + 2], x[i + 2], s2)
        s3 = fma(x[i + 3], x[i + 3], s3)
        s4 = fma(x[i + 4], x[i + 4], s4)
        s5 = fma(x[i + 5], x[i + 5], s5)
        s6 = fma(x[i + 6], x[i + 6], s6)
        s7 = fma(x[i + 7], x[i + 7], s7)
    for i in range(end, begin + n):
        s0 = fma(x[i], x[i], s0)
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    return np.float32(1.0) / np.sqrt(total / np.float32(n) + epsilon)


@inner
def rms_norm(
    x: np.ndarray, gain: np.ndarray, epsilon: np.float32, out: np.ndarray, begin: int, end: int
) -> None:
    """out[t] = gain x[t] / sqrt(mean(x[t]^2) + epsilon)."""
    n = len(gain)
    for t in range(begin, end):
        scale = inverse_norm(x[t], np.int64(0), n, epsilon)
        for i in range(n):
            out[t, i] = x[t, i] * scale * gain[i]


@inner
def norm_part(x: np.ndarray, begin: int, gain: np.ndarray, epsilon: np.float32) -> None:
    """`rms_norm` of x[begin : begin + len(gain)], in place."""
    scale = inverse_norm(x, begin, len(gain), epsilon)
    for i in range(len(gain)):
        x[begin + i] *= scale * gain[i]


@inner
def copy_row(source: np.ndarray, target: np.ndarray) -> None:
    """target = the first numbers of source. Where numba assigns arrays it compiles the text of an error, too, for seconds."""
    for i in range(len(target)):
        target[i] = source[i]


@inner
def add(x: np.ndarray, y: np.ndarray, scale: np.float32, begin: int, end: int) -> None:
    """x[t] += scale y[t]; rows of y may be longer."""
    for t in range(begin, end):
        for i in range(x.shape[1]):
            x[t, i] += scale * y[t, i]


@inner
def scale_row(x: np.ndarray, scale: np.float32) -> None:
    """x *= scale."""
    if scale != np.float32(1.0):
        for i in range(len(x)):
            x[i] *= scale


@inner(error_model="numpy")
def cap(x: np.ndarray, begin: int, end: int, most: np.float32) -> None:
    """x[begin : end] = most tanh(x / most): Gemma 2's soft caps (arXiv 2408.00118, section 2)."""
    for i in range(begin, end):
        x[i] = most - most * np.float32(2.0) / (np.float32(1.0) + exp(np.float32(2.0) * x[i] / most))


@inner(error_model="numpy")
def gate(x: np.ndarray, n: int, activation: int, out: np.ndarray, begin: int, end: int) -> None:
    """out[t, i] = activation(x[t, i]) x[t, n + i]; GELU's tanh form (arXiv 1606.08415, section 2) is x sigmoid(2 z)."""
    for t in range(begin, end):
        if activation == SILU:
            for i in range(n):
                gated = x[t, i]
                out[t, i] = gated / (np.float32(1.0) + exp(-gated)) * x[t, n + i]
        else:
            for i in range(n):
                gated = x[t, i]
                turn = _GELU_LINE * fma(_GELU_CUBE * gated * gated, gated, gated)
                out[t, i] = gated / (np.float32(1.0) + exp(-turn)) * x[t, n + i]
