"""Prompt lookup: copy what followed the same words earlier in the text.

Saxena 2023 (prompt lookup decoding, no paper); Yang et al. 2023 (LLMA, arXiv 2304.04487).

The n-grams that end the text (n from `max_ngram` down to `min_ngram`) are looked up in an index that grows with the text: each
token adds one place to each n. The longest known suffix wins, then the latest place; further places open further paths, up to
the width, or lengthen a path that ended with the text, and all are merged into one tree by prefix.
Deterministic: there is no q, so drafts are POINT_MASS. A continuation may run into the suffix itself, never past the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from polydraft.core import Budget, Draft, Method, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters.growth import GrownTree, point_mass
from polydraft.drafters.parts import Parts, Snapshot
from polydraft.errors import InvalidInputError

__all__ = ["NgramDrafter", "NgramState"]

MOST_PLACES = 8


@dataclass
class NgramState:
    """The text of one request and where each n-gram was last followed by something.

    places[n-gram]: positions of the tokens that followed it, oldest first, at most `MOST_PLACES`.
    """

    tokens: list[int]
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])


class NgramDrafter:
    """Prompt lookup over prompt and output of each request alone.

    max_ngram, min_ngram: longest and shortest suffix to look up.  eos_token_ids: a draft ends at one.

    Raises:
        InvalidInputError: unless 1 <= min_ngram <= max_ngram.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = NgramDrafter()
        >>> states = drafter.start([Request("r", (5, 6, 7, 8, 5, 6), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget(max_nodes=3, max_depth=3)]).tree.tokens.tolist()
        [[6, 7, 8, 5]]
    """

    info = Method(
        name="ngram",
        title="Prompt lookup",
        authors="Saxena; Yang et al.",
        year=2023,
        arxiv="2304.04487",
        laws=frozenset({SiblingLaw.POINT_MASS}),
        shapes=frozenset({TreeShape.GROWN}),
    )
    methods = (info,)
    needs: frozenset[str] = frozenset()

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, eos_token_ids: Sequence[int] = ()) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidInputError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} were given; expected 1 <= min_ngram <= max_ngram."
            )
        self.max_ngram, self.min_ngram, self._eos = max_ngram, min_ngram, frozenset(eos_token_ids)

    @classmethod
    def build(cls, parts: Parts, *, max_ngram: int = 4, min_ngram: int = 1) -> "NgramDrafter":
        """For the engine: end drafts at its end-of-sequence ids."""
        return cls(max_ngram, min_ngram, parts.eos_token_ids)

    def start(self, requests: Sequence[Request]) -> list[NgramState]:
        """Index the prompts."""
        states = [NgramState([]) for _ in requests]
        for state, request in zip(states, requests, strict=True):
            self._extend(state, request.prompt_token_ids)
        return states

    def release(self, states: Sequence[NgramState]) -> None:
        """Nothing to give back."""

    def _extend(self, state: NgramState, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(state.tokens)
            for n in range(self.min_ngram, min(self.max_ngram, at) + 1):
                found = state.places.setdefault(tuple(state.tokens[at - n :]), [])
                found.append(at)
                if len(found) > MOST_PLACES:
                    del found[0]
            state.tokens.append(token)

    def _places(self, state: NgramState) -> Iterator[tuple[int, int]]:
        """(length, place) where a suffix of the text was followed before: longest suffix first, then the latest place."""
        length = len(state.tokens)
        for n in range(min(self.max_ngram, length), self.min_ngram - 1, -1):
            yield from ((n, at) for at in reversed(state.places.get(tuple(state.tokens[length - n :]), ())))

    def grow(self, state: NgramState, budget: Budget) -> GrownTree:
        """Continuations merged by prefix; the first ones make the paths, later ones may lengthen them; scores grow with the match."""
        grown = GrownTree(state.tokens[-1], budget, self._eos)
        for n, at in self._places(state):
            if grown.full:
                break
            grown.add_path(state.tokens[at : at + budget.max_depth], score=1 - 0.6**n)
        return grown

    def propose(self, states: Sequence[NgramState], budgets: Sequence[Budget]) -> Draft:
        """Continuations of the known suffixes, within each budget; an unknown suffix gives an empty row."""
        return point_mass([self.grow(state, budget) for state, budget in zip(states, budgets, strict=True)])

    def observe(self, states: Sequence[NgramState], outcome: Outcome, scores: Scores) -> list[NgramState]:
        """Index what was emitted."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            self._extend(state, tokens)
        return list(states)

    def snapshot(self, state: NgramState) -> Snapshot:
        """The text; its index is made again."""
        return {"tokens": np.array(state.tokens)}

    def restore(self, request: Request, snapshot: Snapshot) -> NgramState:
        """The state that drafts as the one of the snapshot; see `parts.Resumable`."""
        state = NgramState([])
        self._extend(state, snapshot["tokens"].tolist())
        return state
