"""REST: what followed the same words in a corpus, found in a suffix array, counted in a trie.

He, Zhong, Cai, Lee & He 2023, "REST: retrieval-based speculative decoding" (arXiv 2311.08252).

    m  length of the longest end of the text, at most `max_match`, that occurs in the corpus      n(s)  its occurrences

1. The suffixes of the corpus are sorted, so that the occurrences of a string are neighbours, and those of its continuations
   are neighbours within them: the trie of what follows is a division of one interval, and every count a difference.
2. The trie's nodes of largest n(match + path) make the draft, best first, as far as the budget goes; where there are paths left,
   matches of half the length fill them, and so on. Of the children of a node those with less than 1/32 of its occurrences may be missed.

Lossless: the draft is a function of the committed text and a fixed corpus; counts are scores, never a q: POINT_MASS.
Trap: drawing again from p after a failed match, or once for each path, as the released code does, is biased.
No match and no continuation crosses from one document into the next.
The suffixes are sorted by libdivsufsort (Mori; bound by `pydivsufsort`), which takes ids of any width: each is written as
big-endian bytes, whose order is theirs, and places inside an id are dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from pydivsufsort import divsufsort

from polydraft.core import Budget, Request
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import DEPTH, GrownTree, add_best, copy_onto, is_full, limits, new_cells, num_paths, plant
from polydraft.drafters.text import index_file
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.errors import InvalidInputError

PROBES = 32
"""Places of an interval that are looked at for its children: at least so many where there are as many, and less than twice as many."""


@dataclass(frozen=True)
class RetrievalIndex:
    """A corpus and its suffix array, which may be mapped from a file.

    tokens: [T] uint16 (int32 for a vocabulary beyond 65,534), each document followed by the id `vocab_size`.
    order: [T] uint32, places of the suffixes in their order.
    Memory: 6 bytes a token, or 8, and 8 a token of the vocabulary; while it is sorted 18 more a token.

    Example:
        >>> index = RetrievalIndex.build([[1, 2, 3, 1, 2, 4], [1, 2, 3]], vocab_size=5)
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

    @cached_property
    def first(self) -> np.ndarray:
        """[V + 2] suffixes that begin with token t are order[first[t] : first[t + 1]]."""
        return np.append(0, np.cumsum(np.bincount(self.tokens, minlength=self.vocab_size + 1)))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.order, self.first

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.order.nbytes

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]], vocab_size: int, *, tokens_of: str = "") -> "RetrievalIndex":
        """Sort a corpus. documents: token ids.  tokens_of: fingerprint of the tokenizer, see `index_file.fingerprint`.

        Raises:
            InvalidInputError: no token at all, ids outside the vocabulary, or more than 2^32 tokens.
        """
        index_file.check_size(vocab_size)
        kind = np.uint16 if vocab_size < 65_535 else np.int32
        parts: list[np.ndarray] = []
        for number, document in enumerate(documents):
            new = np.asarray(document, np.int64)
            index_file.check_tokens(new, vocab_size, f"document {number} of the corpus")
            if len(new):
                parts.append(np.append(new, vocab_size).astype(kind))
        if not parts:
            raise InvalidInputError("an empty corpus was given; expected a document of at least one token.")
        tokens = np.concatenate(parts)
        if len(tokens) >= 1 << 32:
            raise InvalidInputError(f"a corpus of {len(tokens)} tokens was given; expected fewer than 2^32. Split it.")
        order = divsufsort(tokens).astype(np.uint32)  # a suffix that ends comes before those that go on
        for array in (tokens, order):
            array.flags.writeable = False
        return cls(tokens, order, vocab_size, tokens_of)

    def save(self, path: str | Path) -> None:
        """Write the index; see `index_file.save`."""
        arrays = {"tokens": self.tokens, "order": self.order}
        index_file.save(path, "retrieval", arrays, vocab_size=self.vocab_size, tokens_of=self.tokens_of)

    @classmethod
    def load(cls, path: str | Path) -> "RetrievalIndex":
        """Map an index from a file.

        Raises:
            InvalidInputError: what `index_file.load` refuses.
        """
        stored = index_file.load(path, "retrieval")
        return cls(stored.arrays["tokens"], stored.arrays["order"], stored.vocab_size, stored.tokens_of)

    def count(self, tokens: Sequence[int]) -> int:
        """Occurrences of a string of at least one token."""
        low, high = _interval(self.arrays, np.asarray(tokens, np.int64), 0)
        return int(high - low)


@njit(cache=True)
def _at(tokens, order, i, offset):
    """The token at an offset into the i-th suffix; -1 behind the end."""
    place = np.int64(order[i]) + offset
    return np.int64(tokens[place]) if place < len(tokens) else np.int64(-1)


@njit(cache=True)
def _bound(index, text, begin, low, above):
    """The first suffix from `low` on that is not below text[begin:], or (above) that is above all its continuations."""
    tokens, order, first = index
    high = first[text[begin] + 1]
    while low < high:
        middle = (low + high) // 2
        below = above
        for k in range(1, len(text) - begin):
            t = _at(tokens, order, middle, k)
            if t != text[begin + k]:
                below = t < text[begin + k]
                break
        if below:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _interval(index, text, begin):
    """The suffixes that begin with text[begin:]."""
    tokens, order, first = index
    if text[begin] >= len(first) - 2:
        return np.int64(0), np.int64(0)  # beyond the vocabulary
    low = _bound(index, text, begin, first[text[begin]], False)
    if low == first[text[begin] + 1]:
        return low, low
    for k in range(1, len(text) - begin):
        if _at(tokens, order, low, k) != text[begin + k]:
            return low, low
    return low, _bound(index, text, begin, low, True)


@njit(cache=True)
def _edge(tokens, order, low, high, offset, token, above):
    """The first suffix in low .. high whose token at the offset is not below `token`, or (above) is above it."""
    while low < high:
        middle = (low + high) // 2
        t = _at(tokens, order, middle, offset)
        if t < token or (above and t == token):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _longest(index, text, most, least):
    """Length of the longest end of the text that occurs, within the bounds; 0 if there is none. Ends of ends occur too."""
    low, high = least - 1, min(most, len(text))
    while low < high:
        m = (low + high + 1) // 2
        begin, end = _interval(index, text, len(text) - m)
        if begin < end:
            low = m
        else:
            high = m - 1
    return low if low >= least else 0


@njit(cache=True)
def _grow(tree, index, text, most, least, limits):
    """Continuations of the longest match, then of matches of half the length, and so on."""
    plant(tree, text[-1], limits)
    if is_full(tree):
        return
    tried = _longest(index, text, most, least)
    if tried:
        _draft(tree, index, text, tried, limits)
    m, trial = (tried + 1) // 2, (np.empty_like(tree[0]), tree[1])
    while m >= least and m != tried and not is_full(tree) and num_paths(tree) < limits[2]:
        _draft(trial, index, text, m, limits)
        copy_onto(tree, trial)
        m, tried = (m + 1) // 2, m


@njit(cache=True)
def _draft(trial, index, text, m, limits):
    """The most frequent continuations of the last m tokens, each scored by its share of its parent's occurrences."""
    tokens, order, first = index
    plant(trial, text[-1], limits)
    separator, room = len(first) - 2, 2 * PROBES * (limits[0] + 1)
    low, high, token = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    parents, hits, share = np.empty(room, np.int64), np.empty(room), np.empty(room)
    size, node = 0, 0
    begin, end = _interval(index, text, len(text) - m)
    while not is_full(trial):
        level, total, i, probe = trial[0][DEPTH, node], end - begin, begin, begin
        offset, step = m + level, max(1, total // PROBES)
        while level < limits[1] and probe < end:
            t = _at(tokens, order, probe, offset)
            last = _edge(tokens, order, probe + 1, end, offset, t, True)
            if t >= 0 and t != separator:
                low[size], high[size], token[size] = _edge(tokens, order, i, probe, offset, t, False), last, t
                parents[size], hits[size], share[size] = node, last - low[size], (last - low[size]) / total
                size += 1
            i = last
            probe = max(last, probe + step)
        added, node = add_best(trial, parents, hits, token, share, size)
        if added < 0:
            break
        begin, end = low[added], high[added]


class RetrievalDrafter(TextDrafter[TextState]):
    """REST over a corpus's index.

    max_match, min_match: longest and shortest end of the text that is looked up.  eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: unless 1 <= min_match <= max_match.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = RetrievalDrafter(RetrievalIndex.build([[1, 2, 3, 4, 5]], vocab_size=9))
        >>> states = drafter.start([Request("r", (7, 1, 2), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(4, 4)]).tree.tokens.tolist()
        [[2, 3, 4, 5]]
    """

    info = text_method("retrieval", "Retrieval from a corpus", "2311.08252")

    def __init__(
        self, index: RetrievalIndex, *, max_match: int = 16, min_match: int = 2, eos_token_ids: Sequence[int] = ()
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise InvalidInputError(
                f"min_match={min_match} and max_match={max_match} were given; expected 1 <= min_match <= max_match."
            )
        super().__init__(eos_token_ids)
        self.index, self.max_match, self.min_match = index, max_match, min_match

    @classmethod
    def build(cls, parts: Parts, *, index: str | Path | RetrievalIndex | None = None, **options: Any) -> "RetrievalDrafter":
        """For the engine. index: one, or a file of `polydraft index build --kind retrieval`; other options as the constructor.

        Raises:
            InvalidInputError: no index, or a file that is none.
            IncompatibleError: an index of another tokenizer.
        """
        if index is None:
            raise InvalidInputError(
                "the retrieval drafter was asked for without an index; expected a file of `polydraft index build --kind retrieval`. "
                "Give it with --index, or drafter_options={'index': ...}."
            )
        loaded = index if isinstance(index, RetrievalIndex) else RetrievalIndex.load(index)
        index_file.check_vocabulary(
            "the retrieval index", loaded.vocab_size, loaded.tokens_of, parts.target.vocab_size, parts.tokenizer
        )
        return cls(loaded, eos_token_ids=parts.eos_token_ids, **options)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> TextState:
        """Remember the text."""
        return TextState(list(map(int, tokens)))

    def continuations(self, state: TextState, budget: Budget) -> GrownTree:
        """Continuations of the longest match, then of shorter ones; the share of the occurrences is the score."""
        tree, text = (new_cells(budget), self._eos), np.array(state.tokens[-self.max_match :])
        _grow(tree, self.index.arrays, text, self.max_match, self.min_match, limits(budget))
        return GrownTree(tree)
