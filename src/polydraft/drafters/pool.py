"""Phrases by the token before them: the memory of Lookahead decoding and of Ouroboros."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from polydraft.drafters.growth import GrownTree
from polydraft.errors import InvalidInputError

__all__ = ["PhrasePool"]


class PhrasePool:
    """For each token, the latest distinct phrases that followed it. Bounded; may be used by several threads at a time.

    length: tokens of a phrase; shorter ones are not stored.  per_token: phrases of a token, the oldest leaves first.
    max_tokens: tokens that have phrases; the one longest without a new phrase leaves first.

    Example:
        >>> pool = PhrasePool(2, per_token=2)
        >>> for phrase in ((1, 2), (3, 4), (1, 2), (5, 6), (7,)):
        ...     pool.add(9, phrase)
        >>> list(pool.latest(9))
        [(5, 6), (1, 2)]
    """

    def __init__(self, length: int = 4, per_token: int = 20, max_tokens: int = 4096) -> None:
        if min(length, per_token, max_tokens) < 1:
            raise InvalidInputError(
                f"length={length}, per_token={per_token} and max_tokens={max_tokens} were given; expected at least 1 each."
            )
        self.length, self.per_token, self.max_tokens, self.lock = length, per_token, max_tokens, threading.RLock()
        self._phrases: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._phrases.values()))

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Store what followed a token, as the latest; too short a phrase is passed over, a longer one is cut."""
        if len(phrase) < self.length:
            return
        key = tuple(phrase[: self.length])
        with self.lock:
            own = self._phrases.setdefault(token, OrderedDict())
            self._phrases.move_to_end(token)
            own[key] = None
            own.move_to_end(key)
            if len(own) > self.per_token:
                own.popitem(last=False)
            if len(self._phrases) > self.max_tokens:
                self._phrases.popitem(last=False)

    def read(self, text: Sequence[int], since: int = 0) -> None:
        """Store all phrases of a text that end at or behind a position."""
        with self.lock:
            for i in range(max(0, since - self.length), len(text) - self.length):
                self.add(text[i], text[i + 1 : i + 1 + self.length])

    def latest(self, token: int) -> Iterator[tuple[int, ...]]:
        """The phrases of a token, latest first."""
        with self.lock:
            yield from reversed(tuple(self._phrases.get(token, ())))

    def hang(self, grown: GrownTree, node: int, count: int) -> list[int]:
        """Hang up to `count` phrases on a node, latest first; returns the nodes where they end."""
        ends = []
        for phrase, _ in zip(self.latest(grown.tokens[node]), range(count), strict=False):
            end = grown.add_path(phrase, node, score=1 / (2 + len(ends)))
            if end != node:
                ends.append(end)
        return ends

    def lengthen(self, grown: GrownTree, ends: Sequence[int]) -> None:
        """Go on from each of these nodes, phrase by phrase, the latest one each time, until the tree is full."""
        for end in ends:
            while not grown.full and (further := self.hang(grown, end, 1)):
                end = further[0]

    def to_array(self) -> np.ndarray:
        """[P, 1 + length] token and phrase, in the order in which they would leave."""
        with self.lock:
            rows = [(token, *phrase) for token, own in self._phrases.items() for phrase in own]
        return np.array(rows, np.int64).reshape(len(rows), 1 + self.length)

    def fill(self, rows: np.ndarray) -> "PhrasePool":
        """Store what `to_array` gave; returns itself."""
        for row in rows.tolist():
            self.add(row[0], row[1:])
        return self
