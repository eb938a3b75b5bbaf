"""The table of ADED: what followed each pair of tokens in a corpus, and how often.

The triples inside each document are counted, divided by the pair's total, and the heaviest successors of a pair are kept.
See `drafters.trigram` for the paper and for what is done with the table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from polydraft.drafters import index_file
from polydraft.errors import InvalidInputError

__all__ = ["WIDTH", "TrigramTable", "find_pair"]

VERSION = 1
ARRAYS: tuple[str, ...] = ("first", "second", "row", "token", "weight")
WIDTH = 16
"""Most successors of a pair."""
CHUNK = 4_000_000
"""Triples sorted at a time while counting."""


@dataclass(frozen=True)
class TrigramTable:
    """Successors of token pairs, heaviest first, as sorted arrays that may be mapped from a file.

    first: [V + 1] int64, pairs that begin with a are first[a] .. first[a + 1].  second: [P] int32, b of each pair, ascending.
    row: [P + 1] int64, entries of each pair.  token: [E] int32.  weight: [E] float32.
    Memory: 8 bytes an entry, 12 bytes a pair and 8 bytes a token of the vocabulary: at most 20 bytes an entry.

    Example:
        >>> table = TrigramTable.build([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5)
        >>> table.successors(1, 2)
        [(3, 0.6666666865348816), (4, 0.3333333432674408)]
    """

    first: np.ndarray
    second: np.ndarray
    row: np.ndarray
    token: np.ndarray
    weight: np.ndarray
    vocab_size: int
    tokens_of: str = ""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.first, self.second, self.row, self.token, self.weight

    @property
    def num_entries(self) -> int:
        return len(self.token)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

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
        if not 1 <= top <= WIDTH or vocab_size >= 1 << 21:
            raise InvalidInputError(
                f"top={top} and vocab_size={vocab_size} were given; expected 1 <= top <= {WIDTH} and a vocabulary below 2^21."
            )
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
        pairs, begins = np.unique(codes // V, return_index=True)
        sizes = np.diff(np.append(begins, len(codes)))
        weight = counts / np.repeat(np.add.reduceat(counts, begins), sizes) if len(codes) else np.empty(0)
        number = np.repeat(np.arange(len(pairs)), sizes)
        order = np.lexsort((codes, -counts, number))
        rank = np.arange(len(codes)) - np.repeat(begins, sizes)
        kept = order[rank < top]
        row = np.append(0, np.cumsum(np.minimum(sizes, top)))
        first = np.searchsorted(pairs // V, np.arange(V + 1))
        return cls._frozen(first, pairs % V, row, codes[kept] % V, weight[kept], V, tokens_of)

    @classmethod
    def _frozen(cls, first: Any, second: Any, row: Any, token: Any, weight: Any, V: int, tokens_of: str) -> "TrigramTable":
        kinds = (np.int64, np.int32, np.int64, np.int32, np.float32)
        arrays = [np.ascontiguousarray(x, k) for x, k in zip((first, second, row, token, weight), kinds, strict=True)]
        for x in arrays:
            x.flags.writeable = False
        return cls(*arrays, V, tokens_of)

    def save(self, path: str | Path) -> None:
        """Write the table; see `index_file.save`."""
        arrays = dict(zip(ARRAYS, self.arrays, strict=True))
        index_file.save(path, "trigram", VERSION, arrays, vocab_size=self.vocab_size, tokens_of=self.tokens_of)

    @classmethod
    def load(cls, path: str | Path) -> "TrigramTable":
        """Map a table from a file.

        Raises:
            InvalidInputError: not a table, truncated, or with ids or weights that cannot be.
        """
        found = index_file.load(path, "trigram", VERSION)
        table = cls(*(found.arrays[name] for name in ARRAYS), found.vocab_size, found.tokens_of)
        index_file.check_tokens(table.token, table.vocab_size, Path(path).name)
        index_file.check_tokens(table.second, table.vocab_size, Path(path).name)
        if not (np.isfinite(table.weight).all() and (table.weight >= 0).all()):
            raise InvalidInputError(f"{Path(path).name!r} holds weights that are negative or not finite; build the table again.")
        return table

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of what follows a pair, heaviest first."""
        at = find_pair(*self.arrays[:2], a, b)
        entries = slice(self.row[at], self.row[at + 1]) if at >= 0 else slice(0)
        return list(zip(self.token[entries].tolist(), self.weight[entries].tolist(), strict=True))


def _merge(codes: np.ndarray, counts: np.ndarray, waiting: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Fold waiting triples into the sorted counts; empties `waiting`."""
    new, times = np.unique(np.concatenate([np.empty(0, np.int64), *waiting]), return_counts=True)
    waiting.clear()
    merged, place = np.unique(np.concatenate([codes, new]), return_inverse=True)
    return merged, np.bincount(place, np.concatenate([counts, times]), len(merged)).astype(np.int64)


@njit(cache=True)
def find_pair(first, second, a, b):
    """Number of the pair (a, b), or -1."""
    if a + 1 >= len(first):
        return -1
    low, high = first[a], first[a + 1]
    while low < high:
        middle = (low + high) // 2
        if second[middle] < b:
            low = middle + 1
        else:
            high = middle
    return low if low < first[a + 1] and second[low] == b else -1
