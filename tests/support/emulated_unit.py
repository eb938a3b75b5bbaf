"""The processor's matrix unit in vector code, an instruction at a time, for processors of AVX-512 that have none.

Tiles are arrays of 16 rows of 64 bytes; of each as many rows are used as its configuration says.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numba
from llvmlite import ir
from numba.core import cgutils

from polydraft.models.compiled import model
from polydraft.models.matrices import matrix_unit
from polydraft.models.matrices.vectors import BYTE, FLOATS, INT, INTS
from polydraft.models.mixers import cache

LINE = 64
_TILE = 16 * LINE
_NUM_TILES = 8
_ROWS_AT = 48
"""Where a configuration has the rows of each tile."""


def _memory(code):
    """Of all tiles, and behind them of their configuration: one place of the function that is compiled."""
    function = code.builder.function
    if not hasattr(function, "tiles"):
        kind = ir.ArrayType(BYTE, _NUM_TILES * _TILE + LINE)
        function.tiles = cgutils.alloca_once(code.builder, kind)
    return code.builder.bitcast(function.tiles, BYTE.as_pointer())


def _lines(code, tile):
    """Code for each row of a tile: its number, and where it is."""
    rows = code.load(code.at(_memory(code), _NUM_TILES * _TILE + _ROWS_AT + tile.constant), BYTE)
    start = code.at(_memory(code), tile.constant * _TILE)
    with code.loop(code.builder.zext(rows, code.index), 1) as (row, _):
        yield row, code.at(start, row, LINE)


def _configure(code, place):
    target = code.at(_memory(code), _NUM_TILES * _TILE)
    code.store(code.load(place, ir.VectorType(BYTE, LINE)), target)


def _load(code, tile, address, stride):
    for row, line in _lines(code, tile):
        code.store(code.load(code.at(address, code.builder.mul(row, stride)), INTS), line)


def _store(code, tile, address, stride):
    for row, line in _lines(code, tile):
        code.store(code.load(line, INTS), code.at(address, code.builder.mul(row, stride)))


def _zero(code, tile):
    for _, line in _lines(code, tile):
        code.store(code.ints(0), line)


def _halves(code, words):
    """The first and the second bfloat16 of each word, as float32."""
    b = code.builder
    first = b.shl(words, code.ints(16))
    second = b.and_(words, code.ints(-(1 << 16)))
    return b.bitcast(first, FLOATS), b.bitcast(second, FLOATS)


def _add_products(code, sums, x, w):
    """sums += x w: of each row of sums, pairs of inputs times those of 16 outputs."""
    b = code.builder
    start = code.at(_memory(code), x.constant * _TILE)
    total = cgutils.alloca_once(b, FLOATS)
    for row, line in _lines(code, sums):
        b.store(code.load(line, FLOATS), total)
        inputs = code.at(start, row, LINE)
        for pair, weights in _lines(code, w):
            value = code.spread(code.load(code.at(inputs, pair, 4), INT))
            both = zip(_halves(code, value), _halves(code, code.load(weights, INTS)), strict=True)
            for a, c in both:
                b.store(code.fma(a, c, b.load(total)), total)
        code.store(b.load(total), line)


INSTRUCTIONS = {
    "ldtilecfg": _configure,
    "tilerelease": lambda code: None,
    "tilezero": _zero,
    "tileloadd64": _load,
    "tilestored64": _store,
    "tdpbf16ps": _add_products,
}


def _call(code, name, *arguments):
    INSTRUCTIONS[name](code, *arguments)


def _has_unit() -> bool:
    return True


PLACES = [
    (matrix_unit, "_call", _call),
    (matrix_unit, "cfunc", numba.cfunc),
    (model, "has_matrix_unit", _has_unit),
    (cache, "has_matrix_unit", _has_unit),
]
"""What takes whose place; code of the emulation is not stored."""


@contextmanager
def emulated() -> Iterator[None]:
    """Models that are made while the block lasts read prompts, and attend, by the emulation, also after it."""
    own = [getattr(module, name) for module, name, _ in PLACES]
    products = [matrix_unit.matrix_product, matrix_unit.prompt_product]
    for module, name, replacement in PLACES:
        setattr(module, name, replacement)
    for product in products:
        product.cache_clear()
    try:
        yield
    finally:
        for (module, name, _), value in zip(PLACES, own, strict=True):
            setattr(module, name, value)
        for product in products:
            product.cache_clear()
