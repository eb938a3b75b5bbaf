"""How far the end of a text repeats what stands in it before, and how often a token that is copied from there is right.

A match is the longest repeat among the latest places of the last GRAM tokens, in the prediction of the request where it stands there. It is
followed as long as the text goes on as it did there, and looked up anew otherwise: a function of committed tokens alone. Acceptance is counted
of every emitted token that a match foretold, drafted or not, by the length of the match: nothing is tried out to learn it.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from polydraft.core import Request
from polydraft.drafters.text.base import predicted_text
from polydraft.drafters.text.growing_text import GrowingText, extend
from polydraft.drafters.text.ngram import MOST_PLACES
from polydraft.drafters.text.suffix_array import latest_places
from polydraft.numerics.compiled_code import njit
from polydraft.policy.costs import Costs
from polydraft.policy.marginal import Weighed

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
MOST_COPIED = 16
"""Tokens of the text that are verified at once, at most."""


class Predicted(NamedTuple):
    """Where the prediction of the request stands in the text."""

    begin: int
    end: int


MATCH = np.dtype([("place", np.int64), ("length", np.int64)])
"""Where the end of the text stands before, and how many tokens of it; length 0 without one. place: behind them."""
COUNTS = np.dtype([("tries", np.float64), ("hits", np.float64)])
"""Tokens that matches of a lane foretold, and those of them that were emitted."""


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
        self._predicted = Predicted(len(before) - len(request.prediction_token_ids), len(before))
        self._matches = np.zeros(1, MATCH)
        self._counts = np.zeros(2 * LANES, COUNTS)
        self._num_read = 0
        self._longest = GRAM

    @property
    def length(self) -> int:
        return int(self._matches[0]["length"])

    def read(self, token_ids: Sequence[int]) -> None:
        """Go on to the end of a text; what comes after the first call is counted."""
        tokens = np.array(token_ids[self._num_read :], np.int32)
        counted = self._num_read > 0
        self._num_read = len(token_ids)
        if counted:
            self._text.reserve(len(tokens))
            _read(self._text.arrays, tokens, self._matches, self._counts, self._predicted)
        elif len(tokens):
            self._text.extend(tokens)
            _look_up(self._text.arrays, self._matches, self._predicted)

    def tokens(self, most: int) -> tuple[int, ...]:
        """What followed the match, at most so many tokens."""
        place = int(self._matches[0]["place"])
        return tuple(self._text.tokens[place : place + most].tolist()) if self.length else ()

    def acceptance(self, most: int = 1) -> list[float]:
        """Of each of so many tokens behind the match, once those before it were accepted."""
        place, length = self._matches[0].item()
        rates = (self._counts["hits"] + STRENGTH * np.array(PRIOR)) / (self._counts["tries"] + STRENGTH)
        return [rates.item(_lane(length + k, place, self._predicted)) for k in range(most)]

    def doubles(self) -> bool:
        """Whether the end of the text repeats twice as many tokens as ever before, or more."""
        if self.length < 2 * self._longest:
            return False
        self._longest = self.length
        return True


@njit(cache=True)
def _lane(length, place, predicted):
    lane = 0
    most = 2 * GRAM
    while length >= most and lane < LANES - 1:
        lane = lane + 1
        most = 2 * most
    return lane + LANES if predicted.begin <= place < predicted.end else lane


@njit(cache=True)
def _look_up(index, matches, predicted):
    """The longest match of the latest places, or the latest one in the prediction."""
    text = index.text
    end = index.about[0].length
    places = np.empty(MOST_PLACES, np.int64)
    match = matches[0]
    match.length = 0
    for place in places[: latest_places(index, GRAM, places)]:
        length = GRAM
        while length < min(place, MOST) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        within = predicted.begin <= place < predicted.end
        if within or length > match.length:
            match.place = place
            match.length = length
        if within:
            break


@njit(cache=True)
def _read(index, tokens, matches, counts, predicted):
    match = matches[0]
    for i in range(len(tokens)):
        if match.length:
            right = index.text[match.place] == tokens[i]
            lane = _lane(match.length, match.place, predicted)
            counts[lane].tries += 1.0
            counts[lane].hits += right
            match.place = match.place + 1
            match.length = match.length + 1 if right else 0
        extend(index, tokens[i : i + 1])
        if not match.length:
            _look_up(index, matches, predicted)


def worth_copying(repeats: Repeats, weighed: Weighed, costs: Costs, max_step: float = inf) -> tuple[int, ...]:
    """Tokens behind the match that are worth their rows of the forward pass; none where the draft of a model promises more.

    weighed: what that was weighed by.  max_step: seconds that a step may take.
    """
    speed, rows, draft_gain = weighed
    # a draft model reads what it did not draft
    reading = speed * costs.draft_step * costs.row(1) / costs.rows(1)
    reach = 1.0
    value = 0.0
    count = 0
    tokens = repeats.tokens(MOST_COPIED)
    for acceptance in repeats.acceptance(len(tokens)):
        reach *= acceptance
        is_dear = reach * (1.0 - reading) < speed * costs.row(rows + count)
        if is_dear or costs.step(rows + count + 1, 0) > max_step:
            break
        value += reach * (1.0 - reading)
        count += 1
    gain = value - speed * (costs.rows(rows + count) - costs.rows(rows))
    return tokens[:count] if gain > max(draft_gain, 0.0) else ()
