"""What drafters from text have in common: they follow the text of each request, and hand over what may go on from its end.

Such a drafter is a structure of its own and two functions: `begin`, a request's state after its first tokens, and `continuations`,
the tree of what may follow. All are deterministic, so drafts are POINT_MASS and meet the verifier `match`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from polydraft.core import (
    Budget,
    Draft,
    DraftSampling,
    Method,
    Needs,
    Offers,
    Outcome,
    Request,
    Scores,
    TreeShape,
)
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import GrownTree, end_ids, point_mass
from polydraft.methods.papers import method


class FollowsText(Protocol):
    """The state of a request: its text, and whatever a drafter stores of it."""

    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with what was emitted."""


@dataclass
class TextState:
    """The state of a request of which nothing is stored but its text."""

    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with what was emitted."""
        self.tokens += tokens


State = TypeVar("State", bound=FollowsText)
Own = TypeVar("Own", bound="TextDrafter[Any]")


LEAD = 4
"""Last tokens of the prompt that are put before a prediction, so that it is looked up where the output begins."""


def predicted_text(request: Request) -> tuple[int, ...]:
    """A request's prediction as a text to look up; nothing where it has none.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> predicted_text(Request("r", (1, 2, 3, 4, 5), SamplingParams(), seed=0, prediction_token_ids=(8, 9)))
        (2, 3, 4, 5, 8, 9)
    """
    return (
        (*request.prompt_token_ids[-LEAD:], *request.prediction_token_ids)
        if request.prediction_token_ids
        else ()
    )


text_method = partial(method, draft_sampling={DraftSampling.POINT_MASS}, shapes={TreeShape.GROWN})
"""What a drafter from text declares."""


class TextDrafter(ABC, Generic[State]):
    """A drafter from text, less `info`, `begin` and `continuations`. eos_token_ids: nothing is drafted behind one.

    reads_text_alone: whether it needs no model.  store_class: of what its requests may learn together, the option `store`.
    """

    info: ClassVar[Method]
    methods: ClassVar[tuple[Method, ...]]
    needs: Needs = Needs()
    reads_text_alone: ClassVar[bool] = True
    store_class: ClassVar[type | None] = None

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers()

    def __init_subclass__(cls) -> None:
        cls.methods = (cls.info,)

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos = end_ids(eos_token_ids)

    @classmethod
    def build(cls: type[Own], parts: Parts, **options: Any) -> Own:
        """For the engine: end drafts at its end-of-sequence ids; options as the constructor."""
        return cls(eos_token_ids=parts.eos_token_ids, **options)

    @abstractmethod
    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> State:
        """The state of a request whose text so far is `tokens`."""

    @abstractmethod
    def continuations(self, state: State, budget: Budget) -> GrownTree:
        """What may follow the text, as a tree within the budget; its root alone where nothing is known."""

    def start(self, requests: Sequence[Request]) -> list[State]:
        """Read the prompts, and before them the sources of encoder-decoders and predictions: outputs copy from all."""
        return [
            self.begin(r, (*r.source_token_ids, *predicted_text(r), *r.prompt_token_ids)) for r in requests
        ]

    def release(self, states: Sequence[State]) -> None:
        """Nothing to give back; what a shared store or pool learnt stays in it."""

    def propose(self, states: Sequence[State], budgets: Sequence[Budget]) -> Draft:
        """The continuations of each row; see the module."""
        return point_mass(
            [self.continuations(state, budget) for state, budget in zip(states, budgets, strict=True)]
        )

    def observe(self, states: Sequence[State], outcome: Outcome, scores: Scores) -> list[State]:
        """Go on with what was emitted."""
        for state, tokens in zip(states, outcome.emitted(scores.tree), strict=True):
            state.extend(tokens)
        return list(states)
