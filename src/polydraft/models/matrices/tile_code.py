"""What tiles are written with in LLVM's own language: rows, their sums, loops over inputs, and weights that are fetched ahead."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from polydraft.models.matrices.vectors import FLOATS, INT, LANES, VectorCode

LINE = 64
_AHEAD = 16384
"""Bytes: how far ahead weights are prefetched. Blocks always are: one row of Q4_K then reads 40 GB/s instead of 22 on a Zen 5."""
_BYTES_PER_CYCLE = 9
"""What memory delivers about: tiles of numbers that use up weights more slowly prefetch them. Where they do not, the processor's own
look-ahead is better: with one row prefetching costs a third of the bandwidth, with eight it saves half of the time (Zen 4, 28 GB/s)."""


class TileCode(VectorCode):
    """Code of a tile. rows: how many.  n: of inputs, or of blocks of them."""

    starts: list[Any] | None = None
    """Where each row's sums begin, if not at zero."""

    def __init__(self, builder, rows, n):
        super().__init__(builder, n.type)
        self.rows = range(rows)

    def prefetch_numbers(self, pointer, size, cycles):
        """Prefetch weights if these take so many cycles for each row that there is time."""
        if size <= _BYTES_PER_CYCLE * cycles * len(self.rows):
            self.prefetch(pointer, size)

    def hidden(self, value):
        """The same, of which the compiler knows nothing."""
        return self.builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)

    def rolled_loop(self, count):
        """A loop over 0 .. count-1 that is not unrolled: the compiler does not see how long it is."""
        return cgutils.for_range_slice(
            self.builder, self.number(0), self.hidden(self.number(count)), self.number(1)
        )

    def entry(self, table, index):
        """An entry of a table of integers."""
        if len(set(table)) == 1:
            return self.number(table[0])
        kind = ir.ArrayType(self.index, len(table))
        name = self.builder.module.get_unique_name("places")
        constant = cgutils.global_constant(self.builder, name, ir.Constant(kind, table))
        return self.builder.load(self.builder.gep(constant, [self.number(0), index]))

    def prefetch(self, pointer, size, ahead=_AHEAD):
        """Prefetch weights so many bytes ahead of a pointer."""
        for line in range(0, size, LINE):
            flags = (ir.Constant(INT, x) for x in (0, 2, 1))  # read, to the second cache, data
            self.call("llvm.prefetch.p0", self.at(pointer, ahead + line), *flags, result=ir.VoidType())

    def sums(self, count):
        return [
            [cgutils.alloca_once_value(self.builder, self._start(r, part)) for part in range(count)]
            for r in self.rows
        ]

    def _start(self, row, part):
        return (
            self.floats(0)
            if self.starts is None
            else self.load(self.at(self.starts[row], part * LANES * 4), FLOATS)
        )

    def spread_at(self, pointer, kind):
        return self.spread(self.load(pointer, kind))

    def add(self, total, a, b):
        self.builder.store(self.fma(a, b, self.builder.load(total)), total)
