"""How much to draft in the next round, decided from past rounds and tables only.

A plan may look at tables and at rounds that are over, never at the draft it is deciding about: the tree, or the bounds of one that
grows, are fixed before the first token of a round is drawn, so every choice here keeps the output law.
A given profile is such a table. Without one, costs and acceptance are learnt from the rounds that are over (`plan/learner.py`).
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Drafter, Outcome, Target, Verifier
from polydraft.plan.acceptance import DEPTHS, Record
from polydraft.plan.costs import Work
from polydraft.plan.fixed import Sequence, check_room
from polydraft.plan.learner import BURST, SETTLED, Learner, assumed
from polydraft.plan.profile import Profile, check_identity, identity, remembered
from polydraft.plan.search import Found, best
from polydraft.plan.sizes import NOTHING, Decided, Options, Paths, most_paths

__all__ = ["AdaptivePlan"]

RISEN = 0.1
"""Acceptance of a first draft that a probe must add to be followed by another one at once."""
PROBING = 0.0025
"""Share of the time without drafts that probes may take."""
LOOKING = 64
"""Rounds from one look for a size to try to the next."""
HELD = 4
"""Drafting rounds for which a plan holds, as planning costs 4% of a round of the embedded pair; 8 is late where texts change."""
COMPARED, SELDOM_COMPARED = 8, 256
"""Rounds with drafts from one look at what a round without takes to the next: at first, and then as many as there were so far, up to this."""
FIRST, SELDOM = 128, 7
"""The first FIRST rounds with drafts are all looked at by what learns, then one in SELDOM, which shares no divisor with HELD."""


@dataclass
class Course:
    """Where a sequence stands. record: what its rounds have shown.

    until: round before which it rests.  pause: rounds of the last rest.  due: a probe follows the rest.  before: rate at the last probe.
    """

    record: Record
    until: float = 0
    pause: int = 0
    due: bool = False
    before: float = 1.0

    @property
    def rate(self) -> float:
        """Acceptance of first drafts as seen, without the prior."""
        seen = float(self.record.seen[0])
        return float(self.record.kept[0]) / seen if seen > 0 else 0.0


@dataclass
class AdaptivePlan:
    """The size of most expected tokens per second; no drafts while they do not pay, tried again after longer and longer waits.

        speed(size) = E[tokens | acceptance by depth] / seconds(batch, rows, depth, context), the geometric mean over the batch

    Sizes are chains and K paths; of drafters of most probable trees (`Method.ranked`) trees of as many nodes and such a depth. Seconds come
    from the profile: a given one (`polydraft tune`) does not change; without one they are assumed, and learnt from the rounds
    that run (`plan/learner.py`). Acceptance is each sequence's own, from its past rounds, around the profile's (`plan/acceptance.py`).
    Only these decide, before the round's first draw: the output law is kept. For a given profile a seed gives one text; where costs are learnt, the
    clock and the requests before have a say in how much is drafted, and with it in which text of the same law a seed gives.

    profile: None to start from assumed costs and learn in an engine; without an engine, assumed costs.
    max_depth, max_width: bounds of the search.
    margin: share by which drafting must promise to beat plain decoding; below 0 as a pause is not free: what is missed is read
        before the next draft, and sizes that change cost.
    first_pause, longest_pause: rounds without drafts after a stop, at least and at most: so many that the draft which
        falls least short of plain decoding loses 0.25% of them, doubled each time one changes nothing.

    After Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), section on throughput.

    Example:
        >>> plan = AdaptivePlan(Profile.assumed())
        >>> plan.best(0.9).max_depth, plan.best(0.02).max_depth
        (11, 0)
    """

    profile: Profile | None = None
    max_depth: int = DEPTHS
    max_width: int = 4
    margin: float = -0.05
    first_pause: int = 4
    longest_pause: int = 256
    learner: Learner | None = field(default=None, init=False, repr=False, compare=False)
    """What the profile is learnt by while the plan is used; None where it was given."""

    def __post_init__(self) -> None:
        self._reset(Paths(self.max_depth, self.max_width))

    def _reset(self, grid: Paths) -> None:
        self.grid = grid
        self._courses: WeakKeyDictionary[Any, Course] = WeakKeyDictionary()
        self._rounds = self._drafting = self._trying = self._holding = self._since = self._barred = self._compared = 0
        """Rounds, those with drafts, those left of a trial and of a plan; the round in which the present kind began, until which
        drafts have lost too much, and in which one without drafts was timed last."""
        self._noted, self._begins, self._trial, self._wake = False, False, NOTHING, 0.0
        """Whether what learns looks at this round, and a drafter begins in it; the size that is tried; the round until which nobody drafts."""
        self._last: list[Any] = []
        """Sequences of the last round, and in `_held` their budgets."""
        self._held: list[Budget] = []
        self._kind: list[tuple[int, int]] = []
        self._drafts: list[tuple[int, int]] = []
        """Nodes and depth of each draft of the round that runs."""
        self._asked, self._tokens = False, 1.0
        """Whether a draft is asked for in the round that runs, and the tokens that it gave each sequence."""

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Keep the sizes that both allow, and get a profile where none was given: one measured of these parts before, else an assumed one to learn from.

        Raises:
            CapacityError: bounds beyond the rows of a pass.
            IncompatibleError: a profile of other parts.
        """
        width = most_paths(drafter.info, verifier.info, self.max_width)
        self._reset(Paths(self.max_depth, width, grown=drafter.info.ranked))
        check_room(self.max_depth * self.max_width, f"max_depth={self.max_depth} and max_width={self.max_width}")
        if self.profile is not None and self.learner is None:
            check_identity(self.profile, target, drafter, verifier)
            return
        self.profile, self.learner = remembered(identity(target, drafter, verifier)), None
        if self.profile is None:
            self.learner = Learner(assumed(target, drafter))
            self.profile = self.learner.profile

    @property
    def most_nodes(self) -> int:
        """Drafted nodes of a sequence, at most."""
        return self.max_depth * self.max_width

    @property
    def known(self) -> Profile:
        """The profile, or the assumed one."""
        if self.profile is None:
            self.profile = Profile.assumed()
        return self.profile

    def course(self, sequence: Sequence) -> Course:
        """Where a sequence stands."""
        found = self._courses.get(sequence)
        if found is None:
            found = self._courses[sequence] = Course(Record())
        return found

    def _prior(self, sequence: Sequence) -> np.ndarray:
        return self.known.prior(sequence.request.params.temperature)

    def promise(self, sequences: Seq[Sequence], rests: Seq[bool], share: float | None = None) -> Found:
        """The best sizes for those that do not rest, of whom one at least does not. share: of them, those that have something to draft; None: as in the past."""
        expected, options, shares = 1.0 if self.learner is None else self.learner.share, list[Options | None](), list[float]()
        for s, rest in zip(sequences, rests, strict=True):
            record = self.course(s).record
            options.append(None if rest else self.grid.options(record, self._prior(s), greedy=s.request.params.greedy))
            shares.append(record.share(expected) if share is None else share)
        return best(options, shares, [len(s.token_ids) for s in sequences], self.known.costs.prices)

    def best(self, rate: float, *, batch: int = 1, context: int = 0, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of one draft, the same at every depth."""
        options = [self.grid.options(Record(), np.full(DEPTHS, rate), greedy=greedy)] * batch
        found = best(options, [1.0] * batch, [context] * batch, self.known.costs.prices)
        if (size := found.sizes[0]) is None or not self._pays(found):
            return NOTHING
        return self.grid.budget(size)

    def _pays(self, found: Found) -> bool:
        return found.speed > (1.0 + self.margin) * found.plain

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each."""
        if self._rounds + 1 < self._wake and sequences == self._last:
            self._rounds += 1
            return self._held
        self._noted = self.timed
        self._rounds += 1
        if (tried := self._tried(sequences)) is not None:
            return self.give(sequences, [tried] * len(sequences))
        if self._holding and sequences == self._last and self._rounds >= self._barred and all(s.drafting for s in sequences):
            self._holding -= 1
            return self.give(sequences, self._held)
        return self.give(sequences, self._next(sequences))

    def give(self, sequences: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """Draft this in the round, whatever is thought of it; from its draft `learn` sees who was asked in vain."""
        self._last, self._held = list(sequences), budgets
        kind = [(g.max_nodes, g.max_depth) for g in budgets]
        if kind != self._kind:
            self._kind, self._since = kind, self._rounds
        self._asked, self._begins = any(depth for _, depth in kind), False
        if self._asked:
            self._wake, self._drafting = 0.0, self._drafting + 1
            self._begins = any(s.state is None and g.max_depth for s, g in zip(sequences, budgets, strict=True))
        elif self._trying:
            self._wake = 0.0
        else:
            rests = [max(self.course(s).until, self._barred) for s in sequences if s.drafting] if self.known.drafts else []
            look = math.inf if self.learner is None else self._rounds - self._rounds % LOOKING + LOOKING
            self._wake = min([look, *rests])
        return budgets

    def _tried(self, sequences: Seq[Sequence]) -> Budget | None:
        """Now and then a size that is seldom seen, or none, for a few rounds in a row: the first of them let caches and drafters settle."""
        if self.learner is None or not self.known.drafts or self._rounds <= SETTLED + BURST:
            return None
        if self._trying:
            self._trying -= 1
            return self._trial
        if not all(s.drafting for s in sequences):
            return None
        found = None
        if self._asked and self._rounds - self._compared >= min(max(self._drafting, COMPARED), SELDOM_COMPARED):
            found = NOTHING
        elif self._rounds % LOOKING == 0:
            found = self.learner.untried(self.grid.tried, [len(s.token_ids) for s in sequences], self._rounds)
        if found is not None:
            self._trying, self._trial = SETTLED + BURST - 1, found
        return found

    def _next(self, sequences: Seq[Sequence]) -> list[Budget]:
        """What is worth drafting, or a probe where a rest is over; keeps the account of rests."""
        rests = [not s.drafting or self._rounds < max(self.course(s).until, self._barred) for s in sequences]
        self._holding, given = 0, [NOTHING] * len(sequences)
        first = self.learner is not None and self._rounds <= SETTLED + BURST  # all else is compared to rounds without drafts
        if first or all(rests) or not self.known.drafts:
            return given
        found = self.promise(sequences, rests)
        pays = self._pays(found)
        pause = max(self.first_pause, 0 if pays else math.ceil(found.loss / PROBING))  # beside others' drafts a probe is cheap
        for b, (s, rest, size) in enumerate(zip(sequences, rests, found.sizes, strict=True)):
            course = self.course(s)
            if rest or not ((pays and size is not None) or self._probes(course, s, pause)):
                continue
            if pays and size is not None:
                course.pause = 0
            row, column = size or (0, 0)
            if self.learner is not None:  # what is twice as deep as anything that was timed may cost anything
                row = min(row, max(2 * self.learner.deepest - 1, 0))
            given[b] = self.grid.budget((row, column))
        self._holding = HELD - 1 if pays and all(budget.max_depth for budget in given) else 0
        return given

    def _probes(self, course: Course, sequence: Sequence, shortest: int) -> bool:
        """Whether a rest is over, or the probe after it fitted well; else the next rest begins."""
        if course.due or course.rate > course.before + RISEN:
            course.before = course.rate if course.record.counted else float(self._prior(sequence)[0])
            course.due = False
            return True
        course.pause = min(max(2 * course.pause, shortest), self.longest_pause)
        course.until, course.due = self._rounds + 1 + course.pause, True
        return False

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into each sequence's record, and into what all have shown."""
        if not self._asked:
            return
        given = {id(s): budget for s, budget in zip(self._last, self._held, strict=True)}
        learner, self._drafts = self.learner if self._noted else None, []
        for b, s in enumerate(sequences):  # those that failed in this round have no row
            decided = Decided.of(given[id(s)], draft, outcome, b)
            if learner is not None:
                self._drafts.append((len(depths := decided.depths) - 1, max(depths)))
            if not decided.budget.max_depth or not s.drafting:
                continue
            course, prior = self.course(s), self._prior(s)
            for record in [course.record] if learner is None else [course.record, learner.shown[s.request.params.greedy]]:
                record.ask(decided.had)
                if decided.had:
                    self.grid.count(record, decided, prior)
        self._tokens = 1.0 + sum(map(len, outcome.lists[0])) / max(len(sequences), 1)

    @property
    def timed(self) -> bool:
        """Whether the next round is to be timed: most without drafts are not, and of those with drafts the first ones and some."""
        if self.learner is None or self._rounds + 1 < self._wake:
            return False
        return bool(self._drafting < FIRST or self._drafting % SELDOM == 0 or self._trying or self._wake)

    def time(self, sequences: Seq[Sequence], draft: Draft, seconds: float) -> None:
        """Learn what a round took that is over, if it was like the rounds before it."""
        if self.learner is None or not self._noted or not sequences:
            return
        contexts = [len(s.token_ids) for s in sequences]
        work, learner = Work(len(contexts), sum(contexts)), self.learner
        settled = self._rounds - self._since >= SETTLED
        if self._asked:
            work = Work.drafted(self._drafts, contexts, sum(g.max_depth > 0 for g in self._held))
            if self._begins:  # the drafter has read the text in this round
                settled, seconds = False, learner.profile.costs.seconds(work)
            stands_for = SELDOM if self._drafting > FIRST and not self._trying else 1
            learner.gain(work, stands_for * seconds, stands_for * self._tokens)
            if (
                learner.barred(len(contexts), self._rounds) > self._rounds >= self._barred
            ):  # or were plain rounds timed in a good moment?
                self._trying, self._trial, self._barred = SETTLED + BURST, NOTHING, self._rounds + 1
        if settled:
            learner.time(work, seconds)
            self.profile = learner.profile
            if not self._asked and not self._trying:
                self._compared = self._rounds
                learner.compare(len(contexts), self._rounds)
                self._barred = learner.barred(len(contexts), self._rounds)
