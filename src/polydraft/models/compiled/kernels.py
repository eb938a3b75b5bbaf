"""Compiled kernels for a few rows at a time: matrix product, normalisation, attention; portable, without a C compiler.

The matrix product is made of tiles written in LLVM's own language through numba: LLVM turns their fixed-width vectors into
AVX-512, AVX2 or NEON. Weights are packed into panels of `PANEL` output columns,

    packed[j, i, c] = W[j * PANEL + c, i]        (bfloat16: output c at place 2 c, c + LANES at 2 c + 1)

so that a pass reads every weight once from memory, front to back, for all its rows, and no sum over lanes is needed. Each
output is one chain of fused multiply-adds over i: a row's result has the same bits whatever other rows are in the pass.
All sums of one row are made in an order that depends on that row alone; attention is two such products, over cached
keys and values in panels, with `soften` between them. No function has a fast-math flag: flagged, its bits would depend on what
it is compiled into, and on whether it was compiled or loaded (see `polydraft.exponential`).
"""

import mmap
from contextlib import suppress

import llvmlite.binding
import numpy as np
import torch
from jaxtyping import Float
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from polydraft.exponential import exp, fma

__all__ = [
    "LANES",
    "PANEL",
    "add",
    "aligned",
    "instruction_set",
    "matmul",
    "norm_part",
    "pack",
    "product",
    "rms_norm",
    "soften",
    "swiglu",
]

_FEATURES = llvmlite.binding.get_host_cpu_features()
_WIDE = bool(_FEATURES.get("avx512f"))
LANES = 16 if _WIDE else 8
"""Floats in one vector."""
PANEL = 2 * LANES
"""Output columns that a tile computes at once."""
_UNROLL = 4
_HUGE = 2**21
_TOGETHER = 64
"""Panels that are packed at a time: what is rounded on the way then stays in the caches."""
_LINE, _AHEAD = 64, 4096
"""Bytes: weights are asked for a page before they are used, as the hardware's own look-ahead ends with each page."""
_ROWS = 11 if _WIDE else 6
"""Rows of a tile: with two vectors each they fill the registers. Twelve with AVX-512 spill, at half the speed."""


def instruction_set() -> str:
    """Which vectors the kernels run on, for reports.

    Example:
        >>> instruction_set() in ("AVX-512", "AVX2", "NEON", "baseline")
        True
    """
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    return next((name for feature, name in known.items() if _FEATURES.get(feature)), "baseline")


def aligned(*shape: int, dtype: type[np.generic] = np.float32, huge: bool = False) -> np.ndarray:
    """Zeros that begin on a cache line; the system hands out a page when it is first written.

    huge: in pages of two MiB where the system has them, for arrays that are read from end to end again and again: small pages
    would push everything else out of the table in which the processor finds pages.

    Example:
        >>> aligned(3, 5).ctypes.data % 64, aligned(1024, 1024, huge=True).ctypes.data % 64
        (0, 0)
    """
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge and advice is not None and 4 * size >= _HUGE:
        pages = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system built without them
            pages.madvise(advice)
        raw, start = np.frombuffer(pages, np.uint8), _HUGE
    else:
        raw, start = np.zeros(size + 64, np.uint8), 64
    start = -raw.ctypes.data % start
    return raw[start : start + size].view(dtype).reshape(shape)


def pack(weight: Float[Tensor, "O I"], out: np.ndarray) -> Float[np.ndarray, " P"]:
    """Write a weight matrix into panels; columns that fill up the last panel are zero.

    out: [panels, I, PANEL] in float32, uint16 (bfloat16) or int8.
    Returns one factor for each output, all panels: 1 but for int8, where a row's largest weight becomes 127.

    Example:
        >>> out = aligned(1, 2, PANEL)
        >>> factors = pack(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out)
        >>> out[0, :, :3].tolist(), factors[:2].tolist()
        ([[1.0, 3.0, 0.0], [2.0, 4.0, 0.0]], [1.0, 1.0])
    """
    factors = torch.ones(len(out) * PANEL)
    for begin in range(0, len(out), _TOGETHER):
        some = slice(begin * PANEL, (begin + _TOGETHER) * PANEL)
        _place(_stored(weight.detach()[some], out.dtype, factors[some]), out[begin : begin + _TOGETHER])
    return factors.numpy()


def _stored(weight: Float[Tensor, "O I"], dtype: np.dtype, factors: Float[Tensor, " P"]) -> Tensor:
    """Rows of a matrix in their number format, bfloat16 as int16; what int8 divides them by goes to `factors`."""
    if dtype == np.uint16:
        return (weight if weight.dtype == torch.bfloat16 else weight.float().bfloat16()).view(torch.int16)
    wide = weight.float()
    if dtype == np.float32:
        return wide
    factors[: len(wide)] = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide / factors[: len(wide), None]).round().to(torch.int8)


def _place(values: Tensor, out: np.ndarray) -> None:
    """One strided copy of rows [O, I] into panels. In bfloat16 one vector of 32-bit lanes holds both halves: its low and its high bits."""
    panels, inputs, _ = out.shape
    halves = 2 if out.dtype == np.uint16 else 1
    packed = torch.from_numpy(out.view(np.int16) if halves == 2 else out).view(panels, inputs, PANEL // halves, halves)
    full = len(values) // PANEL * PANEL
    if full < len(values):
        filled = torch.zeros(PANEL, inputs, dtype=values.dtype)
        filled[: len(values) - full] = values[full:]
        packed[-1:].copy_(filled.view(1, halves, PANEL // halves, inputs).permute(0, 3, 2, 1))
    packed[: full // PANEL].copy_(values[:full].reshape(-1, halves, PANEL // halves, inputs).permute(0, 3, 2, 1))


def _tile(rows: int):
    """y[yo + r ys + c] = sum_i x[xo + r xs + i] w[wo + i PANEL + c] for `rows` values of r, all c below PANEL, i below n.

    w: float32, bfloat16 as uint16, or int8; widened to float32 when it is loaded.
    """

    @intrinsic
    def tile(typingctx, x, xo, xs, w, wo, y, yo, ys, n):
        size = types.intp
        return types.void(x, size, size, w, size, y, size, size, size), emit

    def emit(context, builder, signature, args):
        x, xo, xs, w, wo, y, yo, ys, n = args
        builder.function.attributes.add("noinline")  # one copy of the tiles, not one for every product in a pass
        vector, lane = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)
        number = lambda i: ir.Constant(n.type, i)  # noqa: E731
        start = lambda i, array, offset: builder.gep(  # noqa: E731
            context.make_array(signature.args[i])(context, builder, array).data, [offset]
        )
        vector_at = lambda p, i: builder.bitcast(builder.gep(p, [i]), vector.as_pointer())  # noqa: E731
        x, w, y = start(0, x, xo), start(3, w, wo), start(5, y, yo)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")
        nothing, everywhere = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(lane, LANES), [0] * LANES)
        stored = signature.args[3].dtype.bitwidth
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        fetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0"
        )

        def widened(pointer):
            """PANEL weights as two vectors of float32."""
            wide = ir.VectorType(lane, LANES)
            if stored == 16:
                both = builder.load(builder.bitcast(pointer, wide.as_pointer()), align=2)
                low = builder.shl(both, ir.Constant(wide, [16] * LANES))
                high = builder.and_(both, ir.Constant(wide, [-(1 << 16)] * LANES))
                return [builder.bitcast(x, vector) for x in (low, high)]
            halves = [builder.gep(pointer, [number(half * LANES)]) for half in range(2)]
            if stored == 32:
                return [builder.load(builder.bitcast(p, vector.as_pointer()), align=4) for p in halves]
            narrow = ir.VectorType(ir.IntType(stored), LANES)
            raw = [builder.load(builder.bitcast(p, narrow.as_pointer()), align=1) for p in halves]
            return [builder.sitofp(builder.sext(x, wide), vector) for x in raw]

        sums = [[cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(2)] for _ in range(rows)]
        with cgutils.for_range_slice(builder, number(0), n, number(_UNROLL)) as (first, _):
            for step in range(_UNROLL):
                i = builder.add(first, number(step))
                weights = builder.gep(w, [builder.mul(i, number(PANEL))])
                for line in range(0, PANEL * stored // 8, _LINE):
                    ahead = builder.gep(builder.bitcast(weights, byte), [number(_AHEAD + line)])
                    builder.call(fetch, [ahead, *(ir.Constant(flag, x) for x in (0, 3, 1))])  # read, keep close, data
                halves = widened(weights)
                for r in range(rows):
                    value = builder.load(builder.gep(x, [builder.add(builder.mul(xs, number(r)), i)]))
                    spread = builder.insert_element(nothing, value, ir.Constant(lane, 0))
                    spread = builder.shuffle_vector(spread, nothing, everywhere)
                    for half in range(2):
                        total = builder.load(sums[r][half])
                        builder.store(builder.call(fma, [spread, halves[half], total]), sums[r][half])
        for r in range(rows):
            row = builder.gep(y, [builder.mul(ys, number(r))])
            for half in range(2):
                builder.store(builder.load(sums[r][half]), vector_at(row, number(half * LANES)), align=4)
        return context.get_dummy_value()

    return tile


_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11 = (_tile(min(rows, _ROWS)) for rows in range(1, 12))


@njit
def product(x, xo, xs, w, wo, stride, panels, n, y, yo, ys, rows):
    """y[r, j PANEL + c] = sum_i x[r, i] w[j, i, c] over i < n (a multiple of 4), every panel read once from memory.

    xo, wo, yo: where the first element lies in the flat array.  xs, ys: from row to row.  stride: from panel to panel.
    """
    groups = (rows + _ROWS - 1) // _ROWS
    for j in range(panels):
        wj, t = wo + j * stride, 0
        for g in range(groups):
            r = (rows - t + groups - g - 1) // (groups - g)
            xt, yt = xo + t * xs, yo + t * ys + j * PANEL
            if r == 1:
                _1(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 2:
                _2(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 3:
                _3(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 4:
                _4(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 5:
                _5(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 6:
                _6(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 7:
                _7(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 8:
                _8(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 9:
                _9(x, xt, xs, w, wj, y, yt, ys, n)
            elif r == 10:
                _10(x, xt, xs, w, wj, y, yt, ys, n)
            else:
                _11(x, xt, xs, w, wj, y, yt, ys, n)
            t += r


@njit
def matmul(x, w, factors, y, rows):
    """y[:rows] = x[:rows] @ W.T for packed W [P, I, PANEL]; x [*, >= I], y [*, >= P * PANEL]; I a multiple of 4.

    factors: [P * PANEL] of the outputs, or empty where they are all 1.
    """
    zero = np.int64(0)
    product(x, zero, x.shape[1], w, zero, w.shape[1] * PANEL, w.shape[0], w.shape[1], y, zero, y.shape[1], rows)
    for t in range(rows):
        for o in range(len(factors)):
            y[t, o] *= factors[o]


@njit(error_model="numpy")
def _inverse_norm(x, begin, n, epsilon):
    """1 / sqrt(mean(x^2) + epsilon) of x[begin : begin + n]: eight sums, that wait for one another less, of fused terms."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0.0)
    end = begin + n // 8 * 8
    for i in range(begin, end, 8):
        s0, s1 = fma(x[i], x[i], s0), fma(x[i + 1], x[i + 1], s1)
        s2, s3 = fma(x[i + 2], x[i + 2], s2), fma(x[i + 3], x[i + 3], s3)
        s4, s5 = fma(x[i + 4], x[i + 4], s4), fma(x[i + 5], x[i + 5], s5)
        s6, s7 = fma(x[i + 6], x[i + 6], s6), fma(x[i + 7], x[i + 7], s7)
    for i in range(end, begin + n):
        s0 = fma(x[i], x[i], s0)
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    return np.float32(1.0) / np.sqrt(total / np.float32(n) + epsilon)


@njit
def rms_norm(x: np.ndarray, gain: np.ndarray, epsilon: np.float32, out: np.ndarray, rows: int) -> None:
    """out[t] = gain x[t] / sqrt(mean(x[t]^2) + epsilon)."""
    n = len(gain)
    for t in range(rows):
        scale = _inverse_norm(x[t], 0, n, epsilon)
        for i in range(n):
            out[t, i] = x[t, i] * scale * gain[i]


@njit
def norm_part(x: np.ndarray, begin: int, gain: np.ndarray, epsilon: np.float32) -> None:
    """`rms_norm` of x[begin : begin + len(gain)], in place."""
    scale = _inverse_norm(x, begin, len(gain), epsilon)
    for i in range(len(gain)):
        x[begin + i] *= scale * gain[i]


@njit
def add(x: np.ndarray, y: np.ndarray, rows: int) -> None:
    """x[t] += y[t]; rows of y may be longer."""
    for t in range(rows):
        for i in range(x.shape[1]):
            x[t, i] += y[t, i]


@njit(error_model="numpy")
def swiglu(x: np.ndarray, n: int, out: np.ndarray, rows: int) -> None:
    """out[t, i] = silu(x[t, i]) x[t, n + i]."""
    for t in range(rows):
        for i in range(n):
            gate = x[t, i]
            out[t, i] = gate / (np.float32(1.0) + exp(-gate)) * x[t, n + i]


@njit(error_model="numpy")
def soften(scores, base, seen, count, end, lanes, found):
    """Scores of one query over columns -> weights, not yet divided by their sum, which is returned; 0 where it does not look.

    It looks at columns 0 .. base-1 and at seen[:count], which lie between base and end; end is the row's last column plus 1.
    Each weight is added in the lane of its position, so that the sum does not depend on which column a token lies in.
    lanes: [16] and found: [>= count], both for scratch.
    """
    top, whole = np.float32(-np.inf), base // 16 * 16
    for k in range(16):
        lanes[k] = top
    for c in range(0, whole, 16):
        for k in range(16):
            lanes[k] = scores[c + k] if scores[c + k] > lanes[k] else lanes[k]
    for c in range(whole, base):
        top = scores[c] if scores[c] > top else top
    for k in range(16):
        top = lanes[k] if lanes[k] > top else top
    for j in range(count):
        found[j] = scores[seen[j]]
        top = found[j] if found[j] > top else top
    for c in range(base):
        scores[c] = exp(scores[c] - top)
    for c in range(base, end):
        scores[c] = np.float32(0.0)
    for k in range(16):
        lanes[k] = np.float32(0.0)
    for c in range(0, whole, 16):
        for k in range(16):
            lanes[k] += scores[c + k]
    for c in range(whole, base):
        lanes[c - whole] += scores[c]
    for j in range(count):
        weight = exp(found[j] - top)
        scores[seen[j]] = weight
        lanes[(base + j) & 15] += weight
    total = np.float32(0.0)
    for k in range(16):
        total += lanes[k]
    return total
