"""The table of ADED: what followed each pair of tokens in a corpus, and how often.

The triples inside each document are counted, divided by the pair's total, and the heaviest successors of a pair are kept.
See `drafters.text.trigram` for the paper and for what is done with the table.

A search looks up some hundred pairs, and a pass of the target has driven all of them from the processor's caches: what costs is
the lines of memory that are touched. A pair costs one of the slots, and the one or two of its row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numba import njit

from polydraft.drafters.text import index_file
from polydraft.errors import InvalidInputError

WIDTH = 16
"""Most successors of a pair."""
CHUNK = 4_000_000
"""Triples sorted at a time while counting."""
TOKEN_BITS, COUNT_BITS, TAG_BITS = 21, 5, 20
COUNT, TAG = (1 << COUNT_BITS) - 1, (1 << TAG_BITS) - 1


@dataclass(frozen=True)
class TrigramTable:
    """Successors of token pairs, heaviest first, as arrays that may be mapped from a file.

    cells: [P + E] int64, row after row: a head, (a, b, number of successors) in its bits, then the successors, each a token in the
    first half of its cell and a float32 weight in the second.
    slots: [3P/2 + 1] int64, open addressing: the place of a head and some bits of the pair's hash; 0 where there is none.
    Memory: 8 bytes an entry and 20 bytes a pair: at most 28 bytes an entry, 9.7 where pairs have twelve.

    Example:
        >>> table = TrigramTable.build([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5)
        >>> table.successors(1, 2)
        [(3, 0.6666666865348816), (4, 0.3333333432674408)]
    """

    cells: np.ndarray
    slots: np.ndarray
    vocab_size: int
    tokens_of: str = ""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """(cells, slots, halves of the cells as tokens, as weights), for compiled callers."""
        return self.cells, self.slots, self.cells.view(np.int32), self.cells.view(np.float32)

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
    def empty(cls, vocab_size: int) -> "TrigramTable":
        """A table that knows nothing: all is learnt online."""
        return cls._of(np.empty(0, np.int64), np.empty(0, np.int64), vocab_size, WIDTH, "")

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], vocab_size: int, *, top: int = 12, tokens_of: str = "") -> "TrigramTable":
        """Count a corpus.

        documents: token ids; no triple crosses from one to the next.  top: successors kept of each pair.
        tokens_of: fingerprint of the tokenizer, see `index_file.fingerprint`.

        Raises:
            InvalidInputError: no document of three tokens, or ids outside the vocabulary.
        """
        index_file.check_size(vocab_size)
        if not 1 <= top <= WIDTH:
            raise InvalidInputError(f"top={top} was given; expected 1 <= top <= {WIDTH}.")
        codes, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        waiting: list[np.ndarray] = []
        for number, document in enumerate(documents):
            t = np.asarray(document, np.int64)
            index_file.check_tokens(t, vocab_size, f"document {number} of the corpus")
            waiting.append((t[:-2] * vocab_size + t[1:-1]) * vocab_size + t[2:])
            if sum(map(len, waiting)) > CHUNK:
                codes, counts = _merge(codes, counts, waiting)
        codes, counts = _merge(codes, counts, waiting)
        if not len(codes):
            raise InvalidInputError("an empty corpus was given; expected a document of at least three tokens.")
        return cls._of(codes, counts, vocab_size, top, tokens_of)

    @classmethod
    def _of(cls, codes: np.ndarray, counts: np.ndarray, V: int, top: int, tokens_of: str) -> "TrigramTable":
        pairs, pair_begins = np.unique(codes // V, return_index=True)
        sizes = np.diff(np.append(pair_begins, len(codes)))
        weight = counts / np.repeat(np.add.reduceat(counts, pair_begins), sizes) if len(codes) else np.empty(0)
        number = np.repeat(np.arange(len(pairs)), sizes)
        order = np.lexsort((codes, -counts, number))
        largest = order[np.arange(len(codes)) - np.repeat(pair_begins, sizes) < top]
        return cls.of_rows(pairs // V, pairs % V, np.minimum(sizes, top), codes[largest] % V, weight[largest], V, tokens_of)

    @classmethod
    def of_rows(
        cls,
        a: np.ndarray,
        b: np.ndarray,
        count: np.ndarray,
        token: np.ndarray,
        weight: np.ndarray,
        vocab_size: int,
        tokens_of: str,
    ) -> "TrigramTable":
        """From different pairs [P], the number of successors of each [P], and the successors one row after the other [E]."""
        heads = np.cumsum(1 + count) - 1 - count
        cells, is_entry = np.empty(len(a) + len(token), np.int64), np.ones(len(a) + len(token), np.bool_)
        cells[heads], is_entry[heads] = ((a << TOKEN_BITS | b) << COUNT_BITS) | count, False
        cells.view(np.int32)[0::2][is_entry] = token
        cells.view(np.float32)[1::2][is_entry] = weight
        slots = _slots(cells, len(a))
        for x in (cells, slots):
            x.flags.writeable = False
        return cls(cells, slots, vocab_size, tokens_of)

    def save(self, path: str | Path) -> None:
        """Write the table; see `index_file.save`."""
        arrays = {"cells": self.cells, "slots": self.slots}
        index_file.save(path, "trigram", arrays, vocab_size=self.vocab_size, tokens_of=self.tokens_of)

    @classmethod
    def load(cls, path: str | Path) -> "TrigramTable":
        """Map a table from a file, which is read through once.

        Raises:
            InvalidInputError: not a table, truncated, with rows that are not found, or with ids or weights that cannot be.
        """
        index, name = index_file.load(path, "trigram"), Path(path).name
        table = cls(index.arrays["cells"], index.arrays["slots"], index.vocab_size, index.tokens_of)
        heads = np.zeros(len(table.cells), np.bool_)
        full = table.num_pairs >= len(table.slots)  # a search would not end
        if full or not _mark_heads(*table.arrays[:2], heads) or np.count_nonzero(heads) != table.num_pairs:
            raise InvalidInputError(f"{name!r} holds rows that are damaged; build the table again.")
        pairs = table.cells[heads] >> COUNT_BITS
        index_file.check_tokens(pairs >> TOKEN_BITS, table.vocab_size, name)
        index_file.check_tokens(pairs & ((1 << TOKEN_BITS) - 1), table.vocab_size, name)
        index_file.check_tokens(table.arrays[2][0::2][~heads], table.vocab_size, name)
        weights = table.arrays[3][1::2][~heads]
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise InvalidInputError(f"{name!r} holds weights that are negative or not finite; build the table again.")
        return table

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of what follows a pair, heaviest first."""
        at, count = find_row(*self.arrays[:2], a, b)
        tokens, weights = (x[2 * at : 2 * (at + count)] for x in self.arrays[2:])
        return list(zip(tokens[0::2].tolist(), weights[1::2].tolist(), strict=True))


def _merge(codes: np.ndarray, counts: np.ndarray, waiting: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Fold waiting triples into the sorted counts; empties `waiting`."""
    new, times = np.unique(np.concatenate([np.empty(0, np.int64), *waiting]), return_counts=True)
    waiting.clear()
    merged, place = np.unique(np.concatenate([codes, new]), return_inverse=True)
    return merged, np.bincount(place, np.concatenate([counts, times]), len(merged)).astype(np.int64)


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
    slots, at = np.zeros(num_pairs + num_pairs // 2 + 1, np.int64), 0
    while at < len(cells):
        slot, tag = _home(cells[at] >> COUNT_BITS, len(slots))
        while slots[slot]:
            slot = slot + 1 if slot + 1 < len(slots) else 0
        slots[slot] = ((at + 1) << TAG_BITS) | tag
        at += 1 + (cells[at] & COUNT)
    return slots


@njit(cache=True)
def _mark_heads(cells, slots, heads):
    """Mark where rows begin; False unless every row is whole and found, and every slot leads into the cells.

    If as many rows are marked as slots are in use, each slot leads to a row of its own.
    """
    for slot in slots:
        if slot and not 1 <= slot >> TAG_BITS <= len(cells):
            return False
    at = 0
    while at < len(cells):
        pair, count = cells[at] >> COUNT_BITS, cells[at] & COUNT
        places = find_row(cells, slots, pair >> TOKEN_BITS, pair & ((1 << TOKEN_BITS) - 1))
        if pair < 0 or count > WIDTH or at + count >= len(cells) or places != (at + 1, count):
            return False
        heads[at] = True
        at += 1 + count
    return True


@njit(cache=True)
def find_row(cells, slots, a, b):
    """(cell of the first successor, number of successors) of the pair (a, b); the number is 0 for one that is not there."""
    pair = (a << TOKEN_BITS) | b
    slot, tag = _home(pair, len(slots))
    while slots[slot]:
        at = slots[slot] >> TAG_BITS  # the cell behind the head
        if (slots[slot] & TAG) == tag and (cells[at - 1] >> COUNT_BITS) == pair:
            return at, cells[at - 1] & COUNT
        slot = slot + 1 if slot + 1 < len(slots) else 0
    return np.int64(0), np.int64(0)
