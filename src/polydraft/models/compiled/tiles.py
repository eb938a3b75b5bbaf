"""Tiles of a matrix product in LLVM's own language, emitted through numba: a panel of outputs for a few rows.

LLVM turns fixed-width vectors into AVX-512, AVX2 or NEON; dot-product instructions are called by name where the processor has
them. Without them the same integers come out of plain multiplications. Each output is one chain of operations over the inputs:
a row's result has the same bits whatever other rows are in the pass.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from polydraft.models.compiled.formats import BLOCK
from polydraft.models.compiled.vectors import BYTE, FEATURES, FLOAT, FLOATS, INT, INTS, LANES, PANEL, VectorCode

__all__ = ["ROWS", "tile", "tile_of"]

ROWS = 11 if LANES == 16 else 6
"""Rows of a tile: with two vectors each they fill the registers. Twelve with AVX-512 spill, at half the speed."""
UNROLL = 4
"""Inputs that a loop's body takes; the number of inputs is a multiple of it."""
LINE, AHEAD = 64, 16384
"""Bytes: how far ahead weights are asked for where arithmetic takes most of the time. Where memory does, the processor's own
look-ahead is better: asking costs a third of the bandwidth with one row, and saves half of the time with eight."""
BYTES_PER_CYCLE = 9
"""What memory delivers about: tiles that use up weights more slowly ask for them. Measured on a Zen 4 with 28 GB/s."""

HALVES = ir.VectorType(ir.HalfType(), LANES)
DOTS_BFLOATS = bool(LANES == 16 and FEATURES.get("avx512bf16"))
WAYS = {
    "avx512vnni": ("llvm.x86.avx512.vpdpbusd.512",),
    "avx512bw": ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    "avxvnni": ("llvm.x86.avx512.vpdpbusd.256",),
    "avx2": ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    "dotprod": ("llvm.aarch64.neon.sdot.v4i32.v16i8",),
}
"""What a processor has -> instructions that sum products of bytes."""
DOTS_BYTES = next((way for way in WAYS if FEATURES.get(way) and ("512" in way) == (LANES == 16)), None)


class Code(VectorCode):
    """What tiles are written with."""

    def __init__(self, builder, rows, n):
        super().__init__(builder, n.type)
        self.rows = range(rows)

    def prefetch(self, pointer, size, cycles):
        """Ask for weights that will be needed, if these take so many cycles for each row that there is time."""
        if size > BYTES_PER_CYCLE * cycles * len(self.rows):
            return
        for line in range(0, size, LINE):
            flags = (ir.Constant(INT, x) for x in (0, 2, 1))  # read, to the second cache, data
            self.call("llvm.prefetch.p0", self.at(pointer, AHEAD + line), *flags, result=ir.VoidType())

    def sums(self, count):
        return [[cgutils.alloca_once_value(self.builder, self.floats(0)) for _ in range(count)] for _ in self.rows]

    def spread_at(self, pointer, kind):
        return self.spread(self.load(pointer, kind))

    def add(self, total, a, b):
        self.builder.store(self.fma(a, b, self.builder.load(total)), total)


def _numbers(code, x, w, n, stored):
    """Float32 activations, weights of 32 or 16 bits: widened to float32 when they are loaded."""
    sums, size = code.sums(2), PANEL * stored // 8
    with code.loop(n, UNROLL) as (first, _):
        weights = code.at(w, first, size)
        for step in range(0, UNROLL, 2):
            here = code.at(weights, step * size)
            code.prefetch(here, 2 * size, 4)
            if stored == 32:
                wide = [code.load(code.at(here, part * size // 2), FLOATS) for part in range(4)]
                pairs = [wide[:2], wide[2:]]
            else:  # two inputs of an output lie side by side
                both = [_widened(code, code.load(code.at(here, part * size), INTS)) for part in range(2)]
                pairs = list(zip(*both, strict=True))
            for odd, halves in enumerate(pairs):
                for r in code.rows:
                    value = code.spread_at(code.at(code.at(x[r], first, 4), 4 * (step + odd)), FLOAT)
                    for half in range(2):
                        code.add(sums[r][half], value, halves[half])
    return sums


def _bfloats(code, x, w, n):
    """Bfloat16 activations and weights, two products a lane and an instruction."""
    sums, size = code.sums(2), PANEL * 4
    with code.loop(n, UNROLL) as (first, _):
        weights = code.at(w, first, size // 2)
        for step in range(0, UNROLL, 2):
            here = code.at(weights, step * size // 2)
            code.prefetch(here, size, 2)
            both = [code.load(code.at(here, part * size // 2), INTS) for part in range(2)]
            for r in code.rows:
                value = code.spread_at(code.at(code.at(x[r], first, 2), 2 * step), INT)
                for half in range(2):
                    if DOTS_BFLOATS:
                        total = code.builder.load(sums[r][half])
                        found = code.call("llvm.x86.avx512bf16.dpbf16ps.512", total, both[half], value)
                        code.builder.store(found, sums[r][half])
                    else:
                        for one, other in zip(_widened(code, value), _widened(code, both[half]), strict=True):
                            code.add(sums[r][half], one, other)
    return sums


def _widened(code, pairs):
    """The first and the second bfloat16 of each pair, as float32."""
    b = code.builder
    return [b.bitcast(v, FLOATS) for v in (b.shl(pairs, code.ints(16)), b.and_(pairs, code.ints(-(1 << 16))))]


def _dot(code, total, weights, x, bits):
    """total + products of four unsigned numbers of so many bits and four signed bytes a lane."""
    b, way = code.builder, WAYS.get(DOTS_BYTES or "", ())
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


def _kind(weight):
    """Bits of a code, and whether blocks have a least weight beside their scale."""
    return 8 * weight.typeof("codes").nitems // (BLOCK * LANES), "least" in weight.fields


def _codes(code, here, bits):
    """The codes of a block: (group of four inputs, vector of four bytes a lane)."""
    for v in range(bits):
        raw = code.load(code.at(here, v * 4 * LANES), INTS)
        if bits == 8:
            yield v, raw
        else:
            low = code.ints(0x0F0F0F0F)
            yield v, code.builder.and_(raw, low)
            yield v + 4, code.builder.and_(code.builder.lshr(raw, code.ints(4)), low)


def _blocks(code, x, w, n, weight, activation):
    """Blocks of integers with a scale: products within a block are summed as integers, which is exact."""
    b, sums = code.builder, code.sums(1)
    where = {name: activation.offset(name) for name in activation.fields}
    bits, least = _kind(weight)
    with code.loop(n, 1) as (block, _):
        here = code.at(w, block, weight.size)
        code.prefetch(here, weight.size, 10)
        there = [code.at(row, block, activation.size) for row in x]
        scale = b.fpext(code.load(code.at(here, weight.offset("scale")), HALVES), FLOATS)
        if least or (bits == 8 and DOTS_BYTES == "dotprod"):  # whose codes are signed
            totals = [code.ints(0) for _ in code.rows]
        else:
            totals = [code.spread_at(code.at(row, where[f"minus_{1 << (bits - 1)}"]), INT) for row in there]
        for group, codes in _codes(code, code.at(here, weight.offset("codes")), bits):
            for r in code.rows:
                value = code.spread_at(code.at(there[r], where["codes"] + 4 * group), INT)
                totals[r] = _dot(code, totals[r], codes, value, bits)
        for r in code.rows:
            factor = code.spread_at(code.at(there[r], where["scale"]), FLOAT)
            code.add(sums[r][0], b.fmul(b.sitofp(totals[r], FLOATS), factor), scale)
        if least:
            bottom = b.fpext(code.load(code.at(here, weight.offset("least")), HALVES), FLOATS)
            for r in code.rows:
                code.add(sums[r][0], code.spread_at(code.at(there[r], where["sum"]), FLOAT), bottom)
    return sums


def _exact_blocks(code, x, w, n, weight):
    """Blocks of integers with a scale, times float32 activations; two chains an output, so that one row waits less.

    A code is taken where it stands in its word, as a multiple of a power of two that its scale is divided by: no rounding is added.
    """
    b, sums = code.builder, code.sums(2)
    bits, least = _kind(weight)
    most, places = (1 << bits) - 1, (0, 8, 16, 24)
    with code.loop(n, 1) as (block, _):
        here = code.at(w, block, weight.size)
        code.prefetch(here, weight.size, BLOCK)
        there = [code.at(row, block, 4 * BLOCK) for row in x]
        scale = b.fpext(code.load(code.at(here, weight.offset("scale")), HALVES), FLOATS)
        if least:
            bottom = b.fpext(code.load(code.at(here, weight.offset("least")), HALVES), FLOATS)
        else:
            bottom = b.fmul(scale, code.floats(-(1 << (bits - 1))))
        scales = [b.fmul(scale, code.floats(2.0**-place)) for place in places]
        with code.loop(code.number(bits), 1) as (group, _):
            codes = code.load(code.at(code.at(here, weight.offset("codes")), group, 4 * LANES), INTS)
            inputs = [code.at(row, group, 16) for row in there]
            for half in range(8 // bits):
                shifted = b.lshr(codes, code.ints(4)) if half else codes
                for k, place in enumerate(places):
                    number = b.uitofp(b.and_(shifted, code.ints(most << place)), FLOATS)
                    value = code.fma(number, scales[k], bottom)
                    for r in code.rows:
                        code.add(sums[r][k % 2], code.spread_at(code.at(inputs[r], 64 * half + 4 * k), FLOAT), value)
    for even, odd in sums:
        b.store(b.fadd(b.load(even), b.load(odd)), even)
    return [[even] for even, _ in sums]


def tile_of(rows):
    """y[r, c] = sum_i x[r, i] w[i, c] for so many rows, all c of a panel, i below n: numbers, or blocks where w is of blocks.

    x, w, y: addresses of the first row, the panel and the first result.  xs, ys: bytes from row to row.  stored, taken: dtypes of w
    and x, see `formats`.
    """

    @intrinsic
    def tile(typingctx, x, xs, w, y, ys, n, stored, taken):
        size = types.int64
        return types.void(size, size, size, size, size, size, stored, taken), emit

    def emit(context, builder, signature, args):
        x, xs, w, y, ys, n = args[:6]
        stored, taken = (kind.dtype for kind in signature.args[6:])
        builder.function.attributes.add("noinline")  # one copy of a tile
        code = Code(builder, rows, n)
        x, w, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, y))
        each = [code.at(x, builder.mul(xs, code.number(r))) for r in code.rows]
        if isinstance(stored, types.Record):
            exact = taken == types.float32
            sums = _exact_blocks(code, each, w, n, stored) if exact else _blocks(code, each, w, n, stored, taken)
        elif taken == types.float32:
            sums = _numbers(code, each, w, n, stored.bitwidth)
        else:
            sums = _bfloats(code, each, w, n)
        for r in code.rows:
            row = code.at(y, builder.mul(ys, code.number(r)))
            for part, total in enumerate(sums[r]):
                code.store(builder.load(total), code.at(row, part * LANES * 4))
        return context.get_dummy_value()

    return tile


tile = tuple(tile_of(min(rows, ROWS)) for rows in range(1, 12))
