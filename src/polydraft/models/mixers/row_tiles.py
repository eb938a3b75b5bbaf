"""Rows of a cache, turned into keys: keys whose first numbers are the values are kept once, as values lie, and products read them as keys lie.

rows    [D / PANEL, columns / together, PANEL, words] of a slot, see `cache.SlotMemory.values`
keys    [D / together, PANEL, words] of a panel of columns, see `cache.SlotMemory.keys`

Numbers are moved, and neither rounded nor added: scores are those of the products that all other keys have, the processor's matrix unit included.
A panel is turned once for all rows that attend to it.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from polydraft.models.matrices.products import NUMBERS
from polydraft.models.matrices.vectors import BYTE, INT, INTS, LANES, PANEL, VectorCode
from polydraft.numerics.compiled_code import cfunc

WORD = 4
_LINE = WORD * PANEL
_VECTOR = WORD * LANES


def _shuffled(code, first, second, lanes):
    """Words of two vectors, by number."""
    return code.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, LANES), lanes))


def _transposed(code, vectors):
    """LANES vectors of LANES words: blocks of 1, 2, 4 ... words change their places beside the diagonal."""
    size = 1
    while size < LANES:
        lower = [lane + LANES - size if lane & size else lane for lane in range(LANES)]
        upper = [lane + LANES if lane & size else lane + size for lane in range(LANES)]
        turned = list(vectors)
        for i in range(LANES):
            if not i & size:
                pair = vectors[i], vectors[i + size]
                turned[i] = _shuffled(code, *pair, lower)
                turned[i + size] = _shuffled(code, *pair, upper)
        vectors = turned
        size *= 2
    return vectors


def _columns(code, at, together):
    """Of LANES columns a vector each: LANES numbers, or pairs of numbers."""
    b = code.builder
    if together == 1:
        return [code.load(code.at(at, _LINE * column), INTS) for column in range(LANES)]
    columns = []
    low = code.ints(0xFFFF)
    for pair in range(LANES // 2):
        halves = [code.load(code.at(at, _LINE * pair + _VECTOR * half), INTS) for half in range(2)]
        even, odd = (_shuffled(code, *halves, list(range(first, 2 * LANES, 2))) for first in range(2))
        columns.append(b.or_(b.and_(even, low), b.shl(odd, code.ints(16))))
        columns.append(b.or_(b.lshr(even, code.ints(16)), b.and_(odd, code.ints(0xFFFF0000))))
    return columns


def _turn(together):
    @intrinsic
    def turn(typingctx, rows, stride, panels, keys):
        return types.void(*[types.int64] * 4), emit

    def emit(context, builder, signature, args):
        rows, stride, panels, keys = args
        code = VectorCode(builder, panels.type)
        rows = builder.inttoptr(rows, BYTE.as_pointer())
        keys = builder.inttoptr(keys, BYTE.as_pointer())
        with code.loop(panels, 1) as (panel, _):
            source = code.at(rows, builder.mul(panel, stride))
            target = code.at(keys, builder.mul(panel, code.number(PANEL // together * _LINE)))
            for block in range(PANEL // LANES):
                first = code.at(source, block * LANES // together * _LINE)
                for part in range(2 // together):
                    words = _transposed(code, _columns(code, code.at(first, part * _VECTOR), together))
                    for i, word in enumerate(words):
                        code.store(word, code.at(target, (part * LANES + i) * _LINE + block * _VECTOR))
        return context.get_dummy_value()

    return turn


_TURNS = {together: _turn(together) for together in (1, 2)}


@cache
def rows_to_keys(together: int) -> int:
    """Address of code that writes a panel of keys, for `products.call_product`. together: columns that share words, 1 or 2.

    turned(0, 0, rows of the panel's columns, bytes from panel to panel of numbers, panels of numbers, 0, keys, 0, 0, 0).
    """
    turn = _TURNS[together]

    def turned(x, xs, w, stride, panels, n, y, ys, unused, rows):
        turn(w, stride, panels, y)
        return panels

    address = cfunc(NUMBERS, error_model="numpy")(turned).address
    assert address is not None
    return address
