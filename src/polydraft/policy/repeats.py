"""How long the end of a text repeats what stands in it before: what a text drafter could copy from. A few microseconds a step."""

from collections.abc import Sequence

__all__ = ["Repeats"]

GRAM = 4
"""Tokens of the shortest repeat that counts."""


class Repeats:
    """The repeats of one text, which only grows.

    longest: of those so far; the first that counts as longer has twice GRAM tokens.

    Example:
        >>> repeats = Repeats()
        >>> repeats.doubles([1, 2, 3, 4, 5, 6, 7, 8, 9]), repeats.doubles([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8])
        (False, True)
    """

    def __init__(self) -> None:
        self.longest = GRAM
        self._read, self._earlier, self._length = 0, 0, 0
        """Tokens so far; where the text that their end repeats stops, and how many tokens are repeated."""
        self._ends: dict[tuple[int, ...], int] = {}

    def doubles(self, token_ids: Sequence[int]) -> bool:
        """Whether the end of the text repeats at least twice as many tokens as ever before."""
        for end in range(self._read + 1, len(token_ids) + 1):
            gram = tuple(token_ids[max(end - GRAM, 0) : end])
            if self._length and token_ids[self._earlier] == gram[-1]:
                self._earlier, self._length = self._earlier + 1, self._length + 1
            else:
                self._earlier, self._length = self._ends.get(gram, 0), 0
                while (
                    self._length < min(self._earlier, 2 * self.longest)
                    and token_ids[self._earlier - 1 - self._length] == token_ids[end - 1 - self._length]
                ):
                    self._length += 1
            self._ends[gram] = end
        self._read = len(token_ids)
        if self._length < 2 * self.longest:
            return False
        self.longest = self._length
        return True
