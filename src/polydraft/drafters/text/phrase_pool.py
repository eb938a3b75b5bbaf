"""Phrases by the token before them: the memory of Lookahead decoding and of Ouroboros."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from polydraft.core import Budget
from polydraft.drafters.grown_tree import TOKEN, GrownTree, add_node, is_full, limits, new_cells, plant
from polydraft.drafters.text.lru import find, insert, new_index, touch
from polydraft.errors import InvalidInputError


class PhrasePool:
    """For each token, the latest distinct phrases that followed it. Bounded; may be used by several threads at a time.

    length: tokens of a phrase; shorter ones are not stored.  per_token: phrases of a token, the oldest leaves first.
    max_tokens: tokens that have phrases; the one longest without a new phrase leaves first.
    arrays: (index, sizes [R], phrases [R, per_token, length], oldest first), for compiled drafters.
    Memory: 32 + 4 * per_token * length bytes a token that has phrases.

    Example:
        >>> pool = PhrasePool(2, per_token=2)
        >>> for phrase in ((1, 2), (3, 4), (1, 2), (5, 6), (7,)):
        ...     pool.add(9, phrase)
        >>> pool.latest(9)
        [(5, 6), (1, 2)]
    """

    def __init__(self, length: int = 4, per_token: int = 20, max_tokens: int = 4096) -> None:
        if min(length, per_token, max_tokens) < 1:
            raise InvalidInputError(
                f"length={length}, per_token={per_token} and max_tokens={max_tokens} were given; expected at least 1 each."
            )
        self.length, self.per_token, self.max_tokens, self.lock = length, per_token, max_tokens, threading.RLock()
        phrases = np.empty((max_tokens, per_token, length), np.int32)
        self.arrays = new_index(max_tokens), np.zeros(max_tokens, np.int32), phrases

    def __len__(self) -> int:
        return int(self.arrays[1].sum())

    def add(self, token: int, phrase: Sequence[int]) -> None:
        """Store what followed a token, as the latest; too short a phrase is passed over, a longer one is cut."""
        with self.lock:
            add_phrase(self.arrays, token, np.array(phrase, np.int64))

    def read(self, text: Sequence[int], since: int = 0) -> None:
        """Store all phrases of a text that end at or behind a position."""
        with self.lock:
            read_text(self.arrays, np.array(text[max(0, since - self.length) :], np.int64))

    def latest(self, token: int) -> list[tuple[int, ...]]:
        """The phrases of a token, latest first."""
        index, sizes, phrases = self.arrays
        with self.lock:
            at = find(index, token)
            return [] if at < 0 else [tuple(p) for p in phrases[at, : sizes[at]][::-1].tolist()]

    def hang(self, grown: GrownTree, node: int, count: int) -> None:
        """Hang up to `count` phrases on a node, latest first."""
        with self.lock:
            _hang(self.arrays, grown.arrays, node, count)

    def continuations(self, root: int, budget: Budget, eos: np.ndarray) -> GrownTree:
        """Up to `budget.width` phrases of the root, each going on phrase by phrase, the latest one each time."""
        tree = new_cells(budget), eos
        with self.lock:
            _grow(self.arrays, tree, root, limits(budget))
        return GrownTree(tree)


@njit(cache=True)
def add_phrase(pool, token, phrase):
    """`PhrasePool.add`, for compiled callers."""
    index, sizes, phrases = pool
    length = phrases.shape[2]
    if len(phrase) < length:
        return
    at = find(index, token)
    if at < 0:
        at = insert(index, token)
        sizes[at] = 0
    else:
        touch(index, at)
    pool_phrases, size = phrases[at], sizes[at]
    gone = 0  # the phrase itself, if it is there; else the oldest one, if there is no room
    while gone < size:
        k = 0
        while k < length and pool_phrases[gone, k] == phrase[k]:
            k += 1
        if k == length:
            break
        gone += 1
    if gone == size and size == len(pool_phrases):
        gone = 0
    if gone < size:
        for i in range(gone, size - 1):
            pool_phrases[i] = pool_phrases[i + 1]
        size -= 1
    for k in range(length):
        pool_phrases[size, k] = phrase[k]
    sizes[at] = size + 1


@njit(cache=True)
def read_text(pool, text):
    """Store all phrases of a text."""
    length = pool[2].shape[2]
    for i in range(len(text) - length):
        add_phrase(pool, text[i], text[i + 1 : i + 1 + length])


@njit(cache=True)
def _hang(pool, tree, node, count):
    """Hang up to `count` phrases on a node, latest first; returns the nodes where they end, -1 behind them."""
    index, sizes, phrases = pool
    path_ends, num = np.full(max(count, 1), -1, np.int64), 0
    at = find(index, tree[0][TOKEN, node])
    if at >= 0:
        for i in range(sizes[at] - 1, max(-1, sizes[at] - 1 - count), -1):
            end = np.int64(node)
            for k in range(phrases.shape[2]):
                further = add_node(tree, end, np.int64(phrases[at, i, k]), 1 / (2 + num))
                if further < 0:
                    break
                end = further
            if end != node:
                path_ends[num] = end
                num += 1
    return path_ends


@njit(cache=True)
def _grow(pool, tree, root, limits):
    plant(tree, root, limits)
    for end in _hang(pool, tree, 0, limits[2]):
        while end >= 0 and not is_full(tree):
            end = _hang(pool, tree, end, 1)[0]


def most_likely(logits: Float[Tensor, "B N V"], last: int = 0) -> np.ndarray:
    """[B, N] the target's argmaxes, the first one of equals. last: of so many rows at the end only; 0: of all.

    Example:
        >>> most_likely(torch.tensor([[[0.0, 2.0, 1.0]]])).tolist()
        [[1]]
    """
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return logits.detach().numpy()[:, -last:].argmax(-1)  # in vector registers, which torch's is not
    return logits[:, -last:].argmax(-1).cpu().numpy()
