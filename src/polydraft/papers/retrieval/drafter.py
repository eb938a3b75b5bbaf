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
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import Budget, Request
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import (
    GrownTree,
    copy_onto,
    is_full,
    limits,
    new_tree,
    new_trial,
    num_paths,
    plant,
)
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.drafters.text.suffix_array import draft, find, new_candidates
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit


@njit(cache=True)
def _longest(index, text, longest, shortest):
    """Length of the longest end of the text that occurs, within the bounds; 0 if there is none. Ends of ends occur too."""
    low = shortest - 1
    high = min(longest, len(text))
    while low < high:
        m = (low + high + 1) // 2
        begin, end = find(index, text, len(text) - m)
        if begin < end:
            low = m
        else:
            high = m - 1
    return low if low >= shortest else 0


@njit(cache=True)
def _grow(tree, index, text, longest, shortest, limits):
    """Continuations of the longest match, then of matches of half the length, and so on."""
    plant(tree, text[-1], limits)
    m = 0 if is_full(tree) else _longest(index, text, longest, shortest)
    trial = new_trial(tree)
    candidates = new_candidates(limits)
    while m >= shortest:
        begin, end = find(index, text, len(text) - m)
        draft(trial, index, begin, end, m, (limits.max_nodes, 0.0, 0.0), limits, candidates)
        copy_onto(tree, trial)
        if m == 1 or is_full(tree) or num_paths(tree) >= limits.width:
            break
        m = (m + 1) // 2


class RetrievalDrafter(TextDrafter[TextState]):
    """REST over a corpus's index.

    max_match, min_match: longest and shortest end of the text that is looked up.  eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: unless 1 <= min_match <= max_match.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = RetrievalDrafter(TextIndex.build([[1, 2, 3, 4, 5]], vocab_size=9))
        >>> states = drafter.start([Request("r", (7, 1, 2), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(4, 4)]).tree.tokens.tolist()
        [[2, 3, 4, 5]]
    """

    info = text_method("retrieval", "Retrieval from a corpus", "2311.08252")

    def __init__(
        self, index: TextIndex, *, max_match: int = 16, min_match: int = 2, eos_token_ids: Sequence[int] = ()
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise InvalidInputError(
                f"min_match={min_match} and max_match={max_match} were given; expected 1 <= min_match <= max_match."
            )
        super().__init__(eos_token_ids)
        self.index = index
        self.max_match = max_match
        self.min_match = min_match

    @classmethod
    def build(
        cls, parts: Parts, *, index: str | Path | TextIndex | None = None, **options: Any
    ) -> "RetrievalDrafter":
        """For the engine. index: one, or a file of `polydraft index build`; other options as the constructor.

        Raises:
            InvalidInputError: no index, or a file that is none.
            IncompatibleError: an index of another tokenizer.
        """
        if index is None:
            raise InvalidInputError(
                "the retrieval drafter was asked for without an index; expected a file of `polydraft index build`. "
                "Give it with --index, or drafter_options={'index': ...}."
            )
        return cls(TextIndex.for_engine(index, parts), eos_token_ids=parts.eos_token_ids, **options)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> TextState:
        """Remember the text."""
        return TextState(list(map(int, tokens)))

    def continuations(self, state: TextState, budget: Budget) -> GrownTree:
        """Continuations of the longest match, then of shorter ones; the share of the occurrences is the score."""
        tree = new_tree(budget, self._eos)
        text = np.array(state.tokens[-self.max_match :])
        _grow(tree, self.index.arrays, text, self.max_match, self.min_match, limits(budget))
        return GrownTree(tree)
