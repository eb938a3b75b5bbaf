"""A corpus in one index file, which retrieval maps, the trigram table is counted from, and a suffix store may begin with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from polydraft.drafters.base import Parts
from polydraft.drafters.text import index_file
from polydraft.drafters.text.suffix_array import Suffixes, count, sort_suffixes, suffixes
from polydraft.errors import InvalidInputError

WHOLE = 1 << 40
"""Suffixes are sorted by all of their tokens."""


@dataclass(frozen=True)
class TextIndex:
    """A corpus and its suffix array, which may be mapped from a file.

    tokens: [T] uint16 (int32 for a vocabulary beyond 65,534), each document followed by the id `vocab_size`.
    order: [T] uint32, places of the suffixes in their order.  tokens_of: fingerprint of the tokenizer, see `index_file.fingerprint`.
    Memory: 6 bytes a token, or 8, and 8 a token of the vocabulary; while it is sorted 18 more a token.

    Example:
        >>> index = TextIndex.build([[1, 2, 3, 1, 2, 4], [1, 2, 3]], vocab_size=5)
        >>> index.count([1, 2]), index.count([1, 2, 3]), index.count([4, 1])
        (3, 2, 0)
    """

    tokens: np.ndarray
    order: np.ndarray
    vocab_size: int
    tokens_of: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.order.nbytes

    @cached_property
    def arrays(self) -> Suffixes:
        """For compiled callers; no string crosses from one document into the next."""
        counts = np.bincount(self.tokens, minlength=self.vocab_size)[: self.vocab_size]
        return suffixes(self.tokens, self.order, np.append(0, np.cumsum(counts)), WHOLE, self.vocab_size)

    @classmethod
    def build(
        cls, documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int, *, tokens_of: str = ""
    ) -> "TextIndex":
        """Sort a corpus. documents: token ids.

        Raises:
            InvalidInputError: no token at all, ids outside the vocabulary, or more than 2^32 tokens.
        """
        index = cls.of(documents, vocab_size, tokens_of)
        if not index.num_tokens:
            raise InvalidInputError("an empty corpus was given; expected a document of at least one token.")
        return index

    @classmethod
    def of(
        cls, documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int, tokens_of: str
    ) -> "TextIndex":
        """As `build`, of no token too."""
        index_file.check_size(vocab_size)
        kind = np.uint16 if vocab_size < 65_535 else np.int32
        parts = [np.empty(0, kind)]
        for number, document in enumerate(documents):
            new = np.asarray(document, np.int64)
            index_file.check_tokens(new, vocab_size, f"document {number} of the corpus")
            if len(new):
                parts.append(np.append(new, vocab_size).astype(kind))
        tokens = np.concatenate(parts)
        if len(tokens) >= 1 << 32:
            raise InvalidInputError(
                f"a corpus of {len(tokens)} tokens was given; expected fewer than 2^32. Split it."
            )
        order = sort_suffixes(tokens)
        for array in (tokens, order):
            array.flags.writeable = False
        return cls(tokens, order, vocab_size, tokens_of)

    def save(self, path: str | Path) -> None:
        """Write the index; see `index_file.save`."""
        arrays = {"tokens": self.tokens, "order": self.order}
        index_file.save(path, "text", arrays, vocab_size=self.vocab_size, tokens_of=self.tokens_of)

    @classmethod
    def load(cls, path: str | Path) -> "TextIndex":
        """Map an index from a file.

        Raises:
            InvalidInputError: what `index_file.load` refuses.
        """
        stored = index_file.load(path, "text")
        return cls(stored.arrays["tokens"], stored.arrays["order"], stored.vocab_size, stored.tokens_of)

    @classmethod
    def for_engine(cls, index: "str | Path | TextIndex", parts: Parts) -> "TextIndex":
        """An index, or the one of a file, of the engine's tokenizer.

        Raises:
            InvalidInputError: a file that is none.
            IncompatibleError: an index of another tokenizer.
        """
        opened = index if isinstance(index, TextIndex) else cls.load(index)
        index_file.check_vocabulary(
            "the index", opened.vocab_size, opened.tokens_of, parts.target.vocab_size, parts.tokenizer
        )
        return opened

    def count(self, tokens: Sequence[int]) -> int:
        """Occurrences of a string of one token or more."""
        return int(count(self.arrays, np.asarray(tokens, np.int64)))
