"""Blocks of integers as code reads them: where the places of codes, scales and minimums begin, see `formats`."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.np.numpy_support import as_dtype

from polydraft.models.matrices.dot_products import looked_up, sums_have_16_bits, takes_signed_codes
from polydraft.models.matrices.formats import BLOCK, BLOCKS, format_name
from polydraft.models.matrices.tile_code import LINE
from polydraft.models.matrices.vectors import BYTE, FEATURES, FLOATS, INT, INTS, LANES, WHOLE

CONVERTS_HALVES = LANES == 16 or bool(FEATURES.get("f16c") or FEATURES.get("neon"))
"""Whether the processor widens float16; LLVM calls a function for it elsewhere, which is not there."""
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


class BlockReader:
    """A block of LANES outputs as code reads it, and one of its periods: where the places of codes, scales and activations begin.

    here: its address.  d, minimum: numbers of the block, in float32.
    """

    def __init__(self, code, stored, address):
        self.code = code
        self.stored = stored
        self.format = BLOCKS[format_name(as_dtype(stored))]
        self.here = address
        self.d = self.powers("exponent") if self.format.exponent else self.halves("d")
        self.minimum = (
            self.halves("m" if self.format.minimum == "m" else "dmin") if self.format.minimum else None
        )
        self.period = None

    def field(self, name):
        return self.code.at(self.here, self.stored.offset(name))

    def halves(self, name):
        """LANES numbers of float16 as float32."""
        if CONVERTS_HALVES:
            return self.code.builder.fpext(self.code.load(self.field(name), _HALVES), FLOATS)
        return widened(self.code, self.code.load(self.field(name), _SHORTS))

    def powers(self, name):
        """2^(exponent - 128), see `formats.block_scales`."""
        b = self.code.builder
        code = self.code
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
        b = self.code.builder
        code = self.code
        format_ = self.format
        runs = []
        count = BLOCK // format_.run
        for k in range(count):
            if isinstance(s, int):
                at = self.offset((s * count + k) * LANES, format_.period * count * LANES)
            else:
                at = b.mul(b.add(b.mul(s, code.number(count)), code.number(k)), code.number(LANES))
            scale = self.d
            minimum = self.minimum
            if format_.scale is not None:
                scale = b.fmul(
                    self.d, self._small("scales", at, np.issubdtype(format_.scale, np.signedinteger))
                )
            if format_.minimum == "mins":
                minimum = b.fneg(b.fmul(self.minimum, self._small("mins", at, False)))
            elif minimum is None:
                minimum = b.fmul(scale, code.floats(-self.middle)) if self.middle else None
            runs.append((scale, minimum))
        return runs

    def _small(self, name, at, signed):
        """LANES small integers as float32."""
        b = self.code.builder
        integers = self.code.load(self.code.at(self.field(name), at), ir.VectorType(BYTE, LANES))
        return (
            b.sitofp(b.sext(integers, INTS), FLOATS) if signed else b.uitofp(b.zext(integers, INTS), FLOATS)
        )

    @property
    def middle(self):
        """What is subtracted from codes as `codes` leaves them."""
        return 128 if self.format.table else self.format.middle

    def lift(self, s):
        """How many bits above the lowest of a byte the codes of sub-block s are best left: less their middle they then are so many times as large."""
        if sums_have_16_bits():
            return 0
        if self.middle:
            return 7 - self.middle.bit_length() + 1
        shifts = {self.format.low.place(s, group)[1] for group in range(8)}
        return shifts.pop() if len(shifts) == 1 and not self.format.high and not takes_signed_codes() else 0

    def codes(self, s, half, group, lift=0):
        """Four codes a lane, as bytes: those of a group below 4 of a half of sub-block s; both are numbers, or both are values."""
        b = self.code.builder
        code = self.code
        format_ = self.format
        places = self._static if isinstance(s, int) else self._dynamic
        codes = self._bits(format_.low, format_.codes, lift, *places(format_.low, s, half, group))
        if format_.high:
            high = self._bits(
                format_.high, "high", lift + format_.low.bits, *places(format_.high, s, half, group)
            )
            codes = b.or_(codes, high)
        return looked_up(code, codes, [x + 128 for x in format_.table]) if format_.table else codes

    def _static(self, plane, s, half, group):
        """Word of a group's codes in the block, and how far they are to be shifted right: a number, or a value where periods differ."""
        word, shift = plane.place(s, 4 * half + group)
        moved = shift if self.period is None or plane.shifts == 0 else self.offset(shift, plane.shifts)
        return self.offset(word, plane.words), moved

    def _dynamic(self, plane, s, half, group):
        """The same by tables, for values."""
        b = self.code.builder
        code = self.code
        firsts = [self._first_place(plane, k, half) for k in range(self.format.inputs // BLOCK)]
        words, shifts = (
            second - first
            for first, second in zip(plane.place(0, 4 * half), plane.place(0, 4 * half + 1), strict=True)
        )
        word = b.add(code.entry([w for w, _ in firsts], s), b.mul(group, code.number(words)))
        return word, b.add(code.entry([x for _, x in firsts], s), b.mul(group, code.number(shifts)))

    def _first_place(self, plane, s, half):
        period, of_period = divmod(s, self.format.period)
        word, shift = plane.place(of_period, 4 * half)
        return word + plane.words * period, shift + plane.shifts * period

    def _bits(self, plane, field, place, word, shift):
        """The plane's bits of a group's codes, at bit `place` of each byte."""
        b = self.code.builder
        code = self.code
        raw = code.load(code.at(self.field(field), word, 4 * LANES), INTS)
        if plane.bits == 8:
            return raw
        if isinstance(shift, int):
            shift -= place
            moved = (
                b.lshr(raw, code.ints(shift))
                if shift > 0
                else b.shl(raw, code.ints(-shift))
                if shift < 0
                else raw
            )
        else:  # rotated: the bits come from the same byte
            turns = b.and_(b.trunc(b.sub(shift, code.number(place)), INT), ir.Constant(INT, 31))
            moved = code.call(f"llvm.fshr.v{LANES}i32", raw, raw, code.spread(turns))
        return b.and_(moved, code.ints(((1 << plane.bits) - 1 << place) * 0x01010101))

    def prefetch(self, s, group=0, groups=1):
        """Prefetch a share of the block AHEAD of this one, or what of it one of the groups is to fetch: many lines at once would wait for one another."""
        lines = -(-self.stored.size // (self.format.inputs // BLOCK) // LINE)
        first = group * lines // groups
        end = (group + 1) * lines // groups
        share = lines * LINE
        at = (
            self.offset(s * share, self.format.period * share)
            if isinstance(s, int)
            else self.code.builder.mul(s, self.code.number(share))
        )
        if first < end:
            self.code.prefetch(self.code.at(self.code.at(self.here, at), first * LINE), (end - first) * LINE)


def widened(code, halves):
    """Float32 numbers of the bits of float16 numbers, in integers: an exponent is 112 smaller there, as 2^112 makes good for the smallest ones too."""
    b = code.builder
    bits = b.zext(halves, INTS)
    size = b.shl(b.and_(bits, code.ints(0x7FFF)), code.ints(13))
    finite = b.bitcast(b.fmul(b.bitcast(size, FLOATS), code.floats(2.0**112)), INTS)
    is_finite = b.icmp_unsigned("<", size, code.ints(0x7C00 << 13))
    number = b.select(is_finite, finite, b.or_(size, code.ints(0x7F800000)))
    sign = b.shl(b.lshr(bits, code.ints(15)), code.ints(31))
    return b.bitcast(b.or_(number, sign), FLOATS)


class SubBlock(NamedTuple):
    """A sub-block as products of bytes take it, for all rows.

    codes: makes those of a group of four inputs.  bits: of codes as `dot` takes them.  middle: what codes are too large by.
    scales: of runs, each with -WHOLE times it.  minimums: what is added to a weight, or none.
    """

    codes: Callable[[int], Any]
    bits: int
    scales: list[tuple[Any, Any]]
    minimums: list[Any]
    middle: int


def _unpacked(code, block, s):
    """Sub-block s of a period."""
    lift = block.lift(s)
    is_centred = bool(block.middle)
    scales = []
    minimums = []
    for scale, minimum in block.scales(s):
        scaled = code.builder.fmul(scale, code.floats(2.0**-lift)) if lift else scale
        scales.append((scaled, code.builder.fmul(scaled, code.floats(-WHOLE))))
        if not is_centred:
            minimums.append(minimum)

    def codes(group):
        block.prefetch(s, group, 8)
        return block.codes(s, group // 4, group % 4, lift)

    return SubBlock(
        codes, 8 if block.middle << lift == 128 else block.format.bits, scales, minimums, block.middle << lift
    )


def each_sub_block(code, w, n, stored, activation):
    """Each sub-block of a panel, unpacked, and the offset of its activations in a row."""
    size = activation.size
    with code.loop(n, 1) as (index, _):
        block = BlockReader(code, stored, code.at(w, index, stored.size))
        there = code.builder.mul(index, code.number(block.format.inputs // BLOCK * size))
        with block.each_period():
            for s in range(block.format.period):
                block.here = code.hidden(
                    block.here
                )  # a word that holds codes of several sub-blocks is read again, not kept
                yield (
                    _unpacked(code, block, s),
                    code.builder.add(there, block.offset(s * size, block.format.period * size)),
                )
