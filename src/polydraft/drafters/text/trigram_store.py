"""What ADED learns while it is used: rows copied from the corpus's table when they are first bumped, in a bounded store."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numba import njit

from polydraft.drafters.text import index_file
from polydraft.drafters.text.lru import by_age, find, insert, new_index, num_used, touch
from polydraft.drafters.text.trigram_table import WIDTH, TrigramTable, find_row
from polydraft.errors import InvalidInputError

ROW = 1 + WIDTH
"""Cells of a row: the number of successors, then those as in the table."""


class TrigramStore:
    """Rows that differ from the corpus's table, bounded: the least recently bumped pair leaves first.

    One belongs to each request, unless a store is given to the drafter: then all its requests share what they learn.
    made_with: vocabulary size and tokenizer of the file it was loaded from.
    max_pairs: most pairs.  Memory: 160 to 164 bytes a pair, allocated at once.
    A shared store may be used by several threads at a time.

    Example:
        >>> store = TrigramStore(max_pairs=4)
        >>> store.bump(TrigramTable.empty(), [1, 2, 3, 1, 2, 3], window=6, bump=1.25, cap=3.0)
        >>> store.successors(1, 2)
        [(3, 2.5)]
    """

    def __init__(self, max_pairs: int = 4096) -> None:
        if max_pairs < 1:
            raise InvalidInputError(f"max_pairs={max_pairs} was given; expected at least 1.")
        self.max_pairs, self.lock = max_pairs, threading.RLock()
        self.made_with: tuple[int, str] | None = None
        cells = np.zeros(max_pairs * ROW, np.int64)
        self.arrays = new_index(max_pairs), cells, cells.view(np.int32), cells.view(np.float32)

    def __len__(self) -> int:
        return num_used(self.arrays[0])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.arrays[0], self.arrays[1]))

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(size [R], token [R, WIDTH], weight [R, WIDTH]) of all rows, as views."""
        _, cells, tokens, weights = self.arrays
        half = tokens.reshape(-1, 2 * ROW), weights.reshape(-1, 2 * ROW)
        return cells.reshape(-1, ROW)[:, 0], half[0][:, 2::2], half[1][:, 3::2]

    def bump(self, table: TrigramTable, tokens: Sequence[int], *, window: int, bump: float, cap: float) -> None:
        """Raise the weight of every triple in the last `window` tokens by `bump`, up to `cap`."""
        last = np.array(tokens[-window:], np.int64)
        with self.lock:
            bump_all(table.arrays, self.arrays, last, bump, cap)

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of a pair that was bumped, heaviest first; empty for others."""
        sizes, tokens, weights = self._rows()
        with self.lock:
            at = find(self.arrays[0], (a << 32) | b)
            n = sizes[at] if at >= 0 else 0
            return list(zip(tokens[at, :n].tolist(), weights[at, :n].tolist(), strict=True))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The pairs from the least to the most recently bumped: key, size, token, weight."""
        index, (sizes, tokens, weights) = self.arrays[0], self._rows()
        with self.lock:
            order = by_age(index)
            return {
                "key": index[0][order],
                "size": sizes[order].astype(np.int32),
                "token": tokens[order],
                "weight": weights[order],
            }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], max_pairs: int) -> "TrigramStore":
        """The store that `to_arrays` was taken of; of more than `max_pairs` pairs the most recent stay."""
        store = cls(max_pairs)
        index, rows = store.arrays[0], store._rows()
        for i in range(max(0, len(arrays["key"]) - max_pairs), len(arrays["key"])):
            at = insert(index, arrays["key"][i])
            for own_column, field_name in zip(rows, ("size", "token", "weight"), strict=True):
                own_column[at] = arrays[field_name][i]
        return store

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write what was learnt; see `index_file.save`."""
        index_file.save(path, "trigram-store", self.to_arrays(), vocab_size=vocab_size, tokens_of=tokens_of)

    @classmethod
    def load(cls, path: str | Path, max_pairs: int = 4096) -> "TrigramStore":
        """Read what was learnt.

        Raises:
            InvalidInputError: what `index_file.load` refuses, and pairs that cannot be or are there twice.
        """
        stored, name = index_file.load(path, "trigram-store", width=WIDTH), Path(path).name
        keys = stored.arrays["key"]
        if len(np.unique(keys)) != len(keys):
            raise InvalidInputError(
                f"{name!r} was given as a trigram-store index, but it holds a pair twice. Save the store again."
            )
        for ids in (keys >> 32, keys & 0xFFFFFFFF):
            index_file.check_tokens(ids, stored.vocab_size, name)
        store = cls.from_arrays(stored.arrays, max_pairs)
        store.made_with = stored.vocab_size, stored.tokens_of
        return store


@njit(cache=True)
def bump_all(table, store, tokens, bump, cap):
    """Raise the weight of every triple of the tokens."""
    step, most = np.float32(bump), np.float32(cap)
    index, cells, words, weights = store
    for i in range(len(tokens) - 2):
        a, b, c = tokens[i], tokens[i + 1], tokens[i + 2]
        key = (a << 32) | b
        at = find(index, key)
        if at < 0:
            at = insert(index, key)
            row, count = find_row(table[0], table[1], a, b)
            for j in range(count):
                cells[at * ROW + 1 + j] = table[0][row + j]
        else:
            touch(index, at)
            count = cells[at * ROW]
        first = at * ROW + 1
        j = first
        while j < first + count and words[2 * j] != c:
            j += 1
        if j == first + count:
            if count < WIDTH:
                count += 1
            else:
                j -= 1  # the lightest one leaves
            weights[2 * j + 1] = 0
        cells[first - 1] = count
        w = min(most, weights[2 * j + 1] + step)
        while j > first and weights[2 * j - 1] < w:
            cells[j] = cells[j - 1]
            j -= 1
        words[2 * j], weights[2 * j + 1] = c, w
