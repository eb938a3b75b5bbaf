"""Several drafters, one of them in each round: the one whose plan promises most tokens per second.

An arm promises what its own plan expects of its best size, see `plan/search.py`, from its own profile and its own record of acceptance,
with drafts for the share of the batch for which it has something to draft.
An arm that was not used for long is tried again, after longer and longer waits. All of this is decided from the rounds that are
over and from tables that were measured before the request, never from a draft of the round itself: given its past, a round is one of a
drafter with a rule that is exact for it, so the output law is kept, and for the same profiles a
seed gives one text. A choice made after a look at the drafts would be biased.
Whether an arm that copies has something to copy is a function of the past too, and is looked up; that of others is taken for granted.
Arms that are not asked are not called; they read what they missed when their turn comes.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor

from polydraft import registry
from polydraft.core import (
    Budget,
    Draft,
    Drafter,
    Method,
    Needs,
    NoiseKey,
    Outcome,
    Request,
    Scores,
    SiblingLaw,
    Target,
    Verdict,
    Verifier,
)
from polydraft.drafters.base import as_one_round, release_each, start_each, teach_each
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.plan.plan import AdaptivePlan, Sequence
from polydraft.plan.sizes import paths
from polydraft.verifiers import pairing
from polydraft.verifiers.match import match

__all__ = ["Choice", "ChoicePlan", "RuleByLaw"]

FIRST_WAIT, LONGEST_WAIT = 4, 256
"""Rounds after which an unused arm is tried again; doubled each time that it is not chosen afterwards."""


class RuleByLaw:
    """A verifier that uses, for each sibling law, a rule of its own.

    Which rule it is follows from how the draft was drawn, not from what was drawn: exact wherever the rules are.

    Example:
        >>> from polydraft.verifiers.block import block
        >>> RuleByLaw({SiblingLaw.IID: block, SiblingLaw.POINT_MASS: match}).info.name
        'block or match'
    """

    def __init__(self, rules: dict[SiblingLaw, Verifier]) -> None:
        infos = list(dict.fromkeys(r.info for r in rules.values()))
        self.rules = rules
        self.info = Method(
            " or ".join(i.name for i in infos),
            "A rule for each sibling law",
            "",
            max(i.year for i in infos),
            "",
            frozenset(rules),
            frozenset().union(*(i.shapes for i in infos)),
            lossless=all(i.lossless for i in infos),
        )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict:
        return self.rules.get(draft.law, match)(draft, target_probs)

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """That of the draft's rule, where it has one; see `core.Verifier`."""
        walk = getattr(self.rules.get(draft.law, match), "walk", None)
        return None if walk is None else walk(draft, logits, key)


@dataclass
class ChoiceState:
    """States of all arms, by the first of those that share slots.  unread: of each, the last token it knows and what it was not told.
    asked: the arm that drafted, if one did.

    credit: who made the accepted tokens of the last round; see `core.Drafter`.
    """

    states: dict[int, Any]
    unread: dict[int, list[int]]
    asked: int | None = None
    credit: list[str] = field(default_factory=list[str])


class Choice:
    """Several drafters as one; `current` drafts.

    arms: by name. They may share a model as kinds in the same slots (`ModelDrafter.sibling`) only, and may neither need more of a round than
        its tokens nor draft with shared noise.

    Raises:
        InvalidInputError: fewer than two arms, or arms with one model that do not share its slots.
        IncompatibleError: an arm that cannot sit out a round.

    Example:
        >>> from polydraft.drafters.text.ngram import NgramDrafter
        >>> from polydraft.drafters.text.suffix import SuffixDrafter
        >>> Choice({"ngram": NgramDrafter(), "suffix": SuffixDrafter()}).info.name
        'ngram,suffix'
    """

    needs: Needs = Needs(every_round=True)

    def __init__(self, arms: dict[str, Drafter]) -> None:
        slots = [getattr(a, "slots", a) for a in arms.values()]
        self._home = [next(j for j, x in enumerate(slots) if x is own) for own in slots]
        homes = {h: list(arms.values())[h] for h in self._home}
        models = [id(m) for m in (getattr(a, "model", None) for a in homes.values()) if m is not None]
        if len(arms) < 2 or len(set(models)) < len(models):
            raise InvalidInputError(
                f"drafters {list(arms)} were given to choose from; expected at least two, of which those of one model share its slots. "
                "Name several ('model,model:top_k'), make kinds by `sibling`, or leave one out."
            )
        for name, arm in arms.items():
            if arm.needs != Needs() or arm.info.laws & {SiblingLaw.COUPLED, SiblingLaw.LISTED}:
                raise IncompatibleError(
                    f"drafter {name!r} was given among {list(arms)}; it needs {'noise that its rule shares' if arm.needs == Needs() else arm.needs} in every "
                    "round, also in those that another drafts. Use it alone."
                )
        self.names, self.arms, self.current, self._homes = list(arms), list(arms.values()), 0, homes
        infos = [a.info for a in self.arms]
        self.info = Method(
            ",".join(self.names),
            "The drafter that promises most",
            "",
            max(i.year for i in infos),
            "",
            frozenset().union(*(i.laws for i in infos)),
            frozenset().union(*(i.shapes for i in infos)),
        )

    def rule(self) -> Verifier:
        """The best lossless rule of each arm; the first arm's where two arms have one law and it fits both."""
        rules: dict[SiblingLaw, Verifier] = {}
        for law in self.info.laws:
            same = [a.info for a in self.arms if law in a.info.laws]
            shapes = frozenset().union(*(i.shapes for i in same))
            one = Method(same[0].name, "", "", 0, "", frozenset({law}), shapes)
            rules[law] = registry.verifier(pairing.best_for(one))
        return RuleByLaw(rules)

    def start(self, requests: Seq[Request]) -> list[ChoiceState]:
        """States of all arms; see `core.Drafter.start`."""
        by_request = zip(requests, *start_each((arm, requests) for arm in self._homes.values()), strict=True)
        return [
            ChoiceState(dict(zip(self._homes, states, strict=True)), {h: [r.prompt_token_ids[-1]] for h in self._homes})
            for r, *states in by_request
        ]

    def release(self, states: Seq[ChoiceState]) -> None:
        """Give back what all arms hold."""
        release_each((arm, [s.states[home] for s in states]) for home, arm in self._homes.items())

    def learn_output(self, token_ids: Seq[int]) -> None:
        """Tell every arm that learns from it."""
        teach_each(self._homes.values(), token_ids)

    def _tell(self, home: int, states: Seq[ChoiceState], outcome: Outcome, scores: Scores) -> None:
        for s, new in zip(states, self._homes[home].observe([s.states[home] for s in states], outcome, scores), strict=True):
            s.states[home] = new

    def ready(self, i: int, states: Seq[ChoiceState]) -> float:
        """Share of the batch for which arm i has a draft: looked up where it copies, 1 where it runs a model. Draws nothing."""
        arm = self.arms[i]
        if arm.info.laws != {SiblingLaw.POINT_MASS} or getattr(arm, "model", None) is not None:
            return 1.0
        try:
            parents = self._ask(i, states, [paths(1, 1)] * len(states)).tree.parents
        except Exception:
            return 1.0  # the proposal meets it again, where it is dealt with
        return float((parents[:, 1:2] == 0).sum()) / len(states)

    def _ask(self, i: int, states: Seq[ChoiceState], budgets: Seq[Budget]) -> Draft:
        """The draft of arm i, once it has read what it missed."""
        home = self._home[i]
        behind = [s for s in states if len(s.unread[home]) > 1]
        if behind:
            self._tell(home, behind, *as_one_round([s.unread[home][0] for s in behind], [s.unread[home][1:] for s in behind]))
            for s in behind:
                s.unread[home] = s.unread[home][-1:]
        return self.arms[i].propose([s.states[home] for s in states], budgets)

    def propose(self, states: Seq[ChoiceState], budgets: Seq[Budget]) -> Draft:
        """The current arm's draft."""
        i = self.current
        draft = self._ask(i, states, budgets)
        for s in states:
            s.asked = i
        return draft

    def observe(self, states: Seq[ChoiceState], outcome: Outcome, scores: Scores) -> list[ChoiceState]:
        """The arm that drafted is told; the others read it when their turn comes."""
        asked = {s.asked for s in states}
        told = asked.pop() if len(asked) == 1 else None
        if told is not None:
            told = self._home[told]
            self._tell(told, states, outcome, scores)
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            s.unread = {home: emitted[-1:] if home == told else unread + emitted for home, unread in s.unread.items()}
            s.credit = [] if s.asked is None else [self.names[s.asked]] * (len(emitted) - 1)
            s.asked = None
        return list(states)


@dataclass
class _Waits:
    """Of one sequence, by arm: rounds since the last use, and until a trial."""

    idle: list[int]
    wait: list[int]


class ChoicePlan:
    """A plan for `Choice`: an adaptive plan for each arm, and the arm of the highest promise; see the module.

    plans: in the order of the arms; without them costs are learnt.

    Example:
        >>> from polydraft.drafters.text.ngram import NgramDrafter
        >>> from polydraft.drafters.text.suffix import SuffixDrafter
        >>> plan = ChoicePlan(Choice({"ngram": NgramDrafter(), "suffix": SuffixDrafter()}))
        >>> [p.profile for p in plan.plans]
        [None, None]
    """

    def __init__(self, choice: Choice, plans: Seq[AdaptivePlan] | None = None) -> None:
        self.choice = choice
        self.plans = [AdaptivePlan() for _ in choice.arms] if plans is None else list(plans)
        self._waits: WeakKeyDictionary[Any, _Waits] = WeakKeyDictionary()
        self._before = -1
        self._promises: dict[int, tuple[Any, float]] = {}

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Get each arm's sizes and profile; see `AdaptivePlan.prepare`."""
        for plan, arm in zip(self.plans, self.choice.arms, strict=True):
            (law,) = arm.info.laws
            plan.prepare(target, arm, verifier.rules[law] if isinstance(verifier, RuleByLaw) else verifier)

    def _promise(self, i: int, sequences: Seq[Sequence], share: float = 1.0) -> float:
        """Tokens per second with arm i where it has a draft for this share of the batch."""
        plan = self.plans[i]
        key = share, [(s, s.drafting, plan.course(s).record.counted) for s in sequences]
        if i not in self._promises or self._promises[i][0] != key:
            found, _ = plan.promise(sequences, [not s.drafting for s in sequences], share)
            self._promises[i] = key, max(found.speed, found.plain)
        return self._promises[i][1]

    def _pick(self, sequences: Seq[Sequence], waits: Seq[_Waits]) -> tuple[int, bool]:
        """The arm of this round, and whether it is on trial. Arms are looked up in the order of what they promise, as far as needed."""
        live, arms = [s.state for s in sequences if s.drafting], range(len(self.plans))
        if not live:
            return 0, False
        promises = [self._promise(i, sequences) for i in arms]
        best, most = 0, 0.0
        for i in sorted(arms, key=lambda i: -promises[i]):
            if promises[i] <= most:
                break
            share = self.choice.ready(i, live)
            found = promises[i] if share == 1 else self._promise(i, sequences, share)
            if found > most:
                best, most = i, found
        due = [i for i in arms if i != best and all(w.idle[i] >= w.wait[i] for w in waits)]
        for i in sorted(due, key=lambda i: -waits[0].idle[i]):
            if self.choice.ready(i, live):
                return i, True
            for w in waits:  # nothing to copy: looked up again after as long a wait
                w.idle[i] = 0
        return best, False

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each, for the arm that this sets as the current one."""
        arms = len(self.plans)
        waits = [self._waits.setdefault(s, _Waits([0] * arms, [FIRST_WAIT] * arms)) for s in sequences]
        current, trial = self._pick(sequences, waits)
        for w in waits:
            w.wait[current] = min(2 * w.wait[current], LONGEST_WAIT) if trial else FIRST_WAIT
            w.idle = [0 if i == current else n + 1 for i, n in enumerate(w.idle)]
        self.choice.current = current
        plan = self.plans[current]
        budgets = plan.budgets(sequences)
        if trial and not any(g.max_depth for g in budgets):
            budgets = plan.give(sequences, [paths(1, 1) if s.drafting else g for s, g in zip(sequences, budgets, strict=True)])
        return budgets

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into the records of the arm that drafted."""
        self.plans[self.choice.current].learn(sequences, draft, processed, outcome)

    @property
    def timed(self) -> bool:
        """Whether the next round is to be timed."""
        return any(plan.learner is not None for plan in self.plans)

    def time(self, sequences: Seq[Sequence], draft: Draft, seconds: float) -> None:
        """Tell the plan of the arm that drafted, unless it had to read what others drafted first."""
        if self.choice.current == self._before:
            self.plans[self.choice.current].time(sequences, draft, seconds)
        self._before = self.choice.current
