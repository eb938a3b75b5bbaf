"""Prompt lookup: copy what followed the same words earlier in the text.

Saxena 2023 (prompt lookup decoding, no paper); Yang et al. 2023 (LLMA, arXiv 2304.04487).

The longest n-gram that ends the text (n from `max_ngram` down to `min_ngram`) and that occurred before is looked up in an
index that grows with the text; its latest continuations are drafted, merged into one tree where more than one is asked for.
Deterministic: there is no q, so drafts are POINT_MASS. A continuation may run into the suffix itself, never past the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from polydraft import tree as trees
from polydraft.core import Budget, Draft, Method, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters.parts import Parts
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
            raise InvalidInputError(f"min_ngram={min_ngram} and max_ngram={max_ngram} were given; expected 1 <= min_ngram <= max_ngram.")
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

    def _places(self, state: NgramState) -> list[int]:
        """Where the longest known suffix was followed, latest first."""
        for n in range(min(self.max_ngram, len(state.tokens)), self.min_ngram - 1, -1):
            found = state.places.get(tuple(state.tokens[len(state.tokens) - n :]))
            if found:
                return found[::-1]
        return []

    def _continuation(self, state: NgramState, at: int, depth: int) -> list[int]:
        tokens = state.tokens[at : at + depth]
        ends = [i for i, token in enumerate(tokens) if token in self._eos]
        return tokens[: ends[0] + 1] if ends else tokens

    def _tree(self, state: NgramState, budget: Budget) -> tuple[list[int], list[int]]:
        tokens, parents = [state.tokens[-1]], [-1]
        child: dict[tuple[int, int], int] = {}
        for at in self._places(state)[: budget.width]:
            node = 0
            for token in self._continuation(state, at, budget.max_depth):
                if (node, token) not in child:
                    if len(tokens) > budget.max_nodes:
                        break
                    child[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child[node, token]
        return tokens, parents

    def propose(self, states: Sequence[NgramState], budgets: Sequence[Budget]) -> Draft:
        """Continuations of the longest known suffixes; an unknown suffix gives an empty row."""
        tree = trees.pad([self._tree(state, budget) for state, budget in zip(states, budgets, strict=True)])
        return Draft(tree, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full_like(tree.tokens, -1))

    def observe(self, states: Sequence[NgramState], outcome: Outcome, scores: Scores) -> list[NgramState]:
        """Index what was emitted."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            self._extend(state, tokens)
        return list(states)
