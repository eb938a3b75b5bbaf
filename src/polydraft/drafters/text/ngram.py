"""Prompt lookup: copy what followed the same words earlier in the text.

Saxena 2023 (prompt lookup decoding, no paper); Yang et al. 2023 (LLMA, arXiv 2304.04487).

The n-grams that end the text (n from `max_ngram` down to `min_ngram`) are looked up in its suffix array. The longest known suffix wins, then the latest place; further places open further paths, up to
the width, or lengthen a path that ended with the text, and all are merged into one tree by prefix.
Deterministic: there is no q, so drafts are POINT_MASS. A continuation may run into the suffix itself, never past the end.
"""

from collections.abc import Sequence

import numpy as np

from polydraft.core import Account, Budget, Offers, Outcome, Request, Scores
from polydraft.drafters.grown_tree import GrownTree, add_node, is_full, limits, new_tree, plant
from polydraft.drafters.text.base import LEAD, TextDrafter, text_method
from polydraft.drafters.text.growing_text import GrowingText
from polydraft.drafters.text.suffix_array import latest_places
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

MOST_PLACES = 8
"""Places of an n-gram that are looked at."""


class NgramState(GrowingText):
    """The text of one request, sorted by its n-grams.

    predicted: places of the prediction in the text.  place: the one there that the output follows, None where it does not.
    accepted_predictions: tokens of the output that followed it.
    """

    def __init__(self, min_ngram: int, max_ngram: int, predicted: range = range(0)) -> None:
        super().__init__(max_ngram + 1)
        self.predicted = predicted
        self.place = predicted.start if predicted else None
        self.accepted_predictions = 0
        self.lengths = range(max_ngram, min_ngram - 1, -1)

    def follow(self, tokens: Sequence[int]) -> None:
        """Append what was emitted, and count what of it the prediction says."""
        for token in tokens:
            follows = self.place in self.predicted and self.tokens[self.place] == token
            self.accepted_predictions += follows
            self.extend([token])
            if follows and self.place is not None:
                self.place += 1
            else:
                self.place = next((at for _, at in self.places() if at in self.predicted), None)

    def places(self) -> list[tuple[int, int]]:
        """(length, place) where a suffix of the text was followed before: longest suffix first, then the latest place."""
        places = np.empty(MOST_PLACES, np.int64)
        return [
            (n, at) for n in self.lengths for at in places[: latest_places(self.arrays, n, places)].tolist()
        ]


@njit(cache=True)
def _grow(tree, index, lengths, limits):
    text = index.text
    length = index.about[0].length
    plant(tree, text[length - 1], limits)
    places = np.empty(MOST_PLACES, np.int64)
    low, high = lengths
    for n in range(high, low - 1, -1):
        if is_full(tree):
            break
        for place in places[: latest_places(index, n, places)]:
            node = 0
            for at in range(place, length):
                node = add_node(tree, node, np.int64(text[at]), 1 - 0.6**n)
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
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(account=self.account)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> NgramState:
        """Index the text."""
        lead = len(request.source_token_ids) + len(request.prompt_token_ids[-LEAD:])
        size = len(request.prediction_token_ids)
        state = NgramState(self.min_ngram, self.max_ngram, range(lead, lead + size))
        state.extend(tokens)
        return state

    def observe(self, states: Sequence[NgramState], outcome: Outcome, scores: Scores) -> list[NgramState]:
        """Go on with what was emitted, along the prediction where there is one."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            state.follow(tokens) if state.predicted else state.extend(tokens)
        return list(states)

    def account(self, state: NgramState) -> Account:
        """What became of the prediction."""
        return Account({"accepted_predictions": state.accepted_predictions}) if state.predicted else Account()

    def continuations(self, state: NgramState, budget: Budget) -> GrownTree:
        """See the class; an unknown suffix has none."""
        tree = new_tree(budget, self._eos)
        _grow(tree, state.arrays, (self.min_ngram, self.max_ngram), limits(budget))
        return GrownTree(tree)
