"""Prompt lookup: copy what followed the same words earlier in the text.

Saxena 2023 (prompt lookup decoding, no paper); Yang et al. 2023 (LLMA, arXiv 2304.04487).

The n-grams that end the text (n from `max_ngram` down to `min_ngram`) are looked up in an index that grows with the text: each
token adds one place to each n. The longest known suffix wins, then the latest place; further places open further paths, up to
the width, or lengthen a path that ended with the text, and all are merged into one tree by prefix.
Deterministic: there is no q, so drafts are POINT_MASS. A continuation may run into the suffix itself, never past the end.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from polydraft.core import Budget, Outcome, Request, Scores
from polydraft.drafters.grown_tree import GrownTree, add_node, is_full, limits, new_cells, plant
from polydraft.drafters.text.base import LEAD, TextDrafter, text_method
from polydraft.errors import InvalidInputError

MOST_PLACES = 8
"""Places of an n-gram that are looked at."""
ROOM = 256
"""Tokens of a new index."""
KNOWN, SHORTEST, LONGEST = range(3)


class NgramState:
    """The text of one request and, for each n-gram, the places of the tokens that followed it.

    arrays: text [T]; for the i-th length of n-grams, before[i, place]: the place of the same n-gram before this one, 0 where there is
    none, and latest[i]: a table from an n-gram to its latest place (it is known by the text before that place); about.
    Memory: for four lengths 52 to 104 bytes a token, as room is doubled.
    predicted: places of the prediction in the text.  cursor: the place there that the output follows, None where it does not.
    accepted_predictions: tokens of the output that followed it.
    """

    def __init__(self, min_ngram: int, max_ngram: int, predicted: range = range(0)) -> None:
        self.predicted, self.cursor, self.accepted_predictions = predicted, predicted.start if predicted else None, 0
        nothing = np.empty((0, 0), np.int32)
        self.arrays = np.empty(0, np.int32), nothing, nothing, np.array([0, min_ngram, max_ngram], np.int64)

    @property
    def num_tokens(self) -> int:
        return self.arrays[3].item(KNOWN)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    @property
    def tokens(self) -> list[int]:
        return self.arrays[0][: self.num_tokens].tolist()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append to the text and index it."""
        self.reserve(len(tokens))
        extend(self.arrays, np.array(tokens, np.int32))

    def reserve(self, count: int) -> None:
        """Make room for so many further tokens."""
        num_known = self.num_tokens
        text, _, _, about = self.arrays
        if num_known + count > len(text):
            room = max(ROOM, 1 << (num_known + count - 1).bit_length())
            _, low, high = about.tolist()
            before, latest = np.empty((high - low + 1, room), np.int32), np.zeros((high - low + 1, 2 * room), np.int32)
            about[KNOWN] = 0
            self.arrays = np.empty(room, np.int32), before, latest, about
            extend(self.arrays, text[:num_known])

    def follow(self, tokens: Sequence[int]) -> None:
        """Append what was emitted, and count what of it the prediction says."""
        for token in tokens:
            follows = self.cursor in self.predicted and self.arrays[0][self.cursor] == token
            self.accepted_predictions += follows
            self.extend([token])
            if follows and self.cursor is not None:
                self.cursor += 1
            else:
                self.cursor = next((at for _, at in self.places() if at in self.predicted), None)

    def places(self) -> list[tuple[int, int]]:
        """(length, place) where a suffix of the text was followed before: longest suffix first, then the latest place."""
        _, low, high = self.arrays[3].tolist()
        matches = np.empty((MOST_PLACES * (high - low + 1), 2), np.int64)
        return [(n, at) for n, at in matches[: _places(self.arrays, matches)].tolist()]


@njit(cache=True)
def _slot(text, latest, end, n):
    """Where the n-gram before `end` is in the table, or would be."""
    mixed = np.uint64(n)
    for k in range(end - n, end):
        mixed = (mixed ^ np.uint64(text[k])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    slot = np.int64(mixed >> np.uint64(20)) & (len(latest) - 1)
    while latest[slot]:
        at, same = latest[slot], True
        for k in range(1, n + 1):
            if text[at - k] != text[end - k]:
                same = False
                break
        if same:
            break
        slot = (slot + 1) & (len(latest) - 1)
    return slot


@njit(cache=True)
def extend(index, tokens):
    """Append tokens to an index with room for them."""
    text, before, latest, about = index
    for token in tokens:
        at = about[KNOWN]
        for n in range(about[SHORTEST], min(about[LONGEST], at) + 1):
            i = n - about[SHORTEST]
            slot = _slot(text, latest[i], at, n)
            before[i, at], latest[i, slot] = latest[i, slot], at
        text[at] = token
        about[KNOWN] += 1


@njit(cache=True)
def last_place(index, n):
    """The latest place where the n-gram that ends the text was followed before, or 0; n is a length of the index."""
    text, _, latest, about = index
    i = n - about[SHORTEST]
    return latest[i, _slot(text, latest[i], about[KNOWN], n)] if about[KNOWN] >= n else 0


@njit(cache=True)
def _places(index, found):
    """Fill in (length, place); returns how many."""
    _, before, _, about = index
    num = 0
    for n in range(min(about[LONGEST], about[KNOWN]), about[SHORTEST] - 1, -1):
        i, at = n - about[SHORTEST], last_place(index, n)
        for _ in range(MOST_PLACES):
            if not at:
                break
            found[num, 0], found[num, 1] = n, at
            num += 1
            at = before[i, at]
    return num


@njit(cache=True)
def _grow(tree, index, limits):
    text, about = index[0], index[3]
    plant(tree, text[about[KNOWN] - 1], limits)
    matches = np.empty((MOST_PLACES * (about[LONGEST] - about[SHORTEST] + 1), 2), np.int64)
    for f in range(_places(index, matches)):
        if is_full(tree):
            break
        score, node = 1 - 0.6 ** matches[f, 0], 0
        for at in range(matches[f, 1], about[KNOWN]):
            node = add_node(tree, node, np.int64(text[at]), score)
            if node < 0:
                break


class NgramDrafter(TextDrafter[NgramState]):
    """Prompt lookup over prompt and output of each request alone: continuations of the known suffixes, merged by prefix.

    The first ones make the paths, later ones may lengthen them; scores grow with the length of the match.
    max_ngram, min_ngram: longest and shortest suffix to look up.  eos_token_ids: a draft ends at one.

    Raises:
        InvalidInputError: unless 1 <= min_ngram <= max_ngram.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = NgramDrafter()
        >>> states = drafter.start([Request("r", (5, 6, 7, 8, 5, 6), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(3, 3)]).tree.tokens.tolist()
        [[6, 7, 8, 5]]
    """

    info = text_method("ngram", "Prompt lookup", "2304.04487", authors="Saxena; Yang et al.")

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, eos_token_ids: Sequence[int] = ()) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidInputError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} were given; expected 1 <= min_ngram <= max_ngram."
            )
        super().__init__(eos_token_ids)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> NgramState:
        """Index the text."""
        lead, size = len(request.source_token_ids) + len(request.prompt_token_ids[-LEAD:]), len(request.prediction_token_ids)
        state = NgramState(self.min_ngram, self.max_ngram, range(lead, lead + size))
        state.extend(tokens)
        return state

    def observe(self, states: Sequence[NgramState], outcome: Outcome, scores: Scores) -> list[NgramState]:
        """Go on with what was emitted, along the prediction where there is one."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            state.follow(tokens) if state.predicted else state.extend(tokens)
        return list(states)

    def report(self, state: NgramState) -> dict[str, float]:
        """What became of the prediction; see `base.Reporting`."""
        return {"accepted_predictions": state.accepted_predictions} if state.predicted else {}

    def continuations(self, state: NgramState, budget: Budget) -> GrownTree:
        """See the class; an unknown suffix has none."""
        tree = new_cells(budget), self._eos
        _grow(tree, state.arrays, limits(budget))
        return GrownTree(tree)
