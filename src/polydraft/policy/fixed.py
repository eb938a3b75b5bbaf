"""What an engine asks of a policy, and the policy that gives every round the same size."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Drafter, Method, Outcome, Request, Target, Verifier
from polydraft.errors import CapacityError
from polydraft.models.slots import TREE_ROOM
from polydraft.verifiers import pairing

__all__ = ["FixedPolicy", "Opening", "Policy", "Preparing", "RunningSequence", "Timed", "check_draft", "check_room"]


class RunningSequence(Protocol):
    """What a policy knows of a running sequence. token_ids: prompt and output.  state: the drafter's.  drafting: False where its drafter is off."""

    request: Request
    token_ids: list[int]
    state: Any
    drafting: bool


class Policy(Protocol):
    """Budgets for the next round of each sequence; one may also be `Preparing` and `Timed`."""

    def budgets(self, sequences: Seq[Any]) -> list[Budget]: ...

    def learn(self, sequences: Seq[Any], draft: Draft, probs: Callable[[], Float[Tensor, "B N V"]], outcome: Outcome) -> None:
        """Take note of a round that is over; probs: makes the target distributions at the drafted nodes, which a walk has not made of all."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A policy that is given the parts before it decides."""

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None: ...


@runtime_checkable
class Timed(Protocol):
    """A policy that is told what the step took that it has just learnt from, by phase."""

    def time(self, seconds: Mapping[str, float]) -> None: ...


@runtime_checkable
class Opening(Protocol):
    """A policy that says whether a request is drafted for at all, in a batch of so many: only then a drafter reads its text."""

    def expect(self, num_sequences: int, riding: int) -> None:
        """Before each step: how many sequences the next ones have, see `engine.arrivals`, and the prompt tokens in the forward pass of this one."""
        ...

    def opens(self, s: Any, num_sequences: int, *, again: bool = False) -> bool:
        """again: whether the target reads the text once more for it."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """The same budget in every round, for reproducible comparisons.

    Example:
        >>> from polydraft.core.geometry import paths
        >>> FixedPolicy(Budget.fixed(paths(2, 4))).budget.max_nodes
        8
    """

    budget: Budget

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Refuse a budget that does not fit a pass, that the drafter does not draw, or that the rule is not exact for.

        Raises:
            CapacityError, IncompatibleError: it says what to do.
        """
        check_draft(self.budget, drafter.info, verifier.info)

    def budgets(self, sequences: Seq[Any]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def learn(self, sequences: Seq[Any], draft: Draft, probs: Callable[[], Float[Tensor, "B N V"]], outcome: Outcome) -> None:
        """Nothing: the policy is fixed."""


def check_draft(budget: Budget, drafter: Method, verifier: Method) -> None:
    """Refuse a budget that does not fit a pass, that the drafter does not draw, or that the rule is not exact for.

    Raises:
        CapacityError, IncompatibleError: it says what to do.
    """
    check_room(budget.max_nodes, f"depth={budget.max_depth} and num_paths={budget.width}")
    pairing.check_budget(budget, drafter, verifier)


def check_room(num_drafted: int, given: str) -> None:
    """Raise CapacityError if a draft does not fit a pass: the last committed token takes one of its rows."""
    if num_drafted >= TREE_ROOM:
        raise CapacityError(
            f"{given} were given, up to {num_drafted} drafted tokens a step; expected at most {TREE_ROOM - 1}, the rows of one pass. "
            "Lower one of the two."
        )
