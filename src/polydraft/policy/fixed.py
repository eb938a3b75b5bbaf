"""What an engine asks of a policy, and the policy that gives every step the same draft shape."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Draft, Drafter, Method, Outcome, Request, Target, Verifier
from polydraft.errors import CapacityError
from polydraft.models.slots import TREE_ROOM
from polydraft.verifiers import pairing


class RunningSequence(Protocol):
    """What a policy knows of a running sequence. token_ids: prompt and output.  state: the drafter's.  drafting: False where its drafter is off.
    num_ahead: tokens by which a second sequence is longer.  course: the policy's own record of it, which it puts there.
    stopped: which it sets where nothing is drafted for it any more, what is copied from its text aside."""

    request: Request
    token_ids: list[int]
    state: Any
    drafting: bool
    course: Any
    stopped: bool

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_ahead(self) -> int: ...


class Policy:
    """Budgets for the next step of each sequence. Derive from this class: what has a body here is optional.

    missing: whether costs are assumed that could be measured.  asks_for_spares: whether its budgets may have spare siblings, see `budget.Stop`.
    """

    missing: bool = False
    asks_for_spares: bool = False

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """The parts, before it decides."""

    def rests(self, sequences: Seq[Any]) -> bool:
        """Before each step: whether nothing is drafted in it, so that it is one of plain decoding: no budget is asked for, and nothing is learnt from it."""
        return False

    def budgets(self, sequences: Seq[Any]) -> list[Budget]:
        """One each."""
        raise NotImplementedError

    def learn(
        self,
        sequences: Seq[Any],
        draft: Draft,
        probs: Callable[[], Float[np.ndarray, "B N V"]],
        outcome: Outcome,
    ) -> None:
        """A step that is over; probs: makes the target distributions at the drafted nodes, which a walk has not made of all."""

    def time(self, seconds: Mapping[str, float]) -> None:
        """What the step took that it has just learnt from, by phase."""

    def expect(self, num_sequences: int, riding: int) -> None:
        """Before each step: how many sequences the next ones have, see `engine.admission`, and the prompt tokens in the forward pass of this one."""

    def opens(self, s: Any, num_sequences: int, *, again: bool = False) -> bool:
        """Whether a request is drafted for at all, in a batch of so many: only then a drafter reads its text. again: and the target once more for it."""
        return True

    def measure(self, *parts: Any, **options: Any) -> None:
        """Measure the costs that are missing, of an idle target; see `AdaptivePolicy.measure`."""

    def store_costs(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Remember for later engines what steps have shown of costs that are missing."""


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """The same budget in every step, for reproducible comparisons.

    Example:
        >>> from polydraft.core.geometry import paths
        >>> FixedPolicy(Budget.fixed(paths(2, 4))).budget.max_nodes
        8
    """

    budget: Budget

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Refuse a budget that does not fit a forward pass, that the drafter does not draw, or that the verifier is not exact for.

        Raises:
            CapacityError, IncompatibleError: it says what to do.
        """
        check_draft(self.budget, drafter.info, verifier.info)

    def budgets(self, sequences: Seq[Any]) -> list[Budget]:
        return [self.budget] * len(sequences)


def check_draft(budget: Budget, drafter: Method, verifier: Method) -> None:
    """Refuse a budget that does not fit a forward pass, that the drafter does not draw, or that the verifier is not exact for.

    Raises:
        CapacityError, IncompatibleError: it says what to do.
    """
    check_room(budget.max_nodes, f"depth={budget.max_depth} and num_paths={budget.width}")
    pairing.check_budget(budget, drafter, verifier)


def check_room(num_drafted: int, given: str) -> None:
    """Raise CapacityError if a draft does not fit a forward pass: the last committed token takes one of its rows."""
    if num_drafted >= TREE_ROOM:
        raise CapacityError(
            f"{given} were given, up to {num_drafted} drafted tokens a step; expected at most {TREE_ROOM - 1}, the rows of one forward pass. "
            "Lower one of the numbers."
        )
