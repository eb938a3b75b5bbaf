"""How far the end of a text repeats what stands in it before, and how often a token that is copied from there is right.

A match is the longest repeat among the latest places of the last GRAM tokens, in the prediction of the request where it stands there. It is
followed as long as the text goes on as it did there, and looked up anew otherwise: a function of committed tokens alone. Acceptance is counted
of every emitted token that a match foretold, drafted or not, by the length of the match: nothing is tried out to learn it.
"""

from collections.abc import Sequence

import numpy as np

from polydraft.core import Request
from polydraft.drafters.text.base import predicted_text
from polydraft.drafters.text.ngram import MOST_PLACES
from polydraft.drafters.text.suffix_array import GrowingText, extend, latest_places
from polydraft.numerics.compiled_code import njit

__all__ = ["GRAM", "Repeats"]

GRAM = 4
"""Tokens of the shortest repeat that counts."""
MOST = 64
"""Tokens of a match that are counted where it is looked up."""
LANES = 5
"""Matches of 4 to 7 tokens, of 8 to 15, and so on; as many lanes again in the prediction."""
PRIOR = (0.6, 0.8, 0.9, 0.97, 0.98, 0.8, 0.9, 0.95, 0.97, 0.98)
"""Acceptance where nothing was counted, by lane. Qwen2.5-Coder-1.5B at temperatures 0 and 1: .69, .79, .89 on chat, .83, .96, .99 and above on edits of code."""
STRENGTH = 8.0
"""Tokens that a prior counts for."""
PLACE, LENGTH = range(2)


class Repeats:
    """The repeats of one request's text, which only grows. length: of the match; 0 without one.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> repeats = Repeats(Request("r", (1, 2, 3, 4, 5, 9, 1, 2, 3, 4), SamplingParams(), seed=0))
        >>> repeats.read([1, 2, 3, 4, 5, 9, 1, 2, 3, 4])
        >>> repeats.length, repeats.tokens(3), round(repeats.acceptance()[0], 2)
        (4, (5, 9, 1), 0.6)
        >>> repeats.read([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5])
        >>> repeats.length, round(repeats.acceptance()[0], 2)
        (5, 0.64)
    """

    def __init__(self, request: Request) -> None:
        before = (*request.source_token_ids, *predicted_text(request))
        self._text = GrowingText(GRAM + 1)
        self._text.extend(before)
        self._predicted = np.array([len(before) - len(request.prediction_token_ids), len(before)])
        self._match, self._counts = np.zeros(2, np.int64), np.zeros((2, 2 * LANES))
        self._num_read, self._longest = 0, GRAM

    @property
    def length(self) -> int:
        return self._match.item(LENGTH)

    def read(self, token_ids: Sequence[int]) -> None:
        """Go on to the end of a text; what comes after the first call is counted."""
        tokens, counted = np.array(token_ids[self._num_read :], np.int32), self._num_read > 0
        self._num_read = len(token_ids)
        if counted:
            self._text.reserve(len(tokens))
            _read(self._text.arrays, tokens, self._match, self._counts, self._predicted)
        elif len(tokens):
            self._text.extend(tokens)
            _look_up(self._text.arrays, self._match, self._predicted)

    def tokens(self, most: int) -> tuple[int, ...]:
        """What followed the match, at most so many tokens."""
        place = self._match.item(PLACE)
        return tuple(self._text.tokens[place : place + most].tolist()) if self.length else ()

    def acceptance(self, most: int = 1) -> list[float]:
        """Of each of so many tokens behind the match, once those before it were accepted."""
        place, length = self._match.tolist()
        tries, hits = self._counts
        rates = (hits + STRENGTH * np.array(PRIOR)) / (tries + STRENGTH)
        return [rates.item(_lane(length + k, place, self._predicted)) for k in range(most)]

    def doubles(self) -> bool:
        """Whether the end of the text repeats at least twice as many tokens as ever before."""
        if self.length < 2 * self._longest:
            return False
        self._longest = self.length
        return True


@njit(cache=True)
def _lane(length, place, predicted):
    lane, most = 0, 2 * GRAM
    while length >= most and lane < LANES - 1:
        lane, most = lane + 1, 2 * most
    return lane + LANES if predicted[0] <= place < predicted[1] else lane


@njit(cache=True)
def _look_up(index, match, predicted):
    """The longest match of the latest places, or the latest one in the prediction."""
    text, end, places = index.text, index.about[0].length, np.empty(MOST_PLACES, np.int64)
    match[:] = 0
    for place in places[: latest_places(index, GRAM, places)]:
        length = GRAM
        while length < min(place, MOST) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        within = predicted[0] <= place < predicted[1]
        if within or length > match[LENGTH]:
            match[PLACE], match[LENGTH] = place, length
        if within:
            break


@njit(cache=True)
def _read(index, tokens, match, counts, predicted):
    for i in range(len(tokens)):
        if match[LENGTH]:
            right = index.text[match[PLACE]] == tokens[i]
            lane = _lane(match[LENGTH], match[PLACE], predicted)
            counts[0, lane] += 1.0
            counts[1, lane] += right
            match[:] = (match[PLACE] + 1, match[LENGTH] + 1) if right else (0, 0)
        extend(index, tokens[i : i + 1])
        if not match[LENGTH]:
            _look_up(index, match, predicted)
