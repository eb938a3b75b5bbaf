"""Tiles of a matrix product in LLVM's own language, emitted through numba: a panel of outputs for a few rows.

LLVM turns fixed-width vectors into AVX-512, AVX2 or NEON; dot-product instructions are called by name where the processor has
them. Without them the same integers come out of plain multiplications. Each output is one chain of operations over the inputs:
a row's result has the same bits whatever other rows are in the pass.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from polydraft.models.compiled.formats import BLOCK, BLOCKS, format_name
from polydraft.models.compiled.vectors import (
    BYTE,
    FEATURES,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    PANEL,
    WHOLE,
    WHOLE_BITS,
    VectorCode,
)

__all__ = [
    "BLOCK_SIZES",
    "FEW_SIZES",
    "MANY",
    "SIZES",
    "UNROLL",
    "Code",
    "adding_tile",
    "block_tile",
    "cache_tile",
    "dot",
    "number_tile",
    "run_tile",
    "tile_of",
    "weights_of_output",
]

UNROLL = 4
"""Inputs that a loop's body takes; the number of inputs is a multiple of it."""
LINE, AHEAD = 64, 16384
"""Bytes: how far ahead weights are prefetched. Blocks always are: one row of Q4_K then reads 40 GB/s instead of 22 on a Zen 5."""
BYTES_PER_CYCLE = 9
"""What memory delivers about: tiles of numbers that use up weights more slowly prefetch them. Where they do not, the processor's own
look-ahead is better: with one row prefetching costs a third of the bandwidth, with eight it saves half of the time (Zen 4, 28 GB/s)."""

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

LOOK_UP = (
    "llvm.x86.avx512.pshuf.b.512"
    if FEATURES.get("avx512bw") and LANES == 16
    else "llvm.x86.avx2.pshuf.b"
    if FEATURES.get("avx2") and LANES == 8
    else None
)
"""The processor's look-up of bytes in a table of 16, where it has one."""


class Code(VectorCode):
    """What tiles are written with."""

    starts: list[Any] | None = None
    """Where each row's sums begin, if not at zero."""

    def __init__(self, builder, rows, n):
        super().__init__(builder, n.type)
        self.rows = range(rows)

    def prefetch_numbers(self, pointer, size, cycles):
        """Prefetch weights if these take so many cycles for each row that there is time."""
        if size <= BYTES_PER_CYCLE * cycles * len(self.rows):
            self.prefetch(pointer, size)

    def hidden(self, value):
        """The same, of which the compiler knows nothing."""
        return self.builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)

    def rolled_loop(self, count):
        """A loop over 0 .. count-1 that is not unrolled: the compiler does not see how long it is."""
        return cgutils.for_range_slice(self.builder, self.number(0), self.hidden(self.number(count)), self.number(1))

    def entry(self, table, index):
        """An entry of a table of integers."""
        if len(set(table)) == 1:
            return self.number(table[0])
        kind = ir.ArrayType(self.index, len(table))
        name = self.builder.module.get_unique_name("places")
        constant = cgutils.global_constant(self.builder, name, ir.Constant(kind, table))
        return self.builder.load(self.builder.gep(constant, [self.number(0), index]))

    def prefetch(self, pointer, size):
        """Prefetch weights AHEAD of a pointer."""
        for line in range(0, size, LINE):
            flags = (ir.Constant(INT, x) for x in (0, 2, 1))  # read, to the second cache, data
            self.call("llvm.prefetch.p0", self.at(pointer, AHEAD + line), *flags, result=ir.VoidType())

    def sums(self, count):
        return [[cgutils.alloca_once_value(self.builder, self._start(r, part)) for part in range(count)] for r in self.rows]

    def _start(self, row, part):
        return self.floats(0) if self.starts is None else self.load(self.at(self.starts[row], part * LANES * 4), FLOATS)

    def spread_at(self, pointer, kind):
        return self.spread(self.load(pointer, kind))

    def looked_up(self, codes, table):
        """The byte of a table of 16 that each byte of the codes, below 16, stands for."""
        if LOOK_UP:
            entries = ir.Constant(ir.VectorType(BYTE, 4 * LANES), table * (LANES // 4))
            return self.builder.bitcast(self.call(LOOK_UP, entries, self.as_bytes(codes)), INTS)
        b, numbers = self.builder, self.as_bytes(codes)
        value = ir.Constant(numbers.type, [table[0]] * 4 * LANES)
        for k in range(1, 16):
            same = b.icmp_unsigned("==", numbers, ir.Constant(numbers.type, [k] * 4 * LANES))
            value = b.select(same, ir.Constant(numbers.type, [table[k]] * 4 * LANES), value)
        return b.bitcast(value, INTS)

    def add(self, total, a, b):
        self.builder.store(self.fma(a, b, self.builder.load(total)), total)


def _numbers(code, x, w, n, stored):
    """Float32 activations, weights of 32 or 16 bits: widened to float32 when they are loaded."""
    sums, size = code.sums(2), PANEL * stored // 8
    with code.loop(n, UNROLL) as (first, _):
        weights = code.at(w, first, size)
        for step in range(0, UNROLL, 2):
            here = code.at(weights, step * size)
            code.prefetch_numbers(here, 2 * size, 4)
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
            code.prefetch_numbers(here, size, 2)
            both = [code.load(code.at(here, part * size // 2), INTS) for part in range(2)]
            for r in code.rows:
                value = code.spread_at(code.at(code.at(x[r], first, 2), 2 * step), INT)
                for half in range(2):
                    if DOTS_BFLOATS:
                        total = code.builder.load(sums[r][half])
                        product = code.call("llvm.x86.avx512bf16.dpbf16ps.512", total, both[half], value)
                        code.builder.store(product, sums[r][half])
                    else:
                        for weight_half, value_half in zip(_widened(code, value), _widened(code, both[half]), strict=True):
                            code.add(sums[r][half], weight_half, value_half)
    return sums


def _widened(code, pairs):
    """The first and the second bfloat16 of each pair, as float32."""
    b = code.builder
    return [b.bitcast(v, FLOATS) for v in (b.shl(pairs, code.ints(16)), b.and_(pairs, code.ints(-(1 << 16))))]


def dot(code, total, weights, x, bits):
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


class _Block:
    """A block of LANES outputs as code reads it, and one of its periods: where the places of codes, scales and activations begin.

    here: its address.  d, least: numbers of the block, in float32.
    """

    def __init__(self, code, stored, address):
        self.code, self.stored = code, stored
        self.format = BLOCKS[format_name(as_dtype(stored))]
        self.here = address
        self.d = self.powers("exponent") if self.format.exponent else self.halves("d")
        self.least = self.halves("m" if self.format.least == "m" else "dmin") if self.format.least else None
        self.period = None

    def field(self, name):
        return self.code.at(self.here, self.stored.offset(name))

    def halves(self, name):
        return self.code.builder.fpext(self.code.load(self.field(name), HALVES), FLOATS)

    def powers(self, name):
        """2^(exponent - 128), see `formats.block_scales`."""
        b, code = self.code.builder, self.code
        exponents = b.zext(code.load(self.field(name), ir.VectorType(BYTE, LANES)), INTS)
        small = b.shl(code.ints(1 << 21), exponents)
        others = b.shl(b.sub(exponents, code.ints(1)), code.ints(23))
        return b.bitcast(b.select(b.icmp_unsigned("<", exponents, code.ints(2)), small, others), FLOATS)

    @contextmanager
    def each_period(self):
        """Code that runs for each period of the block."""
        if self.format.periods == 1:
            yield
            return
        with self.code.loop(self.code.number(self.format.periods), 1) as (self.period, _):
            yield
        self.period = None

    @contextmanager
    def each_sub_block(self):
        """Code that runs for each sub-block of the block, whose number is a value; see `each_period` for code that knows its place."""
        with self.code.rolled_loop(self.format.inputs // BLOCK) as (s, _):
            yield s

    def offset(self, of_period, each):
        """of_period + each times the number of the period."""
        if self.period is None or each == 0:
            return self.code.number(of_period)
        b = self.code.builder
        return b.add(b.mul(self.period, self.code.number(each)), self.code.number(of_period))

    def scales(self, s):
        """For each run of sub-block s, a number or a value: what codes are multiplied by, and what is added to a weight."""
        b, code, format_ = self.code.builder, self.code, self.format
        runs, count = [], BLOCK // format_.run
        for k in range(count):
            if isinstance(s, int):
                at = self.offset((s * count + k) * LANES, format_.period * count * LANES)
            else:
                at = b.mul(b.add(b.mul(s, code.number(count)), code.number(k)), code.number(LANES))
            scale, least = self.d, self.least
            if format_.scale is not None:
                scale = b.fmul(self.d, self._small("scales", at, np.issubdtype(format_.scale, np.signedinteger)))
            if format_.least == "mins":
                least = b.fneg(b.fmul(self.least, self._small("mins", at, False)))
            elif least is None:
                least = b.fmul(scale, code.floats(-self.middle)) if self.middle else None
            runs.append((scale, least))
        return runs

    def _small(self, name, at, signed):
        """LANES small integers as float32."""
        b = self.code.builder
        integers = self.code.load(self.code.at(self.field(name), at), ir.VectorType(BYTE, LANES))
        return b.sitofp(b.sext(integers, INTS), FLOATS) if signed else b.uitofp(b.zext(integers, INTS), FLOATS)

    @property
    def middle(self):
        """What is subtracted from codes as `codes` leaves them."""
        return 128 if self.format.table else self.format.middle

    def lift(self, s):
        """How many bits above the lowest of a byte the codes of sub-block s are best left: less their middle they then are so many times as large."""
        if DOTS_BYTES in ("avx512bw", "avx2"):  # whose sums of two products have 16 bits
            return 0
        if self.middle:
            return 7 - self.middle.bit_length() + 1
        shifts = {self.format.low.place(s, group)[1] for group in range(8)}
        return shifts.pop() if len(shifts) == 1 and not self.format.high and DOTS_BYTES != "dotprod" else 0

    def codes(self, s, half, group, lift=0):
        """Four codes a lane, as bytes: those of a group below 4 of a half of sub-block s; both are numbers, or both are values."""
        b, code, format_ = self.code.builder, self.code, self.format
        places = self._static if isinstance(s, int) else self._dynamic
        codes = self._bits(format_.low, format_.codes, lift, *places(format_.low, s, half, group))
        if format_.high:
            high = self._bits(format_.high, "high", lift + format_.low.bits, *places(format_.high, s, half, group))
            codes = b.or_(codes, high)
        return code.looked_up(codes, [x + 128 for x in format_.table]) if format_.table else codes

    def _static(self, plane, s, half, group):
        """Word of a group's codes in the block, and how far they are to be shifted right: a number, or a value where periods differ."""
        word, shift = plane.place(s, 4 * half + group)
        moved = shift if self.period is None or plane.shifts == 0 else self.offset(shift, plane.shifts)
        return self.offset(word, plane.words), moved

    def _dynamic(self, plane, s, half, group):
        """The same by tables, for values."""
        b, code = self.code.builder, self.code
        firsts = [self._first_place(plane, k, half) for k in range(self.format.inputs // BLOCK)]
        words, shifts = (
            second - first for first, second in zip(plane.place(0, 4 * half), plane.place(0, 4 * half + 1), strict=True)
        )
        word = b.add(code.entry([w for w, _ in firsts], s), b.mul(group, code.number(words)))
        return word, b.add(code.entry([x for _, x in firsts], s), b.mul(group, code.number(shifts)))

    def _first_place(self, plane, s, half):
        period, of_period = divmod(s, self.format.period)
        word, shift = plane.place(of_period, 4 * half)
        return word + plane.words * period, shift + plane.shifts * period

    def _bits(self, plane, field, place, word, shift):
        """The plane's bits of a group's codes, at bit `place` of each byte."""
        b, code = self.code.builder, self.code
        raw = code.load(code.at(self.field(field), word, 4 * LANES), INTS)
        if plane.bits == 8:
            return raw
        if isinstance(shift, int):
            shift -= place
            moved = b.lshr(raw, code.ints(shift)) if shift > 0 else b.shl(raw, code.ints(-shift)) if shift < 0 else raw
        else:  # rotated: the bits come from the same byte
            turns = b.and_(b.trunc(b.sub(shift, code.number(place)), INT), ir.Constant(INT, 31))
            moved = code.call(f"llvm.fshr.v{LANES}i32", raw, raw, code.spread(turns))
        return b.and_(moved, code.ints(((1 << plane.bits) - 1 << place) * 0x01010101))

    def prefetch(self, s, group=0, groups=1):
        """Prefetch a share of the block AHEAD of this one, or what of it one of the groups is to fetch: many lines at once would wait for one another."""
        lines = -(-self.stored.size // (self.format.inputs // BLOCK) // LINE)
        first, end, share = group * lines // groups, (group + 1) * lines // groups, lines * LINE
        at = (
            self.offset(s * share, self.format.period * share)
            if isinstance(s, int)
            else self.code.builder.mul(s, self.code.number(share))
        )
        if first < end:
            self.code.prefetch(self.code.at(self.code.at(self.here, at), first * LINE), (end - first) * LINE)


class _Unpacked(NamedTuple):
    """A sub-block as products of bytes take it, for all rows.

    codes: makes those of a group of four inputs.  bits: of codes as `dot` takes them.  middle: what codes are too large by.
    scales: of runs, each with -WHOLE times it.  leasts: what is added to a weight, or none.
    """

    codes: Callable[[int], Any]
    bits: int
    scales: list[tuple[Any, Any]]
    leasts: list[Any]
    middle: int


def _unpacked(code, block, s):
    """Sub-block s of a period."""
    lift, is_centred = block.lift(s), bool(block.middle)
    scales, leasts = [], []
    for scale, least in block.scales(s):
        scaled = code.builder.fmul(scale, code.floats(2.0**-lift)) if lift else scale
        scales.append((scaled, code.builder.fmul(scaled, code.floats(-WHOLE))))
        if not is_centred:
            leasts.append(least)

    def codes(group):
        block.prefetch(s, group, 8)
        return block.codes(s, group // 4, group % 4, lift)

    return _Unpacked(codes, 8 if block.middle << lift == 128 else block.format.bits, scales, leasts, block.middle << lift)


def _start(code, inputs, middle, field):
    """WHOLE - middle (sum of activations), so that sums of products are those of codes less their middle, and last bits of a float32."""
    if middle == 0 or DOTS_BYTES == "dotprod":  # which takes signed codes
        return code.ints(WHOLE_BITS)
    start, further = code.spread_at(code.at(inputs, field), INT), 7 - middle.bit_length() + 1
    if further == 0:
        return start
    return code.builder.add(code.builder.ashr(start, code.ints(further)), code.ints(WHOLE_BITS - (WHOLE_BITS >> further)))


def _add_products(code, sums, inputs, block, where):
    """Add the products of rows with a sub-block: scale (sum of products) + least (sum of activations) of each run.

    sums: pointers to a row's.  inputs: to its activations.
    """
    b, count = code.builder, len(block.scales)
    fields = [where["start"]] if count == 1 else [where["halves"], where["halves"] + 4]
    totals = [[_start(code, there, block.middle, field) for field in fields] for there in inputs]
    for group in range(8):
        codes, run = block.codes(group), group * count // 8
        for total, there in zip(totals, inputs, strict=True):
            value = code.spread_at(code.at(there, where["codes"] + 4 * group), INT)
            total[run] = dot(code, total[run], codes, value, block.bits)
    for total, products, there in zip(sums, totals, inputs, strict=True):
        values = [code.fma(b.bitcast(v, FLOATS), *scale) for v, scale in zip(products, block.scales, strict=True)]
        factor = code.spread_at(code.at(there, where["scale"]), FLOAT)
        code.add(total, values[0] if count == 1 else b.fadd(*values), factor)
        if len(block.leasts) == 1:
            code.add(total, code.spread_at(code.at(there, where["sum"]), FLOAT), block.leasts[0])
        elif block.leasts:
            for field, least in zip(fields, block.leasts, strict=True):
                half = b.fsub(code.spread_at(code.at(there, field), FLOAT), code.floats(WHOLE))
                code.add(total, b.fmul(half, b.fmul(factor, code.floats(-1 / 128))), least)


def _each_sub_block(code, w, n, stored, activation):
    """Each sub-block of a panel, unpacked, and the offset of its activations in a row."""
    size = activation.size
    with code.loop(n, 1) as (index, _):
        block = _Block(code, stored, code.at(w, index, stored.size))
        there = code.builder.mul(index, code.number(block.format.inputs // BLOCK * size))
        with block.each_period():
            for s in range(block.format.period):
                block.here = code.hidden(block.here)  # a word that holds codes of several sub-blocks is read again, not kept
                yield _unpacked(code, block, s), code.builder.add(there, block.offset(s * size, block.format.period * size))


def _blocks(code, x, w, n, stored, activation):
    """Blocks of integers: products within a run are summed as integers, which is exact; scales come in between runs."""
    sums = code.sums(1)
    where = {name: activation.offset(name) for name in activation.fields}
    for block, offset in _each_sub_block(code, w, n, stored, activation):
        _add_products(code, [total for (total,) in sums], [code.at(row, offset) for row in x], block, where)
    return sums


def _each_weight(code, w, n, stored, use):
    """Call use(offset of the input in a row of float32, weights of LANES outputs, k) for each input of a panel of blocks, k its number modulo 4.

    A code is taken where it stands in its word, as a multiple of a power of two that its scale is divided by: no rounding is added.
    """
    b = code.builder
    with code.loop(n, 1) as (index, _):
        block = _Block(code, stored, code.at(w, index, stored.size))
        first = b.mul(index, code.number(4 * block.format.inputs))
        with block.each_sub_block() as s:
            block.prefetch(s)
            runs, begin = block.scales(s), b.add(first, b.mul(s, code.number(4 * BLOCK)))
            for half in range(2):
                scale, least = runs[half * len(runs) // 2]
                scales = [b.fmul(scale, code.floats(2.0 ** -(8 * k))) for k in range(4)]
                with code.rolled_loop(4) as (group, _):
                    codes = block.codes(s, half, group)
                    offset = b.add(begin, b.add(code.number(64 * half), b.mul(group, code.number(16))))
                    for k in range(4):
                        number = b.uitofp(b.and_(codes, code.ints(255 << 8 * k)), FLOATS)
                        value = code.fma(number, scales[k], least) if least is not None else b.fmul(number, scales[k])
                        use(b.add(offset, code.number(4 * k)), value, k)


def _exact_blocks(code, x, w, n, stored):
    """Blocks of integers, times float32 activations; two chains an output, so that one row waits less."""
    b, sums = code.builder, code.sums(2)

    def use(offset, value, k):
        for r in code.rows:
            code.add(sums[r][k % 2], code.spread_at(code.at(x[r], offset), FLOAT), value)

    _each_weight(code, w, n, stored, use)
    for even, odd in sums:
        b.store(b.fadd(b.load(even), b.load(odd)), even)
    return [[even] for even, _ in sums]


@intrinsic
def weights_of_output(typingctx, w, lane, n, out, stored):
    """Write the weights of one output of a panel, in float32.  w, out: addresses.  n: inputs, or blocks of them."""

    def emit(context, builder, signature, args):
        code, kind = Code(builder, 0, args[2]), signature.args[4].dtype
        w, out = (builder.inttoptr(args[k], BYTE.as_pointer()) for k in (0, 3))
        lane = args[1]
        if isinstance(kind, types.Record):
            last = builder.trunc(lane, INT)
            _each_weight(
                code, w, args[2], kind, lambda at, value, _: code.store(builder.extract_element(value, last), code.at(out, at))
            )
            return context.get_dummy_value()
        wide = kind.bitwidth == 32
        with code.loop(args[2], 1 if wide else 2) as (first, _):
            pair = code.load(code.at(code.at(w, first, PANEL * kind.bitwidth // 8), lane, 4), INT)
            if wide:
                code.store(pair, code.at(out, first, 4))
            else:
                code.store(builder.shl(pair, ir.Constant(INT, 16)), code.at(out, first, 4))
                code.store(builder.and_(pair, ir.Constant(INT, -(1 << 16))), code.at(code.at(out, first, 4), 4))
        return context.get_dummy_value()

    size = types.int64
    return types.void(size, size, size, size, stored), emit


def tile_of(*sizes, adds=False, most=0):
    """y[r, c] = sum_i x[r, i] w[i, c] for all c of a panel, i below n: numbers, or blocks where w is of blocks.

    sizes: of the tiles that are compiled, in rows; the smallest that holds the rows computes them, and the last one again where it is larger.
    most: rows of a further tile, which takes any number up to it: of blocks times rounded activations.
    adds: whether y holds sums that go on, of numbers.
    x, w, y: addresses of the first row, the panel and the first result.  xs, ys: bytes from row to row.  count: of rows, at most the
    largest size.  stored, taken: dtypes of w and x, see `formats`.
    """

    @intrinsic
    def tile(typingctx, x, xs, w, y, ys, count, n, stored, taken):
        size = types.int64
        return types.void(size, size, size, size, size, size, size, stored, taken), emit

    def emit(context, builder, signature, args):
        stored, value_type = (kind.dtype for kind in signature.args[7:])
        builder.function.attributes.add("noinline")  # one copy of a tile
        end = builder.append_basic_block("end")
        for size in (*sizes, most) if most else sizes:
            is_last = size == (most or sizes[-1])
            fits = None if is_last else builder.icmp_signed("<=", args[5], ir.Constant(args[5].type, size))
            here, larger = builder.append_basic_block(f"tile.{size}"), builder.append_basic_block("larger") if fits else None
            builder.cbranch(fits, here, larger) if fits else builder.branch(here)
            builder.position_at_end(here)
            if size == most:
                _emit_many_rows(builder, most, args[:7], stored, value_type)
            else:
                _emit_tile(builder, size, args[:7], stored, value_type, adds)
            builder.branch(end)
            if larger:
                builder.position_at_end(larger)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return tile


def _emit_tile(builder, rows, args, stored, taken, adds):
    x, xs, w, y, ys, count, n = args
    code = Code(builder, rows, n)
    x, w, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, y))
    last = builder.sub(count, code.number(1))
    numbers = [code.number(0)]
    for r in range(1, rows):
        here = code.number(r)
        numbers.append(builder.select(builder.icmp_signed("<", here, last), here, last))
    places, results = ([code.at(start, builder.mul(stride, r)) for r in numbers] for start, stride in ((x, xs), (y, ys)))
    code.starts = results if adds else None
    if isinstance(stored, types.Record):
        exact = taken == types.float32
        sums = _exact_blocks(code, places, w, n, stored) if exact else _blocks(code, places, w, n, stored, taken)
    elif taken == types.float32:
        sums = _numbers(code, places, w, n, stored.bitwidth)
    else:
        sums = _bfloats(code, places, w, n)
    for r in code.rows:
        for part, total in enumerate(sums[r]):
            code.store(builder.load(total), code.at(results[r], part * LANES * 4))


def _emit_many_rows(builder, most, args, stored, taken):
    """Any number of rows up to `most`: each sub-block is unpacked once, and multiplied with STEPS rows at a time; sums lie on the stack."""
    x, xs, w, y, ys, count, n = args
    code, where = Code(builder, 0, n), {name: taken.offset(name) for name in taken.fields}
    x, w, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, y))
    stack = cgutils.alloca_once(builder, ir.ArrayType(FLOATS, most))
    sums = builder.bitcast(stack, BYTE.as_pointer())

    def total(row):
        return builder.bitcast(code.at(sums, row, 4 * LANES), FLOATS.as_pointer())

    with code.loop(count, 1) as (row, _):
        builder.store(code.floats(0), total(row))
    for block, offset in _each_sub_block(code, w, n, stored, taken):
        first, begin, codes = code.at(x, offset), code.number(0), [block.codes(group) for group in range(8)]
        block = block._replace(codes=codes.__getitem__)
        for step in STEPS:
            rest = builder.sub(count, begin)
            end = builder.add(begin, builder.and_(rest, code.number(-step)))
            with cgutils.for_range_slice(builder, begin, end, code.number(step)) as (row, _):
                rows = [builder.add(row, code.number(k)) for k in range(step)]
                inputs = [code.at(first, builder.mul(xs, r)) for r in rows]
                _add_products(code, [total(r) for r in rows], inputs, block, where)
            begin = end
    with code.loop(count, 1) as (row, _):
        code.store(builder.load(total(row)), code.at(y, builder.mul(ys, row)))


SIZES, BLOCK_SIZES = ((1, 2, 4, 6, 8, 11), (1, 4, 6, 8)) if LANES == 16 else ((1, 2, 4, 6), (1, 4, 6))
"""Rows of the tiles that are compiled, for numbers and for blocks. Fewer rows than a tile has cost what the tile costs: two and three rows of
blocks are bound by memory like one, and a product of eight rows has no more work outside of its dot products than one of eleven."""
STEPS, MANY = (4, 2, 1), 16
"""Of sub-blocks with two runs, whose two sums a row do not fit the registers: rows that one is multiplied with at a time, and most rows that it is
unpacked for."""
number_tile, block_tile, run_tile = tile_of(*SIZES), tile_of(*BLOCK_SIZES), tile_of(1, most=MANY)
FEW_SIZES = (1, 2, 4, 6, 8) if LANES == 16 else (1, 2, 4, 6)
"""Of products with what the caches hold: a tile of eleven rows makes 128 GFLOP/s there where one of eight makes 215 (Sapphire Rapids)."""
cache_tile, adding_tile = tile_of(*FEW_SIZES), tile_of(*FEW_SIZES, adds=True)
