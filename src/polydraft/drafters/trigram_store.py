"""What ADED learns while it is used: rows copied from the corpus's table when they are first bumped, in a bounded store."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numba import njit

from polydraft.drafters import index_file
from polydraft.drafters.recent import by_age, find, insert, new_index, num_used, touch
from polydraft.drafters.trigram_table import WIDTH, TrigramTable, find_pair
from polydraft.errors import InvalidInputError

__all__ = ["TrigramStore", "bump_all"]

VERSION = 1


class TrigramStore:
    """Rows that differ from the corpus's table, bounded: the least recently bumped pair leaves first.

    One belongs to each request, unless a store is given to the drafter: then all its requests share what they learn.
    max_pairs: most pairs.  Memory: 152 bytes a pair, allocated at once.
    A shared store may be used by several threads at a time.

    Example:
        >>> store = TrigramStore(max_pairs=4)
        >>> store.bump(TrigramTable.empty(9), [1, 2, 3, 1, 2, 3], window=6, bump=1.25, cap=3.0)
        >>> store.successors(1, 2)
        [(3, 2.5)]
    """

    def __init__(self, max_pairs: int = 4096) -> None:
        if max_pairs < 1:
            raise InvalidInputError(f"max_pairs={max_pairs} was given; expected at least 1.")
        self.max_pairs, self.lock = max_pairs, threading.RLock()
        self.arrays = (
            new_index(max_pairs),
            np.zeros(max_pairs, np.int32),
            np.zeros((max_pairs, WIDTH), np.int32),
            np.zeros((max_pairs, WIDTH), np.float32),
        )

    def __len__(self) -> int:
        return num_used(self.arrays[0])

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.arrays[0], *self.arrays[1:]))

    def bump(self, table: TrigramTable, tokens: Sequence[int], *, window: int, bump: float, cap: float) -> None:
        """Raise the weight of every triple in the last `window` tokens by `bump`, up to `cap`."""
        last = np.array(tokens[-window:], np.int64)
        with self.lock:
            bump_all(table.arrays, self.arrays, last, bump, cap)

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of a pair that was bumped, heaviest first; empty for others."""
        index, sizes, tokens, weights = self.arrays
        with self.lock:
            at = find(index, (a << 32) | b)
            n = sizes[at] if at >= 0 else 0
            return list(zip(tokens[at, :n].tolist(), weights[at, :n].tolist(), strict=True))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The pairs from the least to the most recently bumped: key, size, token, weight."""
        index, sizes, tokens, weights = self.arrays
        with self.lock:
            order = by_age(index)
            return {"key": index[0][order], "size": sizes[order], "token": tokens[order], "weight": weights[order]}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], max_pairs: int) -> "TrigramStore":
        """The store that `to_arrays` was taken of; of more than `max_pairs` pairs the most recent stay."""
        store = cls(max_pairs)
        index, *rows = store.arrays
        for i in range(max(0, len(arrays["key"]) - max_pairs), len(arrays["key"])):
            at = insert(index, arrays["key"][i])
            for kept, given in zip(rows, ("size", "token", "weight"), strict=True):
                kept[at] = arrays[given][i]
        return store

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write what was learnt; see `index_file.save`."""
        index_file.save(path, "trigram-store", VERSION, self.to_arrays(), vocab_size=vocab_size, tokens_of=tokens_of)

    @classmethod
    def load(cls, path: str | Path, max_pairs: int = 4096) -> "TrigramStore":
        """Read what was learnt; see `index_file.load` for what is refused."""
        return cls.from_arrays(index_file.load(path, "trigram-store", VERSION).arrays, max_pairs)


@njit(cache=True)
def bump_all(table, store, tokens, bump, cap):
    """Raise the weight of every triple of the tokens."""
    step, most = np.float32(bump), np.float32(cap)
    first, second, row, token, weight = table
    index, sizes, successors, weights = store
    for i in range(len(tokens) - 2):
        a, b, c = tokens[i], tokens[i + 1], tokens[i + 2]
        key = (a << 32) | b
        at = find(index, key)
        if at < 0:
            at = insert(index, key)
            sizes[at] = 0
            pair = find_pair(first, second, a, b)
            if pair >= 0:
                for e in range(row[pair], row[pair + 1]):
                    successors[at, sizes[at]], weights[at, sizes[at]] = token[e], weight[e]
                    sizes[at] += 1
        else:
            touch(index, at)
        j = 0
        while j < sizes[at] and successors[at, j] != c:
            j += 1
        if j == sizes[at]:
            if j < WIDTH:
                sizes[at] += 1
            else:
                j -= 1  # the lightest one leaves
            successors[at, j], weights[at, j] = c, np.float32(0)
        w = min(most, weights[at, j] + step)
        while j > 0 and weights[at, j - 1] < w:
            successors[at, j], weights[at, j] = successors[at, j - 1], weights[at, j - 1]
            j -= 1
        successors[at, j], weights[at, j] = c, w
