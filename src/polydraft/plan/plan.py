"""How much to draft in the next round, decided from past rounds and tables only.

A plan may look at tables and at rounds that are over, never at the draft it is deciding about: the tree, or the bounds of one that
grows, are fixed before the first token of a round is drawn, so every choice here keeps the output law.
A given profile is such a table. Without one, costs and acceptance are learnt from the rounds that are over (`plan/learner.py`).
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft import tree
from polydraft.core import Budget, Draft, Drafter, Outcome, Request, Target, Verifier
from polydraft.errors import CapacityError
from polydraft.models.slots import TREE_ROOM
from polydraft.plan.acceptance import DEPTHS, Record
from polydraft.plan.costs import HINGE, Work
from polydraft.plan.learner import BURST, LASTING, SETTLED, Learner, assumed
from polydraft.plan.profile import Profile, check_identity, identity, remembered
from polydraft.plan.ranked import MOST_NODES, Ranked
from polydraft.plan.search import Found, best
from polydraft.plan.sizes import NOTHING, Decided, Grid, Options, Paths, columns, pairs
from polydraft.verifiers import pairing

__all__ = ["AdaptivePlan", "FixedPlan", "Plan", "Sequence"]

REMEMBERED = 4.0
"""Rounds of the past that a probe is weighed against: few, so that a change is seen, and enough to hold against the prior."""
RISEN = 0.1
"""Acceptance of a first draft that a probe must add to be followed by another one at once."""
PROBING = 0.0025
"""Share of the time without drafts that probes may take."""
WEIGHING = 1e-4
"""Seconds that a probe takes beside its draft: sizes are weighed again, and the drafter reads what it missed."""
HELD = 4
"""Drafting rounds for which a plan holds, as planning costs 4% of a round of the embedded pair; 8 is late where texts change."""
LOOKING = 32
"""Rounds from one look for a size to try to the next."""
ALIKE = 64
"""Tokens of context that make no difference to a sequence that has shown nothing yet."""
FIRST, EVERY, SELDOM = 128, 32, 7
"""The first FIRST rounds with drafts are all looked at by what learns, then one in SELDOM, which shares no divisor with HELD; of the others the first
EVERY and then one in EVERY."""


class Sequence(Protocol):
    """What a plan knows of a running sequence. token_ids: prompt and output.  state: the drafter's.  drafting: False where its drafter is off."""

    request: Request
    token_ids: list[int]
    state: Any
    drafting: bool


class Plan(Protocol):
    """Budgets for the next round of each sequence.

    One that has `prepare(target, drafter, verifier)` is given the parts before it plans, and one that has `time(sequences, draft, seconds)` is
    told what a round took that began while its `timed` was true.
    """

    def budgets(self, sequences: Seq[Any]) -> list[Budget]: ...

    def learn(self, sequences: Seq[Any], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Take note of a round that is over; processed: the target's processed logits at the drafted nodes."""
        ...


@dataclass(frozen=True)
class FixedPlan:
    """The same budget in every round, for reproducible comparisons.

    Example:
        >>> from polydraft.tree import paths
        >>> FixedPlan(Budget.fixed(paths(2, 4))).budget.max_nodes
        8
    """

    budget: Budget

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Refuse a budget that does not fit a pass, that the drafter does not draw, or that the rule is not exact for.

        Raises:
            CapacityError, IncompatibleError: it says what to do.
        """
        check_room(self.budget.max_nodes, f"depth={self.budget.max_depth} and num_paths={self.budget.width}")
        pairing.check_budget(self.budget, drafter.info, verifier.info)

    def budgets(self, sequences: Seq[Any]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def learn(self, sequences: Seq[Any], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Nothing: the plan is fixed."""


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

    Sizes are chains, K paths, and a trunk and then K paths; for drafters of most probable trees (`Method.ranked`) their nodes and depth. Seconds come
    from the profile: a given one (`polydraft tune`) does not change; without one they are assumed, and learnt from the rounds
    that run (`plan/learner.py`). Acceptance is each sequence's own, from its past rounds, around the profile's (`plan/acceptance.py`).
    Only these decide, before the round's first draw: the output law is kept. For a given profile a seed gives one text; where costs are learnt, the
    clock and the requests before have a say in how much is drafted, and with it in which text of the same law a seed gives.

    profile: None to start from assumed costs and learn in an engine; without an engine, assumed costs.
    max_depth, max_width, max_trunk: bounds of the search.  max_nodes: of most probable trees.
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
    max_trunk: int = 2
    max_nodes: int = MOST_NODES
    margin: float = -0.05
    first_pause: int = 4
    longest_pause: int = 256
    learner: Learner | None = field(default=None, init=False, repr=False, compare=False)
    """What the profile is learnt by while the plan is used; None where it was given."""

    def __post_init__(self) -> None:
        self._reset(Paths(self.max_depth, pairs(self.max_width, self.max_trunk)))

    def _reset(self, grid: Grid) -> None:
        self.grid = grid
        self._courses: WeakKeyDictionary[Any, Course] = WeakKeyDictionary()
        self._rounds = self._drafting = self._trying = self._holding = self._since = 0
        self._exploring, self._trial = False, NOTHING
        self._fresh: dict[tuple[float, int, float], tuple[Found, list[Options | None]]] = {}
        """What is promised to sequences that have shown nothing yet, by the profile `_fresh_of`."""
        self._fresh_of: Profile | None = None
        self._wake = self._resting = 0.0
        """Round until which nobody drafts; seconds of such a round."""
        self._last: list[Any] = []
        """Sequences of the last round, and in `_held` their budgets and sizes."""
        self._held: list[tuple[Budget, tuple[int, int]]] = []
        self._kind: list[tuple[int, int]] = []
        self._given: list[tuple[Any, Budget, tuple[int, int]]] = []
        """Sequences, budgets and sizes of the round that runs; empty where none is asked for drafts."""

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Keep the sizes that both allow, and get a profile where none was given: one measured of these parts before, else an assumed one to learn from.

        Raises:
            CapacityError: bounds beyond the rows of a pass.
            IncompatibleError: a profile of other parts.
        """
        if drafter.info.ranked:
            self._reset(Ranked(self.max_depth, self.max_nodes))
        else:
            self._reset(Paths(self.max_depth, columns(drafter.info, verifier.info, self.max_width, self.max_trunk)))
        check_room(self.max_depth * self.max_width, f"max_depth={self.max_depth} and max_width={self.max_width}")
        if self.profile is not None and self.learner is None:
            check_identity(self.profile, target, drafter, verifier)
            return
        self.profile, self.learner = remembered(identity(target, drafter, verifier)), None
        if self.profile is None:
            self.learner = Learner(assumed(target, drafter), self.grid)
            self.profile = self.learner.profile

    @property
    def known(self) -> Profile:
        """The profile, or the assumed one."""
        if self.profile is None:
            self.profile = Profile.assumed()
        return self.profile

    def course(self, sequence: Sequence) -> Course:
        """Where a sequence stands."""
        if sequence not in self._courses:
            self._courses[sequence] = Course(self.grid.record())
        return self._courses[sequence]

    def _prior(self, sequence: Sequence) -> np.ndarray:
        return self.known.prior(sequence.request.params.temperature, ranked=self.grid.ranked)

    def promise(
        self, sequences: Seq[Sequence], rests: Seq[bool], share: float | None = None
    ) -> tuple[Found, list[Options | None]]:
        """The best sizes for those that do not rest, of whom one at least does not. share: of them, those that have something to draft; None: as in the past."""
        expected, options = 1.0 if self.learner is None else self.learner.share, list[Options | None]()
        for s, rest in zip(sequences, rests, strict=True):
            record = self.course(s).record
            each = None if rest else self.grid.options(record, self._prior(s), greedy=s.request.params.greedy)
            had = record.share(expected) if share is None else share
            options.append(each if each is None or had == 1.0 else each.scaled(had))
        return best(options, [len(s.token_ids) for s in sequences], self.known.costs.prices), options

    def _promised(self, sequences: Seq[Sequence], rests: Seq[bool]) -> tuple[Found, list[Options | None]]:
        """`promise`, remembered for a sequence that is alone and has shown nothing yet: such are many and alike, and weighing is dear."""
        s, record = sequences[0], self.course(sequences[0]).record
        if len(sequences) > 1 or record.asked or record.counted:
            return self.promise(sequences, rests)
        if self._fresh_of is not self.known:
            self._fresh, self._fresh_of = {}, self.known
        key = (
            s.request.params.temperature,
            len(s.token_ids) // ALIKE,
            1.0 if self.learner is None else round(self.learner.share, 2),
        )
        if key not in self._fresh:
            self._fresh[key] = self.promise(sequences, rests)
        return self._fresh[key]

    def best(self, rate: float, *, batch: int = 1, context: int = 0, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of one draft, the same at every depth."""
        alike = {"acceptance": (rate,) * DEPTHS, "greedy": (), "ranked": (), "greedy_ranked": ()}
        record, prior = self.grid.record(), replace(self.known, **alike).prior(1.0, ranked=self.grid.ranked)
        options = [self.grid.options(record, prior, greedy=greedy)] * batch
        found = best(options, [context] * batch, self.known.costs.prices)
        size = found.sizes[0]
        if size is None or not self._pays(found):
            return NOTHING
        return self.grid.budget(size, record, prior, self._node_price(found, options[0], size, batch, context))

    def _pays(self, found: Found) -> bool:
        return found.speed > (1.0 + self.margin) * found.plain

    def _node_price(self, found: Found, options: Options, size: tuple[int, int], batch: int, context: int) -> float:
        """Tokens that a node has to be worth at this speed."""
        prices = self.known.costs.prices
        each = prices.rows + prices.nodes + prices.rows_context * context
        beyond = prices.rows_beyond * (batch + float(options.nodes[size]) > HINGE)
        return batch * float(options.tokens[size]) * (each + beyond) / found.seconds

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each."""
        self._rounds += 1
        if self._rounds < self._wake and sequences == self._last:
            if self.learner is not None and self._rounds % EVERY:
                self.learner.seconds += self._resting
            return self._nothing
        tried = self._tried(sequences)
        self._exploring = tried is not None
        if tried is not None:
            return self.give(sequences, [tried] * len(sequences))
        if self._holding and sequences == self._last and all(s.drafting for s in sequences):
            self._holding -= 1
            return self._give(sequences, self._held)
        return self._give(sequences, self._next(sequences))

    def give(self, sequences: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """Draft this in the round, whatever is thought of it: chains, or paths that part at the root."""
        return self._give(sequences, [(budget, (0, int(budget.width > 1))) for budget in budgets])

    def _give(self, sequences: Seq[Sequence], given: list[tuple[Budget, tuple[int, int]]]) -> list[Budget]:
        """Take note of what this round is given; from its draft `learn` sees who was asked in vain."""
        self._last, self._held, budgets = list(sequences), given, [budget for budget, _ in given]
        kind = [(g.max_nodes, g.max_depth) for g in budgets]
        if kind != self._kind:
            self._kind, self._since = kind, self._rounds
        if any(depth for _, depth in kind):
            self._given, self._wake = [(s, *each) for s, each in zip(sequences, given, strict=True)], 0.0
            self._drafting += 1
        else:
            look = math.inf if self.learner is None else self._rounds - self._rounds % LOOKING + LOOKING
            rests = [self.course(s).until for s in sequences if s.drafting] if self.known.drafts else []
            self._given, self._nothing = [], budgets
            self._wake = 0.0 if self._exploring else min([look, *rests])
        return budgets

    def _tried(self, sequences: Seq[Sequence]) -> Budget | None:
        """Now and then, in pauses too, a size that is seldom seen, for a few rounds in a row: the first of them let caches and drafters settle."""
        if self.learner is None or not self.known.drafts or self._rounds <= SETTLED + BURST:
            return None
        if self._trying:
            self._trying -= 1
        elif self._rounds % LOOKING or not all(s.drafting for s in sequences):
            return None
        else:
            trial = self.learner.untried([len(s.token_ids) for s in sequences], paused=self._wake > 0)
            if trial is None:
                return None
            self._trying, self._trial = SETTLED + BURST - 1, trial
        return self._trial

    def _next(self, sequences: Seq[Sequence]) -> list[tuple[Budget, tuple[int, int]]]:
        """What is worth drafting, or a probe where a rest is over; keeps the account of rests."""
        rests = [not s.drafting or self._rounds < self.course(s).until for s in sequences]
        self._holding, nothing = 0, [(NOTHING, (0, 0))] * len(sequences)
        if all(rests) or not self.known.drafts:
            return nothing
        if self.learner is not None and self._rounds <= SETTLED + BURST:  # all else is compared to rounds without drafts
            return nothing
        found, options = self._promised(sequences, rests)
        pays = self._pays(found)
        pause = self.first_pause  # beside others' drafts a probe is cheap
        if not pays:
            pause = max(pause, math.ceil((found.loss + WEIGHING * found.plain) / PROBING))
        given = nothing
        for b, (s, each, size) in enumerate(zip(sequences, options, found.sizes, strict=True)):
            course = self.course(s)
            if each is None or not ((pays and size is not None) or self._probes(course, s, pause)):
                continue
            if pays and size is not None:
                course.pause = 0
            price = self._node_price(found, each, size or (0, 0), len(sequences), len(s.token_ids))
            given[b] = self.grid.budget(size or (0, 0), course.record, self._prior(s), price), size or (0, 0)
        self._holding = HELD - 1 if pays and all(budget.max_depth for budget, _ in given) else 0
        return given

    def _probes(self, course: Course, sequence: Sequence, shortest: int) -> bool:
        """Whether a rest is over, or the probe after it fitted well; else the next rest begins."""
        if course.due or course.rate > course.before + RISEN:
            course.before = course.rate if course.record.counted else float(self._prior(sequence)[0])
            course.due = False
            course.record.fade(min(1.0, REMEMBERED / max(float(course.record.seen[0]), REMEMBERED)))
            return True
        course.pause = min(max(2 * course.pause, shortest), self.longest_pause)
        course.until, course.due = self._rounds + 1 + course.pause, True
        return False

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into each sequence's record, and into what all have shown."""
        if not self._given:
            return
        rows = {id(s): b for b, s in enumerate(sequences)}  # those that failed in this round have none
        learner = self.learner if self._noted() else None
        for s, budget, size in self._given:
            b = rows.get(id(s))
            if b is None or not budget.max_depth or not s.drafting:
                continue
            decided, prior, record = Decided.of(budget, size, draft, outcome, b), self._prior(s), self.course(s).record
            told = [(record, None)] if learner is None else [(record, None), (learner.of_all(s.request.params.greedy), LASTING)]
            for each, decay in told:
                each.ask(decided.had, decay)
                if decided.had or self.grid.ranked:
                    self.grid.count(each, decided, prior, decay)

    def _noted(self) -> bool:
        """Whether the learner looks at this round."""
        if self._given:
            return self._exploring or self._drafting < FIRST or self._drafting % SELDOM == 0
        return self._exploring or self._rounds < EVERY or self._rounds % EVERY == 0

    @property
    def timed(self) -> bool:
        """Whether the next round is to be timed: most without drafts are taken to last as long as the last that was."""
        return self.learner is not None and (self._rounds + 1 >= self._wake or (self._rounds + 1) % EVERY == 0)

    def time(self, sequences: Seq[Sequence], draft: Draft, seconds: float) -> None:
        """Learn what a round took that is over, if it was like the rounds before it."""
        learner = self.learner
        if learner is None or not sequences:
            return
        learner.seconds += seconds
        if not self._given:
            self._resting = seconds
        if self._exploring:
            learner.exploring += seconds
        if self._rounds - self._since < SETTLED or not self._noted():
            return
        contexts = [len(s.token_ids) for s in sequences]
        if not self._given:
            learner.time(Work(len(contexts), sum(contexts)), seconds)
            self.profile = learner.profile
            return
        depths = tree.depths(draft.tree)
        nodes, deep = (depths > 0).sum(1).tolist(), depths.amax(1).tolist()
        branching, asked = sum(n > d for n, d in zip(nodes, deep, strict=True)), sum(g.max_depth > 0 for _, g, _ in self._given)
        by_context = sum(n * c for n, c in zip(nodes, contexts, strict=True))
        learner.time(Work(len(contexts), sum(contexts), sum(nodes), max(deep), asked, branching, by_context), seconds)
        self.profile = learner.profile


def check_room(num_drafted: int, given: str) -> None:
    """Raise CapacityError if a draft does not fit a pass: the last committed token takes one of its rows."""
    if num_drafted >= TREE_ROOM:
        raise CapacityError(
            f"{given} were given, up to {num_drafted} drafted tokens a step; expected at most {TREE_ROOM - 1}, the rows of one pass. "
            "Lower one of the two."
        )
