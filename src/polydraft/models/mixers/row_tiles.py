"""Scores of queries with rows of a cache that lie by their numbers, as values do: keys whose first numbers are the values are kept once.

rows    [D / PANEL, columns / together, PANEL, words], see `cache.SlotMemory.values`
score   of a query and a column: products lane by lane over all panels, then the lanes by halves; a row's bits depend on nothing beside it
"""

from functools import cache

from llvmlite import ir
from numba.core import cgutils

from polydraft.models.matrices.products import NUMBERS
from polydraft.models.matrices.tiles import FEW_SIZES
from polydraft.models.matrices.vectors import FLOATS, INT, INTS, LANES, PANEL
from polydraft.models.mixers.cache_tiles import tile_of_rows
from polydraft.numerics.compiled_code import cfunc

WORD = 4
_ROWS = FEW_SIZES[-1]


def _across(code, x):
    """The sum of all lanes, halves first."""
    b = code.builder
    half = LANES // 2
    while half:
        lanes = [(lane + half) % LANES for lane in range(LANES)]
        x = b.fadd(x, b.shuffle_vector(x, x, ir.Constant(INTS, lanes)))
        half //= 2
    return b.extract_element(x, ir.Constant(INT, 0))


def _numbers(code, place, together):
    """Of the columns that share words at a place, LANES of each."""
    b = code.builder
    if together == 1:
        return [code.load(place, FLOATS)]
    words = code.load(place, INTS)
    halves = b.shl(words, code.ints(16)), b.and_(words, code.ints(0xFFFF0000))
    return [b.bitcast(half, FLOATS) for half in halves]


def _scores(together):
    """emit_sums of `tile_of_rows`, for the columns that share words."""

    def emit(code, rows, w, scales, stride, n, results):
        b = code.builder
        totals = [[cgutils.alloca_once_value(b, code.floats(0)) for _ in range(together)] for _ in code.rows]
        with code.loop(b.sdiv(n, code.number(PANEL)), 1) as (panel, _):
            panel_at = code.at(w, b.mul(panel, stride))
            for part in range(0, PANEL, LANES):
                columns = _numbers(code, code.at(panel_at, WORD * part), together)
                first = b.add(b.mul(panel, code.number(WORD * PANEL)), code.number(WORD * part))
                for r in code.rows:
                    query = code.load(code.at(rows[r], first), FLOATS)
                    for total, numbers in zip(totals[r], columns, strict=True):
                        code.add(total, query, numbers)
        for r in code.rows:
            for k, total in enumerate(totals[r]):
                code.store(_across(code, b.load(total)), code.at(results[r], WORD * k))

    return emit


_TILES = {together: tile_of_rows(_scores(together)) for together in (1, 2)}


@cache
def row_scores(together: int) -> int:
    """Address of code of scores, for `products.call_product`. together: columns that share words, 1 or 2.

    scores(queries, bytes a row, rows of the cache, bytes from panel to panel, panels of columns, inputs, scores, bytes a row, 0, rows).
    """
    tile = _TILES[together]

    def scores(x, xs, w, stride, panels, n, y, ys, unused, rows):
        for column in range(0, panels * PANEL, together):
            at = w + column // together * WORD * PANEL
            for t in range(0, rows, _ROWS):
                tile(
                    x + t * xs,
                    xs,
                    at,
                    unused,
                    stride,
                    y + t * ys + WORD * column,
                    ys,
                    min(rows - t, _ROWS),
                    n,
                )
        return rows

    address = cfunc(NUMBERS, error_model="numpy")(scores).address
    assert address is not None
    return address
