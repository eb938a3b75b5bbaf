"""Tiles of a matrix product in LLVM's own language, emitted through numba: a panel of outputs for a few rows.

LLVM turns fixed-width vectors into AVX-512, AVX2 or NEON; dot-product instructions are called by name where the processor has
them. Without them the same integers come out of plain multiplications. Each output is one chain of operations over the inputs:
a row's result has the same bits whatever other rows are in the forward pass.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from polydraft.models.matrices.block_code import BlockReader, each_sub_block
from polydraft.models.matrices.dot_products import Products, dot_halves, takes_signed_codes
from polydraft.models.matrices.formats import BLOCK
from polydraft.models.matrices.tile_code import TileCode
from polydraft.models.matrices.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    PANEL,
    WHOLE,
    WHOLE_BITS,
)

UNROLL = 4
"""Inputs that a loop's body takes; the number of inputs is a multiple of it."""
HALVES_AHEAD = 8192
"""Bytes: how far ahead entries of a cache are prefetched. Attention of a row of the 1.5B behind 8,000 tokens takes 15.4, 14.3, 12.2 and 16.3 ms with none, 4096,
8192 and 16384 in one turn, and least with 8192 in each of three (Zen 4 beside other work)."""


def _numbers(code, x, w, n, stored):
    """Float32 activations, weights of 32 or 16 bits: widened to float32 when they are loaded."""
    sums = code.sums(2)
    size = PANEL * stored // 8
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


def _halves(code, x, w, n):
    """Bfloat16 activations and weights: pairs of inputs, whose products are added one after the other."""
    b = code.builder
    sums = code.sums(2)
    size = 4 * PANEL
    with code.loop(n, UNROLL) as (first, _):
        weights = code.at(w, first, size // 2)
        inputs = [code.at(row, first, 2) for row in x]
        for pair in range(UNROLL // 2):
            here = code.at(weights, pair * size)
            code.prefetch(here, size, HALVES_AHEAD)
            halves = [code.load(code.at(here, part * size // 2), INTS) for part in range(2)]
            for r in code.rows:
                value = code.spread_at(code.at(inputs[r], 4 * pair), INT)
                for half, total in enumerate(sums[r]):
                    b.store(dot_halves(code, b.load(total), halves[half], value), total)
    return sums


def _widened(code, pairs):
    """The first and the second bfloat16 of each pair, as float32."""
    b = code.builder
    return [b.bitcast(v, FLOATS) for v in (b.shl(pairs, code.ints(16)), b.and_(pairs, code.ints(-(1 << 16))))]


def _start(code, inputs, middle, field):
    """WHOLE - middle (sum of activations), so that sums of products are those of codes less their middle, and last bits of a float32."""
    if middle == 0 or (middle == 128 and takes_signed_codes()):
        return code.ints(WHOLE_BITS)
    start = code.spread_at(code.at(inputs, field), INT)
    further = 7 - middle.bit_length() + 1
    if further == 0:
        return start
    return code.builder.add(
        code.builder.ashr(start, code.ints(further)), code.ints(WHOLE_BITS - (WHOLE_BITS >> further))
    )


def _add_products(code, sums, inputs, block, where):
    """Add the products of rows with a sub-block: scale (sum of products) + minimum (sum of activations) of each run.

    sums: pointers to a row's.  inputs: to its activations.
    """
    b = code.builder
    count = len(block.scales)
    fields = [where["start"]] if count == 1 else [where["halves"], where["halves"] + 4]
    totals = [
        [Products(code, _start(code, there, block.middle, field)) for field in fields] for there in inputs
    ]
    for group in range(8):
        codes = block.codes(group)
        run = group * count // 8
        for total, there in zip(totals, inputs, strict=True):
            value = code.spread_at(code.at(there, where["codes"] + 4 * group), INT)
            total[run].add(codes, value, block.bits)
    for total, products, there in zip(sums, totals, inputs, strict=True):
        values = [
            code.fma(b.bitcast(sum_.result(), FLOATS), *scale)
            for sum_, scale in zip(products, block.scales, strict=True)
        ]
        factor = code.spread_at(code.at(there, where["scale"]), FLOAT)
        code.add(total, values[0] if count == 1 else b.fadd(*values), factor)
        if len(block.minimums) == 1:
            code.add(total, code.spread_at(code.at(there, where["sum"]), FLOAT), block.minimums[0])
        elif block.minimums:
            for field, minimum in zip(fields, block.minimums, strict=True):
                half = b.fsub(code.spread_at(code.at(there, field), FLOAT), code.floats(WHOLE))
                code.add(total, b.fmul(half, b.fmul(factor, code.floats(-1 / 128))), minimum)


def _blocks(code, x, w, n, stored, activation):
    """Blocks of integers: products within a run are summed as integers, which is exact; scales come in between runs."""
    sums = code.sums(1)
    where = {name: activation.offset(name) for name in activation.fields}
    for block, offset in each_sub_block(code, w, n, stored, activation):
        _add_products(code, [total for (total,) in sums], [code.at(row, offset) for row in x], block, where)
    return sums


def each_weight(code, w, n, stored, use):
    """Call use(offset of the input in a row of float32, weights of LANES outputs, k) for each input of a panel of blocks, k its number modulo 4.

    A code is taken where it stands in its word, as a multiple of a power of two that its scale is divided by: no rounding is added.
    """
    b = code.builder
    with code.loop(n, 1) as (index, _):
        block = BlockReader(code, stored, code.at(w, index, stored.size))
        first = b.mul(index, code.number(4 * block.format.inputs))
        with block.each_sub_block() as s:
            block.prefetch(s)
            runs = block.scales(s)
            begin = b.add(first, b.mul(s, code.number(4 * BLOCK)))
            for half in range(2):
                scale, minimum = runs[half * len(runs) // 2]
                scales = [b.fmul(scale, code.floats(2.0 ** -(8 * k))) for k in range(4)]
                with code.rolled_loop(4) as (group, _):
                    codes = block.codes(s, half, group)
                    offset = b.add(begin, b.add(code.number(64 * half), b.mul(group, code.number(16))))
                    for k in range(4):
                        number = b.uitofp(b.and_(codes, code.ints(255 << 8 * k)), FLOATS)
                        value = (
                            code.fma(number, scales[k], minimum)
                            if minimum is not None
                            else b.fmul(number, scales[k])
                        )
                        use(b.add(offset, code.number(4 * k)), value, k)


def _exact_blocks(code, x, w, n, stored):
    """Blocks of integers, times float32 activations; two chains an output, so that one row waits less."""
    b = code.builder
    sums = code.sums(2)

    def use(offset, value, k):
        for r in code.rows:
            code.add(sums[r][k % 2], code.spread_at(code.at(x[r], offset), FLOAT), value)

    each_weight(code, w, n, stored, use)
    for even, odd in sums:
        b.store(b.fadd(b.load(even), b.load(odd)), even)
    return [[even] for even, _ in sums]


@intrinsic
def weights_of_output(typingctx, w, lane, n, out, stored):
    """Write the weights of one output of a panel, in float32.  w, out: addresses.  n: inputs, or blocks of them."""

    def emit(context, builder, signature, args):
        code = TileCode(builder, 0, args[2])
        kind = signature.args[4].dtype
        w, out = (builder.inttoptr(args[k], BYTE.as_pointer()) for k in (0, 3))
        lane = args[1]
        if isinstance(kind, types.Record):
            last = builder.trunc(lane, INT)
            each_weight(
                code,
                w,
                args[2],
                kind,
                lambda at, value, _: code.store(builder.extract_element(value, last), code.at(out, at)),
            )
            return context.get_dummy_value()
        wide = kind.bitwidth == 32
        with code.loop(args[2], 1 if wide else 2) as (first, _):
            pair = code.load(code.at(code.at(w, first, PANEL * kind.bitwidth // 8), lane, 4), INT)
            if wide:
                code.store(pair, code.at(out, first, 4))
            else:
                code.store(builder.shl(pair, ir.Constant(INT, 16)), code.at(out, first, 4))
                code.store(
                    builder.and_(pair, ir.Constant(INT, -(1 << 16))), code.at(code.at(out, first, 4), 4)
                )
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
            here = builder.append_basic_block(f"tile.{size}")
            larger = builder.append_basic_block("larger") if fits else None
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
    code = TileCode(builder, rows, n)
    x, w, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, y))
    last = builder.sub(count, code.number(1))
    numbers = [code.number(0)]
    for r in range(1, rows):
        here = code.number(r)
        numbers.append(builder.select(builder.icmp_signed("<", here, last), here, last))
    places, results = (
        [code.at(start, builder.mul(stride, r)) for r in numbers] for start, stride in ((x, xs), (y, ys))
    )
    code.starts = results if adds else None
    if isinstance(stored, types.Record):
        exact = taken == types.float32
        sums = (
            _exact_blocks(code, places, w, n, stored) if exact else _blocks(code, places, w, n, stored, taken)
        )
    elif taken == types.uint16:
        sums = _halves(code, places, w, n)
    else:
        sums = _numbers(code, places, w, n, stored.bitwidth)
    for r in code.rows:
        for part, total in enumerate(sums[r]):
            code.store(builder.load(total), code.at(results[r], part * LANES * 4))


def _emit_many_rows(builder, most, args, stored, taken):
    """Any number of rows up to `most`: each sub-block is unpacked once, and multiplied with STEPS rows at a time; sums lie on the stack."""
    x, xs, w, y, ys, count, n = args
    code = TileCode(builder, 0, n)
    where = {name: taken.offset(name) for name in taken.fields}
    x, w, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, y))
    stack = cgutils.alloca_once(builder, ir.ArrayType(FLOATS, most))
    sums = builder.bitcast(stack, BYTE.as_pointer())

    def total(row):
        return builder.bitcast(code.at(sums, row, 4 * LANES), FLOATS.as_pointer())

    with code.loop(count, 1) as (row, _):
        builder.store(code.floats(0), total(row))
    for block, offset in each_sub_block(code, w, n, stored, taken):
        first = code.at(x, offset)
        begin = code.number(0)
        codes = [block.codes(group) for group in range(8)]
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
STEPS = (4, 2, 1)
MANY = 16
"""Of sub-blocks with two runs, whose two sums a row do not fit the registers: rows that one is multiplied with at a time, and most rows that it is
unpacked for."""
number_tile = tile_of(*SIZES)
block_tile = tile_of(*BLOCK_SIZES)
run_tile = tile_of(1, most=MANY)
FEW_SIZES = (1, 2, 4, 6, 8) if LANES == 16 else (1, 2, 4, 6)
"""Of products with what the caches hold: a tile of eleven rows makes 128 GFLOP/s there where one of eight makes 215 (Sapphire Rapids)."""
cache_tile = tile_of(*FEW_SIZES)
adding_tile = tile_of(*FEW_SIZES, adds=True)
