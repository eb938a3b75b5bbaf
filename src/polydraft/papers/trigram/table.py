"""The table of ADED: what followed each pair of tokens in a corpus, and how often.

The triples inside each document are counted, divided by the pair's total, and the heaviest successors of a pair are stored.
See `papers.trigram.drafter` for the paper and for what is done with the table.

A search looks up some hundred pairs, and a forward pass of the target has driven all of them from the processor's caches: what costs is
the lines of memory that are touched. A pair costs one of the slots, and the one or two of its row.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

WIDTH = 16
"""Most successors of a pair."""
TOKEN_BITS = 21
COUNT_BITS = 5
TAG_BITS = 20
COUNT = (1 << COUNT_BITS) - 1
TAG = (1 << TAG_BITS) - 1
"""Bits of a token id and of a number of successors in a cell, and of the tag that tells pairs of one slot apart; masks of the last two."""


class TrigramArrays(NamedTuple):
    """A table for compiled callers. tokens, weights: the halves of its cells."""

    cells: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class TrigramTable:
    """Successors of token pairs, heaviest first, counted from a corpus.

    cells: [P + E] int64, row after row: a head, (a, b, number of successors) in its bits, then the successors, each a token in the
    first half of its cell and a float32 weight in the second.
    slots: [3P/2 + 1] int64, open addressing: the place of a head and some bits of the pair's hash; 0 where there is none.
    Memory: 8 bytes an entry and 20 bytes a pair: at most 28 bytes an entry, 9.7 where pairs have twelve.

    Example:
        >>> table = TrigramTable.of(TextIndex.build([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5))
        >>> table.successors(1, 2)
        [(3, 0.6666666865348816), (4, 0.3333333432674408)]
    """

    cells: np.ndarray
    slots: np.ndarray

    @cached_property
    def arrays(self) -> TrigramArrays:
        return TrigramArrays(self.cells, self.slots, self.cells.view(np.int32), self.cells.view(np.float32))

    @cached_property
    def num_pairs(self) -> int:
        return int(np.count_nonzero(self.slots))

    @property
    def num_entries(self) -> int:
        return len(self.cells) - self.num_pairs

    @property
    def num_bytes(self) -> int:
        return self.cells.nbytes + self.slots.nbytes

    @classmethod
    def empty(cls) -> "TrigramTable":
        """A table that knows nothing: all is learnt online."""
        return cls(np.empty(0, np.int64), np.zeros(1, np.int64))

    @classmethod
    def of(cls, index: TextIndex, *, top: int = 12) -> "TrigramTable":
        """Count a corpus; no triple crosses from one document to the next. top: successors stored of each pair.

        Raises:
            InvalidInputError: top outside 1 .. 16.
        """
        if not 1 <= top <= WIDTH:
            raise InvalidInputError(f"top={top} was given; expected 1 <= top <= {WIDTH}.")
        tokens = index.tokens.astype(np.int64)
        V = index.vocab_size
        triples = np.stack([tokens[:-2], tokens[1:-1], tokens[2:]])
        a, b, c = triples[:, (triples < V).all(0)]
        codes, counts = np.unique((a * V + b) * V + c, return_counts=True)
        pairs, row_begins, number, sizes = np.unique(
            codes // V, return_index=True, return_inverse=True, return_counts=True
        )
        weight = counts / np.bincount(number, counts)[number]
        order = np.lexsort((codes, -counts, number))
        largest = order[np.arange(len(codes)) - np.repeat(row_begins, sizes) < top]
        return cls.of_rows(pairs // V, pairs % V, np.minimum(sizes, top), codes[largest] % V, weight[largest])

    @classmethod
    def of_rows(
        cls, a: np.ndarray, b: np.ndarray, count: np.ndarray, token: np.ndarray, weight: np.ndarray
    ) -> "TrigramTable":
        """From different pairs [P], the number of successors of each [P], and the successors one row after the other [E]."""
        heads = np.cumsum(1 + count) - 1 - count
        cells = np.empty(len(a) + len(token), np.int64)
        is_entry = np.ones(len(a) + len(token), np.bool_)
        cells[heads] = ((a << TOKEN_BITS | b) << COUNT_BITS) | count
        is_entry[heads] = False
        cells.view(np.int32)[0::2][is_entry] = token
        cells.view(np.float32)[1::2][is_entry] = weight
        return cls(cells, _slots(cells, len(a)))

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of what follows a pair, heaviest first."""
        at, count = find_row(self.arrays, a, b)
        tokens, weights = (x[2 * at : 2 * (at + count)] for x in (self.arrays.tokens, self.arrays.weights))
        return list(zip(tokens[0::2].tolist(), weights[1::2].tolist(), strict=True))


@njit(cache=True)
def _home(pair, num_slots):
    """(first slot to look at, bits of the hash that the slot remembers)."""
    mixed = np.uint64(pair) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xC2B2AE3D27D4EB4F)
    slot = ((mixed >> np.uint64(32)) * np.uint64(num_slots)) >> np.uint64(32)
    return np.int64(slot), np.int64(mixed & np.uint64(TAG))


@njit(cache=True)
def _slots(cells, num_pairs):
    """The slots of rows that follow each other in the cells."""
    slots = np.zeros(num_pairs + num_pairs // 2 + 1, np.int64)
    at = 0
    while at < len(cells):
        slot, tag = _home(cells[at] >> COUNT_BITS, len(slots))
        while slots[slot]:
            slot = slot + 1 if slot + 1 < len(slots) else 0
        slots[slot] = ((at + 1) << TAG_BITS) | tag
        at += 1 + (cells[at] & COUNT)
    return slots


@njit(cache=True)
def find_row(table, a, b):
    """(cell of the first successor, number of successors) of the pair (a, b); the number is 0 for one that is not there."""
    cells = table.cells
    slots = table.slots
    pair = (a << TOKEN_BITS) | b
    slot, tag = _home(pair, len(slots))
    while slots[slot]:
        at = slots[slot] >> TAG_BITS  # the cell behind the head
        if (slots[slot] & TAG) == tag and (cells[at - 1] >> COUNT_BITS) == pair:
            return at, cells[at - 1] & COUNT
        slot = slot + 1 if slot + 1 < len(slots) else 0
    return np.int64(0), np.int64(0)
