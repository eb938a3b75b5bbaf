"""Keys and values of a compiled model's slots, in float32, rounded to bfloat16, or in bytes with scales, so that attention is two packed products.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
word     32 bits: a float32, two bfloat16 or four bytes, which are inputs of a product one behind the other (see `formats`)
scale    of bytes: one for TERMS numbers of a key, one for a head's value

Rounding is token by token: a token's keys and values have the same bits whatever forward pass made them, and in whatever column they lie.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidInputError
from polydraft.models.matrices.dot_products import DOTS_HALVES
from polydraft.models.matrices.kernels import bfloat16_bits
from polydraft.models.matrices.matrix_unit import INPUTS, has_matrix_unit, matrix_product
from polydraft.models.matrices.products import number_product
from polydraft.models.matrices.tiles import UNROLL
from polydraft.models.matrices.vectors import PANEL, aligned, give_back
from polydraft.models.mixers.cache_tiles import byte_products
from polydraft.models.mixers.row_tiles import rows_to_keys
from polydraft.models.mixers.softmax import TERMS, VALUES
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit

CACHE_DTYPES = {"float32": 1, "bfloat16": 2, "q8_0": 4}
"""What keys and values are stored in -> numbers in a word."""
BYTES_TOGETHER = CACHE_DTYPES["q8_0"]
COLUMNS = max(PANEL, TERMS)
"""Columns that a slot is rounded up to."""
_MIN_LOG = np.float32(-60)
"""Of the scale of a value that is zero."""


class SlotMemory(NamedTuple):
    """Panels over columns for keys, over the width for values; one type, whatever numbers they are.

    Where values are the first numbers of keys, keys are no rows, and values whole keys.
    keys: [L, slots, G, columns / PANEL, D / together, PANEL, 2], D up to whole steps of a product.  values: [L, slots, G, D / PANEL, columns / together, PANEL, 2].
    scales: [L, slots, G, D / TERMS + 1, columns] of bytes: of each TERMS numbers of a key, and the logarithm to base 2 of the value's; else no rows.
    tokens: [slots, columns] which token lies in each.  lengths: [slots] committed columns.  together: numbers in a word.
    scores, sums: addresses of the code that multiplies with keys, and with values; see `attention`.  rounded: whether it takes queries and attention
        weights rounded as keys and values are.  to_keys: address of the code that makes keys of values, see `row_tiles`, where keys are no rows.
    """

    keys: np.ndarray
    values: np.ndarray
    scales: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    together: int
    scores: int
    sums: int
    rounded: bool
    to_keys: int = 0


def whole(size: int, unit: int = PANEL) -> int:
    """Up to whole units, by default panels.

    Example:
        >>> whole(3) == PANEL, whole(6, 4)
        (True, 8)
    """
    return -(-size // unit) * unit


def _num_scales(width: int, dtype: str) -> int:
    """Of a token's key and value in a group."""
    return width // TERMS + 1 if dtype == "q8_0" else 0


def token_bytes(
    groups: int, width: int, dtype: str = "float32", value_width: int | None = None, *, in_keys: bool = False
) -> int:
    """What a token's keys and values take in a layer. value_width: default that of keys.  in_keys: whether values are the first numbers of keys.

    Example:
        >>> token_bytes(3, 64), token_bytes(3, 64, "bfloat16"), token_bytes(3, 64, "q8_0")
        (1536, 768, 420)
    """
    count = whole(width) if is_once(in_keys, dtype) else whole(width, UNROLL) + whole(value_width or width)
    numbers = 4 // CACHE_DTYPES[dtype] * count
    return groups * (numbers + 4 * _num_scales(width, dtype))


def is_once(in_keys: bool, dtype: str) -> bool:
    """Whether keys and values are kept as one: values that are the first numbers of keys, but in bytes, whose scales differ."""
    return in_keys and dtype != "q8_0"


def chosen_cache_dtype(dtype: str | None, activations: str | None, width: int) -> str:
    """The type of keys and values that was asked for; None: bfloat16, or float32 beside activations in float32. width: of heads.

    Raises:
        InvalidInputError: what is no such type, or none for heads of that width; says what to give instead.

    Example:
        >>> chosen_cache_dtype(None, None, 64), chosen_cache_dtype(None, "float32", 64)
        ('bfloat16', 'float32')
    """
    if dtype is None:
        return "float32" if activations == "float32" else "bfloat16"
    if dtype not in CACHE_DTYPES:
        raise InvalidInputError(
            f"cache_dtype={dtype!r} was given; expected one of {', '.join(map(repr, CACHE_DTYPES))}."
        )
    if fitting_dtype(dtype, width) != dtype:
        raise InvalidInputError(
            f"cache_dtype='q8_0' was given for heads of width {width}; expected a multiple of {TERMS}, the numbers that share a scale. "
            "Use cache_dtype='bfloat16'."
        )
    return dtype


def fitting_dtype(dtype: str, width: int) -> str:
    """This type, or bfloat16 where heads of a width cannot have it.

    Example:
        >>> fitting_dtype("q8_0", 64), fitting_dtype("q8_0", 80), fitting_dtype("float32", 80)
        ('q8_0', 'bfloat16', 'float32')
    """
    return "bfloat16" if dtype == "q8_0" and width % TERMS else dtype


def new_memory(
    shape: tuple[int, int, int],
    width: int,
    columns: int,
    lengths: np.ndarray,
    dtype: str = "float32",
    value_width: int | None = None,
    *,
    in_keys: bool = False,
) -> SlotMemory:
    """Empty slots. shape: layers, slots, groups of keys and values.  columns: of a slot, a multiple of COLUMNS.  lengths: [slots].
    value_width: default that of keys."""
    once = is_once(in_keys, dtype)
    num_values = width if once else value_width or width
    num_keys = 0 if once else whole(width, UNROLL)
    together = CACHE_DTYPES[dtype]
    keys = aligned(*shape, columns // PANEL, num_keys // together, PANEL, 2, dtype=np.uint16)
    values = aligned(*shape, whole(num_values) // PANEL, columns // together, PANEL, 2, dtype=np.uint16)
    scales = aligned(*shape, _num_scales(width, dtype), columns)
    tokens = np.zeros((shape[1], columns), np.int32)
    stored = np.dtype(np.float32 if together == 1 else np.uint16)
    inputs = whole(width) if once else width
    rounded = dtype == "q8_0"
    if dtype == "q8_0":
        products = byte_products()
    elif dtype == "bfloat16" and inputs % INPUTS == num_values % INPUTS == 0 and has_matrix_unit():
        products = (matrix_product(), matrix_product(adds=True))
        rounded = True
    else:
        rounded = dtype == "bfloat16" and DOTS_HALVES
        products = (
            number_product(stored, halves=rounded),
            number_product(stored, adds=True, halves=rounded),
        )
    to_keys = rows_to_keys(together) if once else 0
    return SlotMemory(keys, values, scales, tokens, lengths, together, *products, rounded, to_keys)


class CachedHeads(NamedTuple):
    """What the cache holds of a token in a layer: width of keys, groups of them, width of values, and whether these are the first numbers of keys."""

    width: int
    groups: int
    value_width: int
    in_keys: bool = False

    def token_bytes(self, dtype: str) -> int:
        """See `token_bytes`."""
        return token_bytes(self.groups, self.width, dtype, self.value_width, in_keys=self.in_keys)

    def memory(self, layers: int, slots: int, columns: int, lengths: np.ndarray, dtype: str) -> SlotMemory:
        """See `new_memory`."""
        shape = layers, slots, self.groups
        return new_memory(shape, self.width, columns, lengths, dtype, self.value_width, in_keys=self.in_keys)


def new_memories(
    heads: Mapping[str, CachedHeads],
    layers: Mapping[str, int],
    slots: int,
    columns: int,
    lengths: np.ndarray,
    dtype: str,
) -> dict[str, SlotMemory]:
    """Empty slots by kind of attention; tokens and lengths are the same of all. layers: how many of each kind have keys and values."""
    memories = {
        kind: each.memory(layers[kind], slots, columns, lengths, dtype) for kind, each in heads.items()
    }
    first = next(iter(memories.values()))
    return {kind: memory._replace(tokens=first.tokens) for kind, memory in memories.items()}


def forget(memory: SlotMemory, slot: int) -> None:
    """Give the system back what a slot has taken."""
    for entries in (memory.keys, memory.values, memory.scales):
        for layer in entries:
            give_back(layer[slot])


@inner
def _put(cells, together, i, lane, bits):
    """Write a float32 as input i of an output of a panel, [inputs / together, PANEL, 2]."""
    if together == 1:
        cells[i, lane, 0], cells[i, lane, 1] = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    else:
        cells[i >> 1, lane, i & 1] = bfloat16_bits(bits)


@inner(error_model="numpy")
def _largest(x, begin, end):
    top = np.float32(0)
    for i in range(begin, end):
        top = max(top, abs(x[i]))
    return top


@inner
def keep_keys(memory, layer, slot, group, column, x, begin, width):
    """Write x[begin : begin + width] as the key of a column."""
    cells = memory.keys[layer, slot, group, column // PANEL]
    lane = column % PANEL
    together = memory.together
    if together < BYTES_TOGETHER:
        bits = x.view(np.uint32)
        for i in range(width):
            _put(cells, together, i, lane, bits[begin + i])
        return
    codes = cells.view(np.uint8)
    scales = memory.scales[layer, slot, group]
    for k in range(width // TERMS):
        top = _largest(x, begin + k * TERMS, begin + (k + 1) * TERMS)
        inverse = np.float32(VALUES) / top if top > np.float32(0) else np.float32(0)
        scales[k, column] = top / np.float32(VALUES)
        for i in range(k * TERMS, (k + 1) * TERMS):
            codes[i >> 2, lane, i & 3] = np.uint8(np.int32(np.rint(x[begin + i] * inverse)) + np.int32(128))


@inner
def keep_values(memory, layer, slot, group, column, x, begin, width):
    """Write x[begin : begin + width] as the value of a column."""
    cells = memory.values[layer, slot, group]
    together = memory.together
    if together < BYTES_TOGETHER:
        bits = x.view(np.uint32)
        for i in range(width):
            _put(cells[i // PANEL], together, column, i % PANEL, bits[begin + i])
        return
    codes = cells.view(np.int8)
    top = _largest(x, begin, begin + width)
    log = max(np.float32(np.log2(top / np.float32(VALUES))), _MIN_LOG) if top > np.float32(0) else _MIN_LOG
    inverse = np.float32(2.0 ** -np.float64(log))
    memory.scales[layer, slot, group, memory.scales.shape[3] - 1, column] = log
    for i in range(width):
        code = min(max(np.int32(np.rint(x[begin + i] * inverse)), np.int32(-VALUES)), np.int32(VALUES))
        codes[i // PANEL, column >> 2, i % PANEL, column & 3] = np.int8(code)


@inner
def _move(keys, values, scales, together, source, target):
    slot = source.slot
    column = source.column
    to = target.slot
    place = target.column
    codes = values.view(np.uint8)
    size = 4 // together
    for g in range(keys.shape[1]):
        for i in range(keys.shape[3]):
            for half in range(2):
                keys[to, g, place // PANEL, i, place % PANEL, half] = keys[
                    slot, g, column // PANEL, i, column % PANEL, half
                ]
        for p in range(values.shape[2]):
            for i in range(PANEL):
                for k in range(size):
                    read = column % together * size + k
                    write = place % together * size + k
                    codes[to, g, p, place // together, i, write] = codes[
                        slot, g, p, column // together, i, read
                    ]
        for k in range(scales.shape[2]):
            scales[to, g, k, place] = scales[slot, g, k, column]


@njit(cache=True, nogil=True)
def move_columns(memory, source, target):
    """Copy columns, of `slots.COLUMN` each, one after the other."""
    for m in range(len(source)):
        memory.tokens[target[m].slot, target[m].column] = memory.tokens[source[m].slot, source[m].column]
        for layer in range(len(memory.keys)):
            scales = memory.scales[layer]
            _move(memory.keys[layer], memory.values[layer], scales, memory.together, source[m], target[m])
