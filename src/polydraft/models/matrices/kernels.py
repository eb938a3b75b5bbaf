"""What a compiled forward pass does beside its products: normalisation, gates.

All sums of one row are made in an order that depends on that row alone. No function has a fast-math flag: flagged, its bits would
depend on what it is compiled into, and on whether it was compiled or loaded (see `polydraft.numerics.exponential`).
"""

import numpy as np

from polydraft.numerics.compile_time import inner
from polydraft.numerics.exponential import exp, fma

SILU, GELU, ERF_GELU, RELU2, XIELU = map(np.int64, range(5))
"""Activations of a feed-forward: x sigmoid(x), GELU in its tanh form and as it is, max(x, 0)^2, and xIELU, see `expanded`."""
_GELU_LINE = np.float32((8 / np.pi) ** 0.5)
_GELU_CUBE = np.float32(0.044715)
_ERF_SCALE = np.float32(0.3275911)
_ERF = tuple(map(np.float32, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)))
"""Of Abramowitz & Stegun's formula 7.1.26, which is off by 1.5e-7 at most."""
_HALF_ROOT = np.float32(0.5**0.5)


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
def centre_part(x: np.ndarray, begin: int, n: int) -> None:
    """Take the mean of x[begin : begin + n] from it, in place: four sums, that wait for one another less."""
    s0 = s1 = s2 = s3 = np.float32(0.0)
    end = begin + n // 4 * 4
    for i in range(begin, end, 4):
        s0 += x[i]
        s1 += x[i + 1]
        s2 += x[i + 2]
        s3 += x[i + 3]
    for i in range(end, begin + n):
        s0 += x[i]
    mean = ((s0 + s1) + (s2 + s3)) / np.float32(n)
    for i in range(begin, begin + n):
        x[i] -= mean


@inner
def layer_norm(
    x: np.ndarray,
    gain: np.ndarray,
    bias: np.ndarray,
    epsilon: np.float32,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """out[t] = gain (x[t] - mean(x[t])) / sqrt(var(x[t]) + epsilon) + bias (arXiv 1607.06450, equation 4). bias: may be empty."""
    n = len(gain)
    for t in range(begin, end):
        for i in range(n):
            out[t, i] = x[t, i]
        centre_part(out[t], np.int64(0), n)
        norm_part(out[t], np.int64(0), gain, epsilon)
        for i in range(len(bias)):
            out[t, i] += bias[i]


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
def activate(
    x: np.ndarray, n: int, activation: int, alphas: np.ndarray, out: np.ndarray, begin: int, end: int
) -> None:
    """out[t, i] = activation(x[t, i]). alphas: of xIELU, or empty."""
    for t in range(begin, end):
        if activation == SILU:
            for i in range(n):
                out[t, i] = x[t, i] / (np.float32(1.0) + exp(-x[t, i]))
        elif activation == GELU:
            for i in range(n):
                turn = _GELU_LINE * fma(_GELU_CUBE * x[t, i] * x[t, i], x[t, i], x[t, i])
                out[t, i] = x[t, i] / (np.float32(1.0) + exp(-turn))
        elif activation == ERF_GELU:
            for i in range(n):
                out[t, i] = _gaussian(x[t, i])
        elif activation == RELU2:
            for i in range(n):
                positive = max(x[t, i], np.float32(0.0))
                out[t, i] = positive * positive
        else:
            for i in range(n):
                out[t, i] = expanded(x[t, i], alphas[0], alphas[1], alphas[2])


@inner(error_model="numpy")
def _gaussian(x):
    """x times the distribution function of the normal distribution (arXiv 1606.08415, equation 1)."""
    z = abs(x) * _HALF_ROOT
    t = np.float32(1.0) / fma(_ERF_SCALE, z, np.float32(1.0))
    series = _ERF[4]
    series = fma(series, t, _ERF[3])
    series = fma(series, t, _ERF[2])
    series = fma(series, t, _ERF[1])
    series = fma(series, t, _ERF[0])
    tail = np.float32(0.5) * series * t * exp(-z * z)
    return x * (np.float32(1.0) - tail if x > np.float32(0.0) else tail)


@inner(error_model="numpy")
def expanded(x, positive, negative, beta):
    """xIELU (arXiv 2411.13010, section 4): positive x^2 + beta x, below 0 negative (e^x - 1 - x) + beta x. positive, negative: its alphas."""
    if x > np.float32(0.0):
        return fma(positive * x, x, beta * x)
    return negative * (exp(x) - np.float32(1.0) - x) + beta * x


@inner(error_model="numpy")
def gate(x: np.ndarray, n: int, activation: int, out: np.ndarray, begin: int, end: int) -> None:
    """out[t, i] = activation(x[t, i]) x[t, n + i]; GELU's tanh form (arXiv 1606.08415, section 2) is x sigmoid(2 z)."""
    for t in range(begin, end):
        if activation == SILU:
            for i in range(n):
                gated = x[t, i]
                out[t, i] = gated / (np.float32(1.0) + exp(-gated)) * x[t, n + i]
        elif activation == GELU:
            for i in range(n):
                gated = x[t, i]
                turn = _GELU_LINE * fma(_GELU_CUBE * gated * gated, gated, gated)
                out[t, i] = gated / (np.float32(1.0) + exp(-turn)) * x[t, n + i]
        else:
            activate(x, n, activation, x[t, :0], out, t, t + 1)
            for i in range(n):
                out[t, i] *= x[t, n + i]
