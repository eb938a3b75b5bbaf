"""Phrases by the token before them: the memory of Lookahead decoding and of Ouroboros."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget
from polydraft.drafters.grown_tree import GrownTree, add_node, is_full, limits, new_tree, plant
from polydraft.numerics.compiled_code import njit
from polydraft.papers.entry_table import Table, claim, find, lift, seat


class PhrasePool(Table):
    """For each token, the latest distinct phrases that followed it, the latest first. May be used by several threads at a time.

    length: tokens of a phrase; shorter ones are not stored.  per_token: phrases of a token, the oldest leaves first.
    max_tokens: tokens that have phrases; the one longest without a new phrase leaves first.
    Memory: 32 + 4 * per_token * length bytes a token that has phrases.

    Example:
        >>> pool = PhrasePool(2, per_token=2)
        >>> for phrase in ((1, 2), (3, 4), (1, 2), (5, 6), (7,)):
        ...     pool.add(9, phrase)
        >>> pool.latest(9)
        [(5, 6), (1, 2)]
    """

    def __init__(self, length: int = 4, per_token: int = 20, max_tokens: int = 4096) -> None:
        super().__init__(max_tokens, per_token, length)
        self.length = length

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Store what followed a token, as the latest; too short a phrase is passed over, a longer one is cut."""
        with self.lock:
            add_phrase(self.arrays, self.length, token, np.array(phrase, np.int64))

    def read(self, text: Sequence[int], since: int = 0) -> None:
        """Store all phrases of a text that end at or behind a position."""
        with self.lock:
            read_text(self.arrays, self.length, np.array(text[max(0, since - self.length) :], np.int64))

    def latest(self, token: int) -> list[tuple[int, ...]]:
        """The phrases of a token, latest first."""
        return [tuple(phrase) for phrase in self.entries(token).tolist()]

    def hang(self, grown: GrownTree, node: int, count: int) -> None:
        """Hang up to `count` phrases on a node, latest first."""
        with self.lock:
            _hang(self.arrays, self.length, grown.arrays, node, count)

    def continuations(self, root: int, budget: Budget, eos: np.ndarray) -> GrownTree:
        """Up to `budget.width` phrases of the root, each going on phrase by phrase, the latest one each time."""
        tree = new_tree(budget, eos)
        with self.lock:
            _grow(self.arrays, self.length, tree, root, limits(budget))
        return GrownTree(tree)


@njit(cache=True)
def add_phrase(pool, length, token, phrase):
    """`PhrasePool.add`, for compiled callers."""
    if len(phrase) >= length:
        at = claim(pool, token)
        lift(pool, at, seat(pool, at, phrase, length), 0)


@njit(cache=True)
def read_text(pool, length, text):
    """Store all phrases of a text."""
    for i in range(len(text) - length):
        add_phrase(pool, length, text[i], text[i + 1 : i + 1 + length])


@njit(cache=True)
def _hang(pool, length, tree, node, count):
    """Hang up to `count` phrases on a node, latest first; returns the nodes where they end, -1 behind them."""
    path_ends = np.full(max(count, 1), -1, np.int64)
    num = 0
    at = find(pool, tree.nodes[node].token)
    for i in range(min(pool.links[at].num_entries, count) if at >= 0 else 0):
        end = np.int64(node)
        for k in range(length):
            further = add_node(tree, end, np.int64(pool.entries[at, i, k]), 1 / (2 + num))
            if further < 0:
                break
            end = further
        if end != node:
            path_ends[num] = end
            num += 1
    return path_ends


@njit(cache=True)
def _grow(pool, length, tree, root, limits):
    plant(tree, root, limits)
    for end in _hang(pool, length, tree, 0, limits.width):
        while end >= 0 and not is_full(tree):
            end = _hang(pool, length, tree, end, 1)[0]


def most_likely(logits: Float[np.ndarray, "B N V"], last: int = 0) -> np.ndarray:
    """[B, N] the target's argmaxes, the first one of equals. last: of so many rows at the end only; 0: of all.

    Example:
        >>> most_likely(np.array([[[0.0, 2.0, 1.0]]])).tolist()
        [[1]]
    """
    return logits[:, -last:].argmax(-1)
