"""Dot products of bytes, and look-ups of bytes, by the instructions that the processor has; plain arithmetic of the same integers elsewhere."""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config

from polydraft.models.matrices.vectors import BFLOATS, BYTE, FEATURES, INTS, LANES

WAYS = {
    "avx512vnni": ("llvm.x86.avx512.vpdpbusd.512",),
    "avx512bw": ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    "avxvnni": ("llvm.x86.avx512.vpdpbusd.256",),
    "avx2": ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    "dotprod": ("llvm.aarch64.neon.sdot.v4i32.v16i8",),
}
"""What a processor has -> instructions that sum products of bytes."""
DOTS_BYTES = next((way for way in WAYS if FEATURES.get(way) and ("512" in way) == (LANES == 16)), None)

LOOK_UP = (
    "llvm.x86.avx512.pshuf.b.512"
    if FEATURES.get("avx512bw") and LANES == 16
    else "llvm.x86.avx2.pshuf.b"
    if FEATURES.get("avx2") and LANES == 8
    else None
)
"""The processor's look-up of bytes in a table of 16, where it has one."""


_CHOSEN: str | None = getattr(config, "CPU_NAME", None)
DOTS_HALVES = (
    LANES == 16
    and bool(FEATURES.get("avx512bf16"))
    and (_CHOSEN or llvm.get_host_cpu_name()).startswith("znver")
)
"""Whether dot products of bfloat16 pay: on a Zen 4 they multiply twice as many numbers as float32's in the same time; on a Sapphire Rapids, which has
a matrix unit for them, they take half as long again."""
MOST_PAIRS = 32767
"""The largest sum of 16 bits."""
MOST_SIGNED = 127
"""The largest size of a signed byte that is multiplied."""


def takes_signed_codes() -> bool:
    """Whether both factors of a dot product of codes of eight bits are signed, so that nothing is added to codes."""
    return DOTS_BYTES == "dotprod" or sums_have_16_bits()


def sums_have_16_bits() -> bool:
    """Whether two products are summed in 16 bits."""
    return DOTS_BYTES in ("avx512bw", "avx2")


def dot(code, total, weights, x, bits):
    """total + products of four unsigned numbers of so many bits and four signed bytes a lane; eight bits are 128 more than what is multiplied
    where codes are taken with their sign."""
    b = code.builder
    way = WAYS.get(DOTS_BYTES or "", ())
    if DOTS_BYTES in ("avx512vnni", "avxvnni"):
        return code.call(way[0], total, weights, x)
    if DOTS_BYTES == "dotprod":  # of signed bytes, four lanes each; see `_blocks` for where eight bits begin
        weights = b.xor(weights, code.ints(-0x7F7F7F80)) if bits == 8 else weights
        return code.by_quarters(lambda *parts: code.call(way[0], *parts), total, weights, x)
    if way:
        return _with_pairs(code, total, _pairs(code, weights, x, bits))
    for k in range(4):
        byte = b.and_(b.lshr(weights, code.ints(8 * k)), code.ints(255))
        total = b.add(total, b.mul(byte, b.ashr(b.shl(x, code.ints(24 - 8 * k)), code.ints(24))))
    return total


def dot_halves(code, total, weights, x):
    """total + products of two pairs of bfloat16 a lane, the second first; each is added with a rounding to float32."""
    return code.call(
        "llvm.x86.avx512bf16.dpbf16ps.512", total, *(code.builder.bitcast(v, BFLOATS) for v in (weights, x))
    )


def _pairs(code, weights, x, bits):
    """Sums of two products in 16 bits. Of eight bits the sign goes to the other factor: 128 127 + 128 127 fits, 255 127 + 255 127 does not."""
    b = code.builder
    kind = code.shorts(1).type
    x = code.as_bytes(x)
    if bits < 8:
        weights = code.as_bytes(weights)
    else:
        signed = code.as_bytes(b.xor(weights, code.ints(-0x7F7F7F80)))
        zero = ir.Constant(signed.type, None)
        x = (
            code.call("llvm.x86.avx2.psign.b", x, signed)
            if LANES == 8
            else b.select(b.icmp_signed("<", signed, zero), b.sub(zero, x), x)
        )
        weights = code.call(f"llvm.abs.v{4 * LANES}i8", signed, ir.Constant(ir.IntType(1), 0))
    return code.call(WAYS[DOTS_BYTES or ""][0], weights, x, result=kind)


def _with_pairs(code, total, pairs):
    """total + the sums of two, widened."""
    wide = code.call(WAYS[DOTS_BYTES or ""][1], pairs, code.shorts(1), result=INTS)
    return code.builder.add(total, wide)


class Products:
    """A sum of products, as `dot` adds them, over groups of inputs. Where two are summed in 16 bits, so are as many groups as fit there."""

    def __init__(self, code, start):
        self.code = code
        self.total = start
        self.pairs = None
        self.remaining = 0

    def add(self, weights, x, bits):
        """Four numbers of so many bits, and four signed bytes a lane."""
        if not sums_have_16_bits():
            self.total = dot(self.code, self.total, weights, x, bits)
            return
        pairs = _pairs(self.code, weights, x, bits)
        if self.remaining > 0:
            self.pairs = self.code.builder.add(self.pairs, pairs)
            self.remaining -= 1
            return
        self.total = self.result()
        self.pairs = pairs
        largest = 2 * MOST_SIGNED * (128 if bits == 8 else (1 << bits) - 1)
        self.remaining = MOST_PAIRS // largest - 1

    def result(self):
        """The sum so far."""
        return self.total if self.pairs is None else _with_pairs(self.code, self.total, self.pairs)


def looked_up(code, codes, table):
    """The byte of a table of 16 that each byte of the codes, below 16, stands for."""
    b = code.builder
    if LOOK_UP:
        entries = ir.Constant(ir.VectorType(BYTE, 4 * LANES), table * (LANES // 4))
        return b.bitcast(code.call(LOOK_UP, entries, code.as_bytes(codes)), INTS)
    numbers = code.as_bytes(codes)
    value = ir.Constant(numbers.type, [table[0]] * 4 * LANES)
    for k in range(1, 16):
        same = b.icmp_unsigned("==", numbers, ir.Constant(numbers.type, [k] * 4 * LANES))
        value = b.select(same, ir.Constant(numbers.type, [table[k]] * 4 * LANES), value)
    return b.bitcast(value, INTS)
