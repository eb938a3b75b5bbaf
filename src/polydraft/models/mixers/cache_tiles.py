"""Tiles of products with keys and values of eight bits, as `tiles` has them for numbers: integer dot products, a float32 a block.

    keys    bytes 128 + code of four inputs and PANEL columns side by side; one scale for TERMS inputs of a column
    values  signed bytes of four columns and PANEL inputs side by side; one scale a column, which the weights have taken in

Sums of integers are exact, and blocks are added front to back: a row's bits do not depend on the rows beside it.
"""

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from polydraft.models.matrices.dot_products import dot, takes_signed_codes
from polydraft.models.matrices.products import NUMBERS
from polydraft.models.matrices.tile_code import TileCode
from polydraft.models.matrices.tiles import FEW_SIZES
from polydraft.models.matrices.vectors import BYTE, FLOAT, FLOATS, INT, INTS, LANES, PANEL
from polydraft.models.mixers.softmax import TERMS, VALUES
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import cfunc

QUERY = np.dtype([("scale", np.float32), ("start", np.int32), ("codes", np.int8, (TERMS,))])
"""TERMS inputs of a query. start: what the sum of products begins with, as 128 is added to the codes of keys."""
WEIGHTS = 4 * TERMS
"""Bytes from a block of weights to the next: scale, then codes, where scores have been; see `softmax.soften_block`."""
_SIZE = QUERY.itemsize
_GROUPS = TERMS // 4
_START = 0 if takes_signed_codes() else -128


@inner(error_model="numpy")
def quantize_query(x, words, n):
    """Write n numbers, rounded, as QUERY blocks, in words of 32 bits."""
    scales = words.view(np.float32)
    codes = words.view(np.int8)
    for k in range(n // TERMS):
        top = np.float32(0)
        total = np.int32(0)
        at = k * (_SIZE // 4)
        for i in range(k * TERMS, (k + 1) * TERMS):
            top = max(top, abs(x[i]))
        inverse = np.float32(VALUES) / top if top > np.float32(0) else np.float32(0)
        for i in range(TERMS):
            code = np.int32(np.rint(x[k * TERMS + i] * inverse))
            codes[4 * at + 8 + i] = code
            total += code
        scales[at], words[at + 1] = top / np.float32(VALUES), np.int32(_START) * total


def tile_of_rows(emit_sums):
    """Compiled function of a few rows and LANES outputs: emit_sums(code, rows, w, scales, stride, n, results), all but `stride` and `n` pointers."""

    @intrinsic
    def tile(typingctx, x, xs, w, scales, stride, y, ys, count, n):
        return types.void(*[types.int64] * 9), emit

    def emit(context, builder, signature, args):
        x, xs, w, scales, stride, y, ys, count, n = args
        builder.function.attributes.add("noinline")
        x, w, scales, y = (builder.inttoptr(address, BYTE.as_pointer()) for address in (x, w, scales, y))
        end = builder.append_basic_block("end")
        for size in FEW_SIZES:
            is_last = size == FEW_SIZES[-1]
            here = builder.append_basic_block(f"tile.{size}")
            larger = end if is_last else builder.append_basic_block("larger")
            builder.cbranch(builder.icmp_signed("<=", count, ir.Constant(count.type, size)), here, larger)
            builder.position_at_end(here)
            code = TileCode(builder, size, n)
            last = builder.sub(count, ir.Constant(count.type, 1))
            numbers = [
                builder.select(builder.icmp_signed("<", code.number(r), last), code.number(r), last)
                for r in code.rows
            ]
            rows, results = (
                [code.at(a, builder.mul(step, r)) for r in numbers] for a, step in ((x, xs), (y, ys))
            )
            emit_sums(code, rows, w, scales, stride, n, results)
            builder.branch(end)
            if not is_last:
                builder.position_at_end(larger)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return tile


def _scores(code, rows, w, scales, stride, n, results):
    """Of columns at w. scales: of their first blocks, each block's `stride` bytes behind those of the one before."""
    b = code.builder
    sums = code.sums(1)
    with code.loop(b.sdiv(n, code.number(TERMS)), 1) as (k, _):
        block = code.at(w, k, 4 * PANEL * _GROUPS)
        there = [code.at(row, k, _SIZE) for row in rows]
        totals = [code.spread_at(code.at(place, 4), INT) for place in there]
        for group in range(_GROUPS):
            codes = code.load(code.at(block, 4 * PANEL * group), INTS)
            for r in code.rows:
                totals[r] = dot(
                    code, totals[r], codes, code.spread_at(code.at(there[r], 8 + 4 * group), INT), 8
                )
        scale = code.load(code.at(scales, b.mul(k, stride)), FLOATS)
        for r in code.rows:
            code.add(sums[r][0], b.fmul(b.sitofp(totals[r], FLOATS), code.spread_at(there[r], FLOAT)), scale)
    for r in code.rows:
        code.store(b.load(sums[r][0]), results[r])


def _sums(code, rows, w, scales, stride, n, results):
    """Weights of rows times values at w, added to what is there."""
    b = code.builder
    code.starts = results
    sums = code.sums(1)
    with code.loop(b.sdiv(n, code.number(TERMS)), 1) as (k, _):
        block = code.at(w, k, 4 * PANEL * _GROUPS)
        there = [code.at(row, k, WEIGHTS) for row in rows]
        totals = [code.ints(0)] * len(rows)
        for group in range(_GROUPS):
            codes = code.load(code.at(block, 4 * PANEL * group), INTS)
            for r in code.rows:
                totals[r] = dot(
                    code, totals[r], code.spread_at(code.at(there[r], 4 + 4 * group), INT), codes, 7
                )
        for r in code.rows:
            code.add(sums[r][0], b.sitofp(totals[r], FLOATS), code.spread_at(there[r], FLOAT))
    for r in code.rows:
        code.store(b.load(sums[r][0]), results[r])


_scores_tile = tile_of_rows(_scores)
_sums_tile = tile_of_rows(_sums)
_ROWS = FEW_SIZES[-1]


@cache
def byte_products() -> tuple[int, int]:
    """Addresses of code of scores and of sums of values, for `products.call_product`.

    scores(queries, bytes a row, keys, address of scales, panels of columns, inputs, scores, bytes a row, bytes from block to block of scales, rows).
    sums(weights, bytes a row, values, bytes from panel to panel, panels of inputs, columns, sums, bytes a row, 0, rows).
    """

    def scores(x, xs, w, scales, panels, n, y, ys, stride, rows):
        for half in range(panels * (PANEL // LANES)):
            at = w + half // (PANEL // LANES) * PANEL * n + half % (PANEL // LANES) * 4 * LANES
            for t in range(0, rows, _ROWS):
                here = scales + 4 * LANES * half
                _scores_tile(
                    x + t * xs,
                    xs,
                    at,
                    here,
                    stride,
                    y + t * ys + 4 * LANES * half,
                    ys,
                    min(rows - t, _ROWS),
                    n,
                )
        return rows

    def sums(x, xs, w, stride, panels, n, y, ys, unused, rows):
        for half in range(panels * (PANEL // LANES)):
            at = w + half // (PANEL // LANES) * stride + half % (PANEL // LANES) * 4 * LANES
            for t in range(0, rows, _ROWS):
                _sums_tile(
                    x + t * xs,
                    xs,
                    at,
                    unused,
                    unused,
                    y + t * ys + 4 * LANES * half,
                    ys,
                    min(rows - t, _ROWS),
                    n,
                )
        return rows

    addresses = tuple(cfunc(NUMBERS, error_model="numpy")(code).address for code in (scores, sums))
    assert None not in addresses
    return addresses[0] or 0, addresses[1] or 0
