"""The noise of `polydraft.noise` inside Triton kernels: the same bits, draw for draw.

Launch kernels that use `clock` with `enable_fp_fusion=False`: a product that is fused with its sum is rounded once, and another number.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from polydraft import noise

STOP, EXTRA, RACE = (tl.constexpr(int(stream)) for stream in (noise.Stream.STOP, noise.Stream.EXTRA, noise.Stream.RACE))
_ONE, _ROOT, _MANTISSA = (tl.constexpr(x) for x in (noise._ONE, noise._SQRT_HALF, noise._MANTISSA))
_BELOW_ONE, _HIGH, _LOW = (tl.constexpr(x) for x in (noise._BELOW_ONE, noise._LN2_HIGH, noise._LN2_LOW))
_A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9 = (tl.constexpr(x) for x in noise._ATANH)


@triton.jit
def words(key, stream: tl.constexpr, index, ahead=0):
    """The high and the low word of draws of a stream. key: where seed, sample and position lie, one after the other.  ahead: of the position."""
    seed, sample, position = tl.load(key), tl.load(key + 1), tl.load(key + 2) + ahead
    block = (index // 2).to(tl.uint32)
    zero = block * 0
    counter = zero + position.to(tl.uint32), zero + stream, zero + sample.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, *counter)
    odd = index % 2 == 1
    return tl.where(odd, w2, w0).to(tl.uint64), tl.where(odd, w3, w1).to(tl.uint64)


@triton.jit
def uniform(key, stream: tl.constexpr, index):
    """`noise.uniforms`."""
    high, low = words(key, stream, index)
    return ((high << 21) | (low >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def clock(high, low):
    """`noise._clock`: the same operations in the same order."""
    k = (high << 20) | (low >> 12)
    u = (k | _ONE).to(tl.float64, bitcast=True) - _BELOW_ONE
    shifted = u.to(tl.uint64, bitcast=True) + (_ONE - _ROOT)
    exponent = ((shifted >> 52).to(tl.int32) - 1023).to(tl.float64)
    f = ((shifted & _MANTISSA) + _ROOT).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail = _A8 + z * _A9
    tail = _A7 + z * tail
    tail = _A6 + z * tail
    tail = _A5 + z * tail
    tail = _A4 + z * tail
    tail = _A3 + z * tail
    tail = _A2 + z * tail
    tail = _A1 + z * tail
    log_mantissa = f - s * (f - z * tail)
    return -(exponent * _HIGH) - (exponent * _LOW + log_mantissa)
