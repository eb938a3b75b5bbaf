"""Keys and values of a compiled model's slots, in float32 or rounded to bfloat16, so that attention is two packed products.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
pair     two times 16 bits: a float32, or two bfloat16, which are inputs of a product one behind the other (see `formats`)

Rounding is number by number: a token's keys and values have the same bits whatever pass made them, and in whatever column they lie.
"""

from typing import NamedTuple

import numpy as np

from polydraft.models.compiled.kernels import bfloat16_bits
from polydraft.models.compiled.products import number_product
from polydraft.models.compiled.tiles import UNROLL
from polydraft.models.compiled.vectors import PANEL, aligned, give_back
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit

__all__ = ["CACHE_DTYPES", "SlotMemory", "forget", "keep", "move_columns", "new_memory", "token_bytes", "whole"]

CACHE_DTYPES = {"float32": 1, "bfloat16": 2}
"""What keys and values are kept in -> numbers in a pair."""


class SlotMemory(NamedTuple):
    """Panels over columns for keys, over the width for values; one type, whatever numbers they are.

    keys: [L, slots, G, columns / PANEL, D / together, PANEL, 2], D up to whole steps of a product.  values: [L, slots, G, D / PANEL, columns / together, PANEL, 2].
    tokens: [slots, columns] which token lies in each.  lengths: [slots] committed columns.  together: numbers in a pair.  product: address of the code that multiplies with them.
    """

    keys: np.ndarray
    values: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    together: int
    product: int


def whole(size: int, unit: int = PANEL) -> int:
    """Up to whole units, by default panels.

    Example:
        >>> whole(3) == PANEL, whole(6, 4)
        (True, 8)
    """
    return -(-size // unit) * unit


def token_bytes(groups: int, width: int, dtype: str = "float32") -> int:
    """What a token's keys and values take in a layer.

    Example:
        >>> token_bytes(3, 64), token_bytes(3, 64, "bfloat16")
        (1536, 768)
    """
    return 4 // CACHE_DTYPES[dtype] * groups * (whole(width, UNROLL) + whole(width))


def new_memory(each: tuple[int, int, int], width: int, columns: int, lengths: np.ndarray, dtype: str = "float32") -> SlotMemory:
    """Empty slots. each: layers, slots, groups of keys and values.  columns: of a slot, whole panels.  lengths: [slots]."""
    together = CACHE_DTYPES[dtype]
    keys = aligned(*each, columns // PANEL, whole(width, UNROLL) // together, PANEL, 2, dtype=np.uint16)
    values = aligned(*each, whole(width) // PANEL, columns // together, PANEL, 2, dtype=np.uint16)
    tokens, product = np.zeros((each[1], columns), np.int32), number_product(np.dtype(np.float32 if together == 1 else np.uint16))
    return SlotMemory(keys, values, tokens, lengths, together, product)


def forget(memory: SlotMemory, slot: int) -> None:
    """Give the system back what a slot has taken."""
    for entries in (memory.keys, memory.values):
        for layer in entries:
            give_back(layer[slot])


@inner
def keep(cells, together, i, lane, bits):
    """Write a float32 as input i of an output of a panel, [inputs / together, PANEL, 2]."""
    if together == 1:
        cells[i, lane, 0], cells[i, lane, 1] = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    else:
        cells[i >> 1, lane, i & 1] = bfloat16_bits(bits)


@inner
def _move(keys, values, together, source, target):
    slot, column, to, place = source[0], source[1], target[0], target[1]
    for g in range(keys.shape[1]):
        for i in range(keys.shape[3]):
            for half in range(2):
                keys[to, g, place // PANEL, i, place % PANEL, half] = keys[slot, g, column // PANEL, i, column % PANEL, half]
        for p in range(values.shape[2]):
            for i in range(PANEL):
                if together == 1:
                    for half in range(2):
                        values[to, g, p, place, i, half] = values[slot, g, p, column, i, half]
                else:
                    values[to, g, p, place >> 1, i, place & 1] = values[slot, g, p, column >> 1, i, column & 1]


@njit(cache=True, nogil=True)
def move_columns(memory, source, target):
    """Copy columns, (slot, column) each, one after the other."""
    for m in range(len(source)):
        memory.tokens[target[m, 0], target[m, 1]] = memory.tokens[source[m, 0], source[m, 1]]
        for layer in range(len(memory.keys)):
            _move(memory.keys[layer], memory.values[layer], memory.together, source[m], target[m])
