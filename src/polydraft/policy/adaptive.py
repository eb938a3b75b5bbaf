"""The speculation policy: for every sequence the drafts that the marginal rule is for, from steps that are over and tables alone.

Costs are measured while the engine is idle and follow the steps that run; acceptance is each sequence's own, around that of all. A request
that names a seed is decided from its own steps and the tables as they were measured, as if it ran alone: its text does not
depend on what runs beside it. Nothing here looks at the draft that it decides about, but for the stop by a node's own path: outputs have
the same distribution.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import inf
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Draft, Drafter, DraftSampling, Outcome, Target, Verifier
from polydraft.core.budget import NOTHING
from polydraft.policy.acceptance import Acceptance
from polydraft.policy.costs import Costs, LiveCosts
from polydraft.policy.course import LOOK, Course, Event, fit, min_pause
from polydraft.policy.credit import CREDIT, Credit, SharedCredit, least_loss
from polydraft.policy.fixed import Policy, RunningSequence
from polydraft.policy.marginal import CERTAIN, Beside, Weighed, fastest_share, gain, speed_of
from polydraft.policy.profile import Profile, begun, check_identity, profile_of, remember_steps
from polydraft.policy.rehearsal import Rehearsed, unrehearsed
from polydraft.policy.repeats import Repeats, worth_copying
from polydraft.policy.shape import Shaper
from polydraft.policy.steps import LastStep

SURE = 16
"""Steps with drafts of a sequence before its budgets hold."""
ENOUGH = 16
"""Timed steps whose costs are worth storing where nothing was measured."""
REPEATS_SECONDS = 1e-5
REPEATS_SHARE = 0.005
"""Seconds that it takes to read a text for repeats, which are copied beside the drafts of a model, and the share of plain decoding that this may take in a
pause: each step of 2 milliseconds and more, each fourth of the embedded pair's."""
SHARED = (24.0, 0.995)
OWN = (8.0, 0.97)
"""Strength of the prior and decay, of what all sequences have shown and of what one has."""
REMEMBERED = 4.0
"""Steps with drafts that a sequence's own counts weigh behind a pause, at most."""
FORESEEN = 512
"""Tokens that a request may still emit, at most, where drafts have to bring back the reading of its text."""


def _acceptance_of(profile: Profile) -> dict[bool, Acceptance]:
    """Of all sampled and of all greedy requests, before any."""
    return {greedy: Acceptance(*profile.known(greedy), *SHARED) for greedy in (False, True)}


class Share(NamedTuple):
    """The drafts of a batch that make its fastest step. speed: tokens per second of it.  drafting: ids of their courses.  nodes: of them all."""

    speed: float
    drafting: frozenset[int]
    nodes: float


class AdaptivePolicy(Policy):
    """Drafts by the marginal rule; see the module.

    profile: None for one that is measured while the engine is idle.  copying: whether long repeats of the text are verified in place of the drafts
        of a model or head.  max_step: seconds of a step, to which drafts are cut.
    """

    asks_for_spares = True

    def __init__(
        self, profile: Profile | None = None, *, copying: bool = False, max_step: float = inf
    ) -> None:
        self.given = profile
        self._copying = copying
        self._max_step = max_step
        self.open(profile or Profile.assumed())
        self.shaper = Shaper()
        self._copies = False
        self._num_unread = len
        self._reads = False
        self._expected = 1
        self._riding = 0

    def open(self, profile: Profile) -> None:
        """Start from this."""
        self._follow(profile)
        self.acceptance = _acceptance_of(profile)
        self.credit = SharedCredit()
        self._step = LastStep()
        self._stored = self.missing = False
        """Whether what steps have shown is stored, and whether costs are assumed that could be measured."""
        self._share: Share | None = None
        self._candidates = list[Course]()
        """Of the present step, once a draft was weighed, and the sequences that do not pause at its begin."""

    def _follow(self, profile: Profile) -> None:
        """Go by the costs of this."""
        self.profile = profile
        self.live = LiveCosts(profile.costs)
        self._steps_between_reads = REPEATS_SECONDS // (REPEATS_SHARE * profile.costs.step(1, 0))

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Start from what is known of these parts, and ask for what both draw and verify exactly.

        Raises:
            IncompatibleError: a profile of other parts.
        """
        needs = drafter.needs
        offers = drafter.offers
        method = verifier.info
        self.shaper = Shaper.of(drafter, method)
        self._reads = offers.cursor is not None
        model_based = offers.model is not None
        if offers.slots is not None:
            self._num_unread = offers.slots.num_unread
        self._copying = (
            self._copying
            and model_based
            and method.lossless
            and not (needs.every_step or method.shared_noise)
            and offers.extra_nodes is None
        )
        self._copies = (
            drafter.info.draft_sampling == {DraftSampling.POINT_MASS} and not needs.hidden and not model_based
        )
        if self.given is not None:
            check_identity(self.given, target, drafter, verifier)
        profile, missing = (self.given, False) if self.given is not None else begun(target, drafter, verifier)
        self.open(profile)
        self.missing = missing

    def measure(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        rehearse: Callable[[], Rehearsed] = unrehearsed,
        slots: tuple[int, int] = (0, 0),
        stopped: Callable[[], bool] = lambda: False,
        text: Seq[int] | None = None,
    ) -> None:
        """Measure the costs that are missing, of an idle target; see `profile.profile_of`. What steps have shown of acceptance stays."""
        if self.missing:
            self._follow(profile_of(target, drafter, verifier, rehearse, slots, stopped, text))
            self.missing = False
            measured = {greedy: rates for greedy, rates in self.acceptance.items() if rates.steps}
            self.acceptance = _acceptance_of(self.profile) | measured

    def course(self, s: RunningSequence) -> Course:
        """Where a sequence stands."""
        if s.course is None:
            params = s.request.params
            stored = self.profile.known(params.greedy) if params.follows_drafts else None
            shared = self.acceptance[params.greedy]
            acceptance = Acceptance(*(stored or (shared.rates, shared.expected)), *OWN)
            credit = Credit(
                CREDIT if stored else self.credit.grant(params.greedy), num_tokens=len(s.token_ids)
            )
            s.course = Course(acceptance, self.profile.costs if stored else None, Repeats(s.request), credit)
        return s.course

    def rests(self, sequences: Seq[RunningSequence]) -> bool:
        """See `fixed.Policy`."""
        drafting = [s for s in sequences if s.drafting]
        for s in drafting:
            course = s.course
            if course is None or course.pause_left <= 1 or s.request.budget is not None:
                self._step.slept = 0
                return False
        for s in drafting:
            if s.course.unheard >= self._listens and not s.course.hear(s.token_ids):
                self._step.slept = 0
                return False
        for s in drafting:
            s.course.rest()
        if self._step.sleep(sequences):
            self.credit.forget_step()
        return True

    @property
    def _listens(self) -> float:
        """Steps of a pause after which a text is read for repeats."""
        return 0 if self._copies else self._steps_between_reads if self._copying else inf

    def expect(self, num_sequences: int, riding: int) -> None:
        """See `fixed.Policy`."""
        self._expected = num_sequences
        self._riding = riding

    def opens(self, s: RunningSequence, num_sequences: int, *, again: bool = False) -> bool:
        """Whether drafts for a request bring back what its text takes to be read for them, in a batch of so many that all draft: as before, of one
        token, or, alone, of one that is accepted for sure."""
        params = s.request.params
        number = max(num_sequences, 1)
        costs = self.live.costs.behind(len(s.token_ids), number)
        if params.follows_drafts:
            return True
        course = self.course(s)
        if self._reads and not course.paused and course.credit.left < least_loss(number, costs):
            self._stop(s, course)
            return True
        plain = speed_of([], number, costs)
        fastest = self.acceptance[params.greedy].fastest(number, costs)
        emitted = len(s.token_ids) - len(s.request.prompt_token_ids)
        tokens_left = min(FORESEEN, (params.max_tokens or FORESEEN + emitted) - emitted)
        unread = self._num_unread(s.token_ids)
        reading = costs.draft_step * costs.breadth(unread) if unread else 0.0
        return tokens_left * (1.0 / plain - 1.0 / fastest) > reading + (
            costs.rows(len(s.token_ids)) if again else 0.0
        )

    def budgets(self, sequences: Seq[RunningSequence]) -> list[Budget]:
        """One each."""
        courses = [self.course(s) for s in sequences]
        self._step.begin(sequences)
        self._share = None
        self._candidates = [c for s, c in zip(sequences, courses, strict=True) if s.drafting and not c.paused]
        for s, course in zip(sequences, courses, strict=True):
            course.step_budget = self._next(s, course) if s.drafting else NOTHING
        drafting = [course for s, course in zip(sequences, courses, strict=True) if s.drafting]
        fit(drafting, self._step.batch, self._riding, self._live_costs)
        return [course.step_budget for course in courses]

    def _next(self, s: RunningSequence, course: Course) -> Budget:
        if course.paused and course.unheard < self._listens:
            course.rest()
            return NOTHING
        course.unheard = 0
        if self._copies or self._copying:
            course.repeats.read(s.token_ids)
        if self._copies and course.repeats.doubles() and course.paused:
            course.meet(Event.OVER)  # what copies from the text has more to copy than ever
            course.credit.renew()
        copied = self._copied(s, course)
        if copied:
            return Budget.copying(copied)
        if course.rest():
            return NOTHING
        if self._reads and s.state is None and not self.opens(s, max(self._expected, self._step.batch)):
            course.meet(Event.CLOSED)
        if course.paused:
            return NOTHING
        if course.held and course.budget is not NOTHING and course.acceptance.steps >= SURE:
            course.held -= 1
            return course.budget
        course.budget = self._weighed(s, course)
        return course.budget

    @property
    def _live_costs(self) -> Costs:
        """Costs behind the texts of the batch."""
        return self.live.costs.behind(self._step.num_tokens, self._step.batch)

    def _costs(self, s: RunningSequence, course: Course) -> Costs:
        """Costs behind the texts of the batch, or behind this one's alone."""
        return course.costs.behind(len(s.token_ids)) if course.costs else self._live_costs

    def _copied(self, s: RunningSequence, course: Course) -> tuple[int, ...]:
        """What is copied from the text beside the drafts of a model; nothing where those promise more."""
        if not (self._copying and course.weighed.speed and course.repeats.length):
            return ()
        return worth_copying(course.repeats, course.weighed, self._costs(s, course), self._max_step)

    def _share_of(self, costs: Costs) -> Share:
        """Which drafts of the batch survive most often and make the fastest step, beside the rows of those that decode plainly. Once a step."""
        if self._share is None:
            ranked = sorted(self._candidates, key=lambda course: course.survival, reverse=True)
            count, speed = fastest_share(
                [course.acceptance.expected for course in ranked], self._step.batch, costs
            )
            nodes = sum(course.acceptance.expected.nodes for course in ranked[:count])
            self._share = Share(speed, frozenset(map(id, ranked[:count])), nodes)
        return self._share

    def _weighed(self, s: RunningSequence, course: Course) -> Budget:
        """The draft that the rule is for; nothing, and a pause, where the whole draft does not pay: in the batch or, with a seed, as if alone."""
        batch = 1 if course.costs else self._step.batch
        costs = self._costs(s, course)
        beside, is_chosen = self._beside(course, costs)
        worth = gain(course.acceptance.expected, *beside)
        course.weighed = Weighed(beside.speed, beside.rows, worth if is_chosen else min(worth, 0.0))
        course.credit.earn(len(s.token_ids))
        course.credit.least = least_loss(batch, costs)
        if course.credit.spent:
            self._spare(s, course)
            return NOTHING
        lost = course.credit.left * costs.step(batch, 0) / batch  # seconds that may be lost
        longest = min(self._max_step, costs.step(beside.rows, 0) + lost)
        if course.weighed.gain > 0:
            course.meet(Event.PAYS)
        elif course.looks and gain(CERTAIN, *beside) > 0:
            course.meet(Event.HOPES)
        else:
            course.meet(Event.FAILS, min_pause(batch, costs))
            course.acceptance.forget(REMEMBERED)
            return NOTHING
        return self.shaper.draft(
            s.request.params, course.acceptance, beside, longest, costs_missing=self.missing
        )

    def _beside(self, course: Course, costs: Costs) -> tuple[Beside, bool]:
        """The step that a draft would join, and whether the fastest one has it. costs: behind its text, or those of the batch."""
        expected = course.acceptance.expected
        if course.costs:
            count, speed = fastest_share([expected], 1, costs)
            return Beside(speed, 1.0, 1, costs), count == 1
        share = self._share_of(costs)
        is_chosen = id(course) in share.drafting
        rows = self._step.batch + share.nodes - is_chosen * expected.nodes
        return Beside(share.speed, rows, len(share.drafting) + (not is_chosen), costs), is_chosen

    def _spare(self, s: RunningSequence, course: Course) -> None:
        """Nothing is drafted, as the credit does not pay for it: until it does, where drafts of all requests together paid; else for good."""
        if course.costs is None and self.credit.grows(s.request.params.greedy):
            course.meet(Event.CLOSED, course.credit.tokens_until_enough())
            course.looks = LOOK
            course.acceptance.forget(REMEMBERED)
        else:
            self._stop(s, course)

    def _stop(self, s: RunningSequence, course: Course) -> None:
        """Nothing is drafted for it any more, unless its text repeats itself."""
        course.meet(Event.SPENT)
        s.stopped = not self._copies

    def learn(
        self,
        sequences: Seq[RunningSequence],
        draft: Draft,
        probs: Callable[[], Float[np.ndarray, "B N V"]],
        outcome: Outcome,
    ) -> None:
        """Fold the step into what each sequence, and all of them, have shown."""
        parents = draft.tree.host.parents
        paths = outcome.lists.paths
        confidence = draft.confidence
        had_drafts = self._step.depth > 0
        self.credit.forget_step()
        self._step.reset(len(sequences))
        for b, s in enumerate(sequences):  # those that failed in this step have no row
            course = self.course(s)
            budget = course.step_budget
            if s.drafting and budget.copied:
                self._step.rows += int((parents[b, 1:] >= 0).sum())
            elif s.drafting and budget.max_depth:
                self._learn(s, course, parents[b], paths[b], None if confidence is None else confidence[b])
        self._step.alike = self._step.alike + 1 if had_drafts == (self._step.depth > 0) else 0

    def _learn(
        self, s: RunningSequence, course: Course, parents: Any, path: Seq[int], confidence: Any
    ) -> None:
        """What the draft of one sequence has shown, and what it is charged for it; see `Acceptance.observe`."""
        greedy = s.request.params.greedy
        in_turn = course.step_budget.has_spares and not greedy
        nodes, depth = course.acceptance.observe(parents, path, confidence, in_turn=in_turn)
        self.acceptance[greedy].observe(parents, path, confidence, in_turn=in_turn)
        accepted = len(path)
        if course.costs is None:
            begins = course.acceptance.steps == 1
            self.credit.note(course, greedy=greedy, accepted=accepted, begins=begins)
        else:
            course.pay(self._foreseen_loss(s, course, nodes, depth) - accepted)
        course.read = len(s.token_ids) + accepted + 1
        self._step.add(nodes, depth)

    def time(self, seconds: Mapping[str, float]) -> None:
        """Take note of what the step that was learnt from took, by phase."""
        step = self._step
        if step.sleeps:
            return
        self.credit.settle(seconds, step, self.live.costs)
        if not step.is_telling():
            return
        self.live.observe(
            step.rows,
            step.depth,
            scoring=seconds["scoring"],
            drafting=seconds["drafting"],
            rest=seconds["verifying"] + seconds["other"],
            num_sequences=max(step.drafting, 1),
            num_tokens=step.num_tokens,
            batch=max(step.batch, 1),
        )

    def _foreseen_loss(self, s: RunningSequence, course: Course, nodes: int, depth: int) -> float:
        """Plain steps that a step with drafts takes beyond one, by measured costs; with what the drafter read that it had missed."""
        assert course.costs is not None  # of a request with a seed
        costs = course.costs.behind(len(s.token_ids))
        missed = len(s.token_ids) - course.read if course.read and self._reads else 0
        reading = costs.draft_step * costs.breadth(missed) if missed else 0.0
        return (costs.step(1 + nodes, depth) + reading) / costs.step(1, 0) - 1.0

    def store_costs(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Remember what steps have shown, once, where costs were assumed and are still missing."""
        if self.missing and not self._stored and self._step.timed >= ENOUGH:
            self._stored = True
            remember_steps(target, drafter, verifier, self.live.costs)

    def learnt(self) -> Profile:
        """What is known by now, as a profile to start from."""
        modes = [
            (tuple(self.acceptance[greedy].rates), self.acceptance[greedy].expected)
            for greedy in (False, True)
        ]
        return Profile(self.live.costs, *modes, self.profile.about)
