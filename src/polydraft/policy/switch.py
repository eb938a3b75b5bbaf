"""A policy for several drafters: each round is drafted by the one whose policy promises most tokens per second.

An arm promises what its own policy expects of its drafts, from its own profile and its own record of acceptance,
with drafts for the share of the batch for which it has something to draft.
An arm that was not used for long is tried again, after longer and longer waits. All of this is decided from the rounds that are
over and from tables that were measured before the request, never from a draft of the round itself, see `drafters/choice.py`; for the same
profiles a seed gives one text.
Whether an arm that copies has something to copy is a function of the past too, and is looked up; that of others is taken for granted.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Drafter, Outcome, Target, Verifier
from polydraft.drafters.choice import Choice
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import Overhead, no_overhead
from polydraft.policy.fixed import RunningSequence
from polydraft.verifiers.by_draft_sampling import VerifierByDraftSampling

__all__ = ["ChoicePolicy"]

ONE = Budget.fixed((-1, 0))
FIRST_WAIT, LONGEST_WAIT = 4, 256
"""Rounds after which an unused arm is tried again; doubled each time that it is not chosen afterwards."""


@dataclass
class _Waits:
    """Of one sequence, by arm: rounds since the last use, and until a trial."""

    idle: list[int]
    wait: list[int]


class ChoicePolicy:
    """A policy for `Choice`: an adaptive policy for each arm, and the arm of the highest promise; see the module.

    policies: in the order of the arms; without them costs are learnt.

    Example:
        >>> from polydraft.drafters.text.ngram import NgramDrafter
        >>> from polydraft.drafters.text.suffix import SuffixDrafter
        >>> policy = ChoicePolicy(Choice({"ngram": NgramDrafter(), "suffix": SuffixDrafter()}))
        >>> len(policy.policies)
        2
    """

    def __init__(self, choice: Choice, policies: Seq[AdaptivePolicy] | None = None) -> None:
        self.choice = choice
        self.policies = [AdaptivePolicy() for _ in choice.arms] if policies is None else list(policies)
        self._waits: WeakKeyDictionary[Any, _Waits] = WeakKeyDictionary()
        self._before = -1

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier, overhead: Overhead = no_overhead) -> None:
        """Get each arm's sizes and profile; see `AdaptivePolicy.prepare`."""
        for policy, arm in zip(self.policies, self.choice.arms, strict=True):
            (draft_sampling,) = arm.info.draft_sampling
            own_verifier = verifier.rules[draft_sampling] if isinstance(verifier, VerifierByDraftSampling) else verifier
            policy.prepare(target, arm, own_verifier, overhead)

    def _promise(self, i: int, sequences: Seq[RunningSequence], share: float = 1.0) -> float:
        """Tokens per second with arm i where it has a draft for this share of the batch."""
        return self.policies[i].promise(sequences, share)

    def _pick(self, sequences: Seq[RunningSequence], waits: Seq[_Waits]) -> tuple[int, bool]:
        """The arm of this round, and whether it is on trial. Arms are looked up in the order of what they promise, as far as needed."""
        live, arms = [s.state for s in sequences if s.drafting], range(len(self.policies))
        if not live:
            return 0, False
        promises = [self._promise(i, sequences) for i in arms]
        best, most = 0, 0.0
        for i in sorted(arms, key=lambda i: -promises[i]):
            if promises[i] <= most:
                break
            share = self.choice.ready(i, live)
            own_promise = promises[i] if share == 1 else self._promise(i, sequences, share)
            if own_promise > most:
                best, most = i, own_promise
        due = [i for i in arms if i != best and all(w.idle[i] >= w.wait[i] for w in waits)]
        for i in sorted(due, key=lambda i: -waits[0].idle[i]):
            if self.choice.ready(i, live):
                return i, True
            for w in waits:  # nothing to copy: looked up again after as long a wait
                w.idle[i] = 0
        return best, False

    def budgets(self, sequences: Seq[RunningSequence]) -> list[Budget]:
        """One each, for the arm that this sets as the current one."""
        arms = len(self.policies)
        waits = [self._waits.setdefault(s, _Waits([0] * arms, [FIRST_WAIT] * arms)) for s in sequences]
        current, trial = self._pick(sequences, waits)
        for w in waits:
            w.wait[current] = min(2 * w.wait[current], LONGEST_WAIT) if trial else FIRST_WAIT
            w.idle = [0 if i == current else n + 1 for i, n in enumerate(w.idle)]
        self.choice.current = current
        policy = self.policies[current]
        budgets = policy.budgets(sequences)
        if trial and not any(g.max_depth for g in budgets):
            budgets = policy.give(sequences, [ONE if s.drafting else g for s, g in zip(sequences, budgets, strict=True)])
        return budgets

    def learn(self, sequences: Seq[RunningSequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into the records of the arm that drafted."""
        self.policies[self.choice.current].learn(sequences, draft, processed, outcome)

    def time(self, seconds: Mapping[str, float]) -> None:
        """Tell the policy of the arm that drafted, unless it had to read what others drafted first."""
        if self.choice.current == self._before:
            self.policies[self.choice.current].time(seconds)
        self._before = self.choice.current
