"""Several drafters, one of them in each round: the one whose plan promises most tokens per second.

    promise of an arm = (h T + 1 - h) / (h S + (1 - h) S_0)
    T, S  tokens and seconds of a round of its best size, from its own profile and its own record of acceptance, with decay
    S_0   seconds of a round without drafts;  h  share of the batch for which it has something to draft

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
from polydraft.engine.acceptance import Acceptance
from polydraft.engine.best_first_plan import plan_for
from polydraft.engine.plan import CHAIN_OF_ONE, AdaptivePlan
from polydraft.engine.sequence import Sequence
from polydraft.errors import IncompatibleError, InvalidInputError
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
            parents = self._ask(i, states, [CHAIN_OF_ONE] * len(states)).tree.parents
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
class _Past:
    """What one sequence has seen of its arms: acceptance, rounds since the last use and until a trial."""

    records: list[Acceptance]
    idle: list[int]
    wait: list[int]


class ChoicePlan:
    """A plan for `Choice`: an adaptive plan for each arm, and the arm of the highest promise; see the module.

    plans: in the order of the arms; without them their profiles are measured before the first request.

    Example:
        >>> from polydraft.drafters.text.ngram import NgramDrafter
        >>> from polydraft.drafters.text.suffix import SuffixDrafter
        >>> plan = ChoicePlan(Choice({"ngram": NgramDrafter(), "suffix": SuffixDrafter()}))
        >>> [p.profile for p in plan.plans]
        [None, None]
    """

    def __init__(self, choice: Choice, plans: Seq[AdaptivePlan] | None = None) -> None:
        self.choice = choice
        self.plans = [plan_for(arm) for arm in choice.arms] if plans is None else list(plans)
        self._pasts: WeakKeyDictionary[Sequence, _Past] = WeakKeyDictionary()
        self._before = -1
        self._times: list[tuple[Any, float, float]] = [(None, 0.0, 0.0)] * len(self.plans)

    def begin(self, target: Target, rule: Verifier) -> None:
        """Get each arm's profile: from before, or assumed and learnt; see `engine/learner.py`."""
        for plan, arm in zip(self.plans, self.choice.arms, strict=True):
            (law,) = arm.info.laws
            plan.begin(target, arm, rule.rules[law] if isinstance(rule, RuleByLaw) else rule)

    def _past(self, sequence: Sequence) -> _Past:
        if sequence not in self._pasts:
            waits = [FIRST_WAIT for _ in self.plans]
            self._pasts[sequence] = _Past([Acceptance() for _ in waits], [0] * len(waits), waits)
        return self._pasts[sequence]

    def _promise(self, i: int, sequences: Seq[Sequence], pasts: Seq[_Past], share: float = 1.0) -> float:
        """Tokens per second with arm i where it has a draft for this share of the batch."""
        for s, past in zip(sequences, pasts, strict=True):
            s.acceptance = past.records[i]
        found = self.plans[i].promise(sequences, [not s.drafting for s in sequences])
        if self._times[i][0] is not found:
            plan, contexts = self.plans[i], [len(s.token_ids) for s in sequences]
            plain = plan.known.costs.seconds([(1, 0)] * len(contexts), contexts)
            self._times[i] = found, plan.seconds(found[0], contexts), plain
        (_, speed), full, plain = self._times[i]
        tokens = speed * full if full > plain else 1.0
        return (share * tokens + 1 - share) / (share * full + (1 - share) * plain)

    def _pick(self, sequences: Seq[Sequence], pasts: Seq[_Past]) -> tuple[int, bool]:
        """The arm of this round, and whether it is on trial. Arms are looked up in the order of what they promise, as far as needed."""
        live = [s.state for s in sequences if s.drafting]
        arms = range(len(self.plans))
        promises = [self._promise(i, sequences, pasts) for i in arms]
        best, most = 0, 0.0
        for i in sorted(arms, key=lambda i: -promises[i]):
            if promises[i] <= most:
                break
            share = self.choice.ready(i, live) if live else 0.0
            found = promises[i] if share == 1 else self._promise(i, sequences, pasts, share)
            if found > most:
                best, most = i, found
        due = [i for i in arms if i != best and all(p.idle[i] >= p.wait[i] for p in pasts)]
        for i in sorted(due, key=lambda i: -pasts[0].idle[i]):
            if live and self.choice.ready(i, live):
                return i, True
            for p in pasts:  # nothing to copy: looked up again after as long a wait
                p.idle[i] = 0
        return best, False

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each, for the arm that this sets as the current one."""
        pasts = [self._past(s) for s in sequences]
        current, trial = self._pick(sequences, pasts)
        for p in pasts:
            p.wait[current] = min(2 * p.wait[current], LONGEST_WAIT) if trial else FIRST_WAIT
            p.idle = [0 if i == current else n + 1 for i, n in enumerate(p.idle)]
        for s, p in zip(sequences, pasts, strict=True):
            s.acceptance = p.records[current]
        self.choice.current = current
        budgets = self.plans[current].budgets(sequences)
        if trial and not any(g.max_depth for g in budgets):
            tried = [CHAIN_OF_ONE if s.drafting else g for s, g in zip(sequences, budgets, strict=True)]
            budgets = self.plans[current].give(sequences, tried)
        return budgets

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into the records of the arm that drafted."""
        self.plans[self.choice.current].learn(sequences, draft, processed, outcome)

    def time(self, sequences: Seq[Sequence], draft: Draft, seconds: float) -> None:
        """Tell the plan of the arm that drafted, unless it had to read what others drafted first."""
        if self.choice.current == self._before:
            self.plans[self.choice.current].time(sequences, draft, seconds)
        self._before = self.choice.current
