"""Dot products of bytes, and look-ups of bytes, by the instructions that the processor has; plain arithmetic of the same integers elsewhere."""

from llvmlite import ir

from polydraft.models.matrices.vectors import BYTE, FEATURES, INTS, LANES

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


def takes_signed_codes() -> bool:
    """Whether both factors of a dot product are signed, so that nothing is added to codes."""
    return DOTS_BYTES == "dotprod"


def sums_have_16_bits() -> bool:
    """Whether two products are summed in 16 bits."""
    return DOTS_BYTES in ("avx512bw", "avx2")


def dot(code, total, weights, x, bits):
    """total + products of four unsigned numbers of so many bits and four signed bytes a lane."""
    b = code.builder
    way = WAYS.get(DOTS_BYTES or "", ())
    if DOTS_BYTES in ("avx512vnni", "avxvnni"):
        return code.call(way[0], total, weights, x)
    if DOTS_BYTES == "dotprod":  # of signed bytes, four lanes each; see `_blocks` for where eight bits begin
        weights = b.xor(weights, code.ints(-0x7F7F7F80)) if bits == 8 else weights
        return code.by_quarters(lambda *parts: code.call(way[0], *parts), total, weights, x)
    if way:  # sums of two products have 16 bits: of seven bits and of the eighth, each fits
        ones = code.shorts(1)
        for part in (0x7F7F7F7F, -0x7F7F7F80) if bits == 8 else (-1,):
            some = code.as_bytes(b.and_(weights, code.ints(part)))
            pairs = code.call(way[0], some, code.as_bytes(x), result=ones.type)
            total = b.add(total, code.call(way[1], pairs, ones, result=INTS))
        return total
    for k in range(4):
        byte = b.and_(b.lshr(weights, code.ints(8 * k)), code.ints(255))
        total = b.add(total, b.mul(byte, b.ashr(b.shl(x, code.ints(24 - 8 * k)), code.ints(24))))
    return total


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
