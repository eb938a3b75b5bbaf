"""Several drafters, one of which drafts in each round: the one that a policy set before the round.

Arms that are not asked are not called; they read what they missed when their turn comes. Which arm it is may follow from the rounds that are
over and from tables, never from a draft of the round itself: given its past, a round is then one of a drafter with a rule that is exact
for it, so the output law is kept. A choice made after a look at the drafts would be biased.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from polydraft import registry, tree
from polydraft.core import Budget, Draft, Drafter, DraftSampling, Method, Needs, Outcome, Request, Scores, Verifier
from polydraft.drafters.base import ModelBased, as_one_round, release_each, start_each, teach_each
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.verifiers import pairing
from polydraft.verifiers.by_draft_sampling import VerifierByDraftSampling


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
        slots = [a.slots if isinstance(a, ModelBased) else a for a in arms.values()]
        self._home = [next(j for j, x in enumerate(slots) if x is model) for model in slots]
        homes = {h: list(arms.values())[h] for h in self._home}
        models = [id(a.model) for a in homes.values() if isinstance(a, ModelBased) and a.model is not None]
        if len(arms) < 2 or len(set(models)) < len(models):
            raise InvalidInputError(
                f"drafters {list(arms)} were given to choose from; expected at least two, of which those of one model share its slots. "
                "Name several ('model,model:top_k'), make kinds by `sibling`, or leave one out."
            )
        for name, arm in arms.items():
            if arm.needs != Needs() or arm.info.draft_sampling & {DraftSampling.COUPLED, DraftSampling.LISTED}:
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
            frozenset().union(*(i.draft_sampling for i in infos)),
            frozenset().union(*(i.shapes for i in infos)),
        )

    def rule(self) -> Verifier:
        """The best lossless rule of each arm; the first arm's where two arms have one law and it fits both."""
        rules: dict[DraftSampling, Verifier] = {}
        for draft_sampling in self.info.draft_sampling:
            same = [a.info for a in self.arms if draft_sampling in a.info.draft_sampling]
            shapes = frozenset().union(*(i.shapes for i in same))
            same_method = Method(same[0].name, "", "", 0, "", frozenset({draft_sampling}), shapes)
            rules[draft_sampling] = registry.verifier(pairing.best_for(same_method))
        return VerifierByDraftSampling(rules)

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
        if arm.info.draft_sampling != {DraftSampling.POINT_MASS} or (isinstance(arm, ModelBased) and arm.model is not None):
            return 1.0
        try:
            parents = self._ask(i, states, [Budget.fixed(tree.chain(1))] * len(states)).tree.parents
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
        arms = {s.asked for s in states}
        arm = arms.pop() if len(arms) == 1 else None
        if arm is not None:
            arm = self._home[arm]
            self._tell(arm, states, outcome, scores)
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            s.unread = {home: emitted[-1:] if home == arm else unread + emitted for home, unread in s.unread.items()}
            s.credit = [] if s.asked is None else [self.names[s.asked]] * (len(emitted) - 1)
            s.asked = None
        return list(states)
