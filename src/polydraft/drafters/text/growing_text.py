"""A text that is sorted as it grows: what `suffix_array` looks up in the text of a request.

Its ends stay out of the order while they may still go on like another place. A new token narrows their intervals; an end whose interval is
empty, or that is as long as the depth, enters the order, where no later token moves it.
"""

from collections.abc import Sequence

import numpy as np

from polydraft.drafters.text.suffix_array import (
    ABOUT,
    INTERVAL,
    NO_SEPARATOR,
    NO_TABLE,
    Suffixes,
    count,
    find,
    narrow,
    sort_suffixes,
)
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

Tokens = Sequence[int] | np.ndarray
ROOM = 256
"""Tokens of a new text."""
FEW = 512
"""Tokens that are appended one by one; more are sorted together with the text."""


@njit(cache=True)
def extend(index, tokens):
    """Append to a growing text with room for it; returns the smallest token, and does nothing if that is negative."""
    text = index.text
    order = index.order
    pending = index.pending
    about = index.about[0]
    smallest = np.int64(0)
    for token in tokens:
        smallest = min(smallest, np.int64(token))
    if smallest < 0:
        return smallest
    for token in tokens:
        text[about.length] = token
        about.length += 1
        num = about.num_pending + 1
        entered = 0
        pending[num - 1].low = 0
        pending[num - 1].high = about.num_sorted
        for j in range(num):
            m = num - 1 - j
            low = pending[j].low
            begin, end = narrow(text, order, about.length, low, pending[j].high, m, np.int64(token))
            if begin < end and m + 1 < about.depth:
                pending[j - entered].low = begin
                pending[j - entered].high = end
                continue
            entered += 1  # longer ends have entered too
            for i in range(about.num_sorted, begin, -1):
                order[i] = order[i - 1]
            order[begin] = about.length - 1 - m
            about.num_sorted += 1
            for i in range(j + 1, num):
                within = pending[i].low <= low < pending[i].high
                pending[i].low += not within and begin <= pending[i].low
                pending[i].high += within or begin < pending[i].high
        about.num_pending = num - entered
    return smallest


@njit(cache=True)
def settle(index):
    """Take the pending ends out of the order of all suffixes of a growing text."""
    text = index.text
    order = index.order
    pending = index.pending
    about = index.about[0]
    length = about.length
    longest = 0
    tokens = text[max(0, length - about.depth + 1) : length]
    about.num_sorted = length
    about.num_pending = 0
    while longest < len(tokens):
        low, high = find(index, tokens, len(tokens) - longest - 1)
        if high - low < 2:
            break
        longest += 1
    about.num_sorted = 0
    for i in range(length):
        if order[i] < length - longest:
            order[about.num_sorted] = order[i]
            about.num_sorted += 1
    for i in range(longest):
        pending[i].low, pending[i].high = find(index, tokens, len(tokens) - longest + i)
    about.num_pending = longest


class GrowingText:
    """The text of one request, sorted as it grows. arrays: for compiled callers.

    depth: longest string that is counted.  Memory: at most 16 bytes a token.

    Example:
        >>> text = GrowingText(depth=8)
        >>> text.extend([1, 2, 3, 1, 2, 4])
        >>> text.count([1, 2]), text.count([2, 3]), text.count([3, 4])
        (2, 1, 0)
    """

    def __init__(self, depth: int = 64) -> None:
        check_depth(depth)
        about = np.array([(0, 0, 0, depth, NO_SEPARATOR)], ABOUT)
        self.arrays = Suffixes(
            np.empty(ROOM, np.int32), np.empty(ROOM, np.uint32), NO_TABLE, np.empty(depth, INTERVAL), about
        )

    @property
    def num_tokens(self) -> int:
        return self.arrays.about["length"].item()

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @property
    def tokens(self) -> np.ndarray:
        """[T] a view of the text."""
        return self.arrays.text[: self.num_tokens]

    def reserve(self, num_further: int) -> None:
        """Make room for so many further tokens."""
        length = self.num_tokens
        arrays = self.arrays
        if length + num_further > len(arrays.text):
            room = 1 << (length + num_further - 1).bit_length()
            self.arrays = arrays._replace(
                text=np.resize(arrays.text, room), order=np.resize(arrays.order, room)
            )

    def extend(self, tokens: Tokens) -> None:
        """Append to the text, whose order is made anew for many tokens.

        Raises:
            InvalidInputError: negative ids.
        """
        new = np.array(tokens, np.int32)
        self.reserve(len(new))
        if len(new) <= FEW:
            smallest = extend(self.arrays, new)
        elif (smallest := new.min()) >= 0:
            self.arrays.text[self.num_tokens : self.num_tokens + len(new)] = new
            self.arrays.about["length"] += len(new)
            self.arrays.order[: self.num_tokens] = sort_suffixes(self.tokens)
            settle(self.arrays)
        if smallest < 0:
            raise InvalidInputError(
                f"token id {smallest} was given; expected ids >= 0. Use the target's own tokenizer."
            )

    def count(self, tokens: Tokens) -> int:
        """Occurrences of a string of 1 to `depth` tokens."""
        return count(self.arrays, np.asarray(tokens, np.int32))


def check_depth(depth: int) -> None:
    """Raise InvalidInputError for a depth that no text may have."""
    if not 2 <= depth <= 1024:
        raise InvalidInputError(f"depth={depth} was given; expected 2 <= depth <= 1024.")
