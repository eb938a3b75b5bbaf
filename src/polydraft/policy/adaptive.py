"""The speculation policy: for every sequence the drafts that the marginal rule is for, from steps that are over and tables alone.

Costs are measured while the engine is idle and follow the steps that run; acceptance is each sequence's own, around that of all. A request
that names a seed is decided from its own steps and the tables as they were measured, as if it ran alone: its text does not
depend on what runs beside it. Nothing here looks at the draft that it decides about, but for the stop by a node's own path: outputs have
the same distribution.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import (
    Budget,
    Draft,
    Drafter,
    DraftSampling,
    Method,
    Outcome,
    SamplingParams,
    Target,
    TreeShape,
    Verifier,
)
from polydraft.core import geometry as tree
from polydraft.core.budget import NOTHING, Stop
from polydraft.core.confidence import BINS
from polydraft.policy.acceptance import FIRST, NEXT, SPARE, Acceptance
from polydraft.policy.costs import STALLED, Costs, LiveCosts
from polydraft.policy.course import CREDIT, CREDIT_RATE, LOOK, Course, Event, Weighed, fit
from polydraft.policy.fixed import Policy, RunningSequence
from polydraft.policy.marginal import (
    Expected,
    depth_of,
    fastest_share,
    gain,
    min_branch_chances,
    min_reaches,
    min_spare_chances,
    speed_of,
)
from polydraft.policy.profile import Profile, begun, check_identity, profile_of, remember_steps
from polydraft.policy.rehearsal import Rehearsed, unrehearsed
from polydraft.policy.repeats import Repeats

SURE = 16
"""Steps with drafts of a sequence before its budgets hold."""
LOOKING = 0.02
"""Share of its steps that a paused sequence may lose by looking again, at most."""
OFTEN = 64
SELDOM = 7
"""Steps that are all timed at first, and then one in so many, which shares no divisor with HELD."""
ENOUGH = 16
"""Timed steps whose costs are worth storing where nothing was measured."""
RARELY = 32
"""One step in so many is timed where all sequences sleep: more would cost more than they tell."""
LISTENS = 16
"""Steps of a pause after which a text is read for repeats that are copied beside the drafts of a model: reading takes 10 to 40 microseconds, of which a step has 500 to 40,000."""
RETRY = 0.25
MOST_SHARED = 32.0
"""Plain steps that each new request adds to what drafts of all requests may lose together; and their maximum, which drafts that paid have earned."""
SETTLED = 1
"""Steps with drafts, or without, whose seconds are not looked at after others: a draft model catches up, and caches forget."""
SHARED = (24.0, 0.995)
OWN = (8.0, 0.97)
"""Strength of the prior and decay, of what all sequences have shown and of what one has."""
REMEMBERED = 4.0
"""Steps with drafts that a sequence's own counts weigh behind a pause, at most."""
TREE_WIDTH = 4
TREE_NODES = 24
FORETOLD_NODES = 48
"""Nodes of a depth that are expanded, and all nodes, of a most probable tree, at most; and all nodes where one forward pass foretells every depth.
Beside a token of a chain as many spare siblings are drawn there as TREE_WIDTH at most."""
CHEAP_ROW = 0.05
"""Forward passes of one row that a further row may cost, on the mean of 16, where a greedy request is drafted a tree. Where the fifth row cost .09, .12
and .17 (SmolLM2 and its head, the Qwen pair, the embedded pair; timed on an AMD EPYC) chains were 2, 4 to 20 and 12% faster; at .03 and .012 trees were 5
and 16% faster (the Qwen pair, by prices). By the fifth row alone noise grew trees of the Qwen pair on two threads: .84 of a chain of three."""
FORESEEN = 512
"""Tokens that a request may still emit, at most, where drafts have to bring back the reading of its text."""
MOST_COPIED = 16
"""Tokens of the text that are verified at once, at most."""
CERTAIN = Expected(2.0, 1.0, 1.0)
"""A drafted token that is accepted for sure: where not even that pays, nothing is looked for."""


def min_pause(num_sequences: int, costs: Costs) -> int:
    """Steps after which a look at one drafted token, which is not accepted, loses no more than LOOKING; all sequences of a batch look at once.

    Example:
        >>> costs = Costs.of({1: 1.0, 4: 1.0, 8: 2.0}, draft_start=0.0, draft_step=0.1)
        >>> min_pause(1, costs), min_pause(8, costs)
        (10, 110)
    """
    look = costs.step(2 * num_sequences, 1, num_sequences) / costs.step(num_sequences, 0)
    return round(LOOK * (look - 1.0) / LOOKING)


def _least_loss(num_sequences: int, costs: Costs) -> float:
    """Plain steps that one drafted token costs which is not accepted, of all sequences of a batch that wait for it.

    Example:
        >>> round(_least_loss(1, Costs.of({1: 1.0, 4: 1.3, 8: 2.0}, draft_start=0.1, draft_step=0.1)), 2)
        0.3
    """
    rows = costs.rows(num_sequences + 1) - costs.rows(num_sequences)
    return num_sequences * (rows + costs.drafting(1)) / costs.step(num_sequences, 0)


def takes_spares(verifier: Method) -> bool:
    """Whether a verifier is exact for chains with spare siblings, see `budget.Stop`."""
    return DraftSampling.WITHOUT_REPLACEMENT in verifier.draft_sampling and TreeShape.GROWN in verifier.shapes


def _acceptance_of(profile: Profile) -> dict[bool, Acceptance]:
    """Of all sampled and of all greedy requests, before any."""
    return {greedy: Acceptance(*profile.known(greedy), *SHARED) for greedy in (False, True)}


class Share(NamedTuple):
    """The drafts of a batch that make its fastest step. speed: tokens per second of it.  drafting: ids of their courses.  nodes: of them all."""

    speed: float
    drafting: frozenset[int]
    nodes: float


class Beside(NamedTuple):
    """What a draft is weighed beside. speed: tokens per second of the batch.  rows: of the forward pass without it.  drafting: sequences that draft, this one
    among them."""

    speed: float
    rows: float
    drafting: int
    costs: Costs


def _likeliest_spare(rates: Seq[float]) -> float:
    """Chance of acceptance of the best spare sibling that there may be: beside the least likely token."""
    return (1.0 - min(rates[:BINS])) * rates[SPARE]


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
        self._max_step = self._longest = max_step
        self.open(profile or Profile.assumed())
        self._ranked = False
        self._greedy_trees = False
        self._spares = False
        self._confident = True
        self._copies = False
        self._num_unread = len
        self._reads = False
        self._expected = 1
        self._riding = 0
        self._foretells = False

    def open(self, profile: Profile) -> None:
        """Start from this."""
        self.profile = profile
        self.live = LiveCosts(profile.costs)
        self.acceptance = _acceptance_of(profile)
        self._credit = dict.fromkeys((False, True), 2 * CREDIT)
        """What drafts of sampled and of greedy requests may still lose, in plain steps; what one of them learns the next one begins with."""
        self._unpaid = list[tuple[Course, bool, int]]()
        """Whose drafts the step that was learnt from had, without a seed: course, whether it is greedy, and accepted tokens."""
        self._begins = False
        """Whether a drafter read a text for its first draft in that step."""
        self._num_slept = 0
        self._stored = self.missing = False
        """Whether what steps have shown is stored, and whether costs are assumed that could be measured."""
        self._share: Share | None = None
        self._candidates = list[Course]()
        """Of the present step, once a draft was weighed, and the sequences that do not pause at its begin."""
        self._num_tokens = 0.0
        self._batch = 1
        """Of a sequence's text, on the mean, and sequences, of the present step."""
        self._rows = 1
        self._steps = 0
        self._drafting = 0
        self._alike = 0
        self._timed = 0
        """Rows, draft steps and sequences with drafts of the step that was learnt from last, how many in a row had drafts, or none, as it, and all
        steps so far."""

    def prepare(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Start from what is known of these parts, and ask for what both draw and verify exactly.

        Raises:
            IncompatibleError: a profile of other parts.
        """
        needs = drafter.needs
        offers = drafter.offers
        method = verifier.info
        self._ranked = drafter.info.ranked
        self._confident = offers.draws.confident
        self._foretells = offers.draws.foretells
        self._greedy_trees = offers.draws.branches and method.lossless
        self._spares = offers.draws.branches and takes_spares(method)
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
            self.profile = profile_of(target, drafter, verifier, rehearse, slots, stopped, text)
            self.live = LiveCosts(self.profile.costs)
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
            credit = CREDIT if stored else self._granted(params.greedy)
            s.course = Course(acceptance, self.profile.costs if stored else None, Repeats(s.request), credit)
            s.course.earned = len(s.token_ids)
        return s.course

    def _granted(self, greedy: bool) -> float:
        """The credit of a new request that follows what others have shown: what they have left, at most its own."""
        self._credit[greedy] += RETRY
        return min(self._credit[greedy], CREDIT)

    def rests(self, sequences: Seq[RunningSequence]) -> bool:
        """See `fixed.Policy`."""
        drafting = [s for s in sequences if s.drafting]
        for s in drafting:
            course = s.course
            if course is None or course.pause_left <= 1 or s.request.budget is not None:
                self._num_slept = 0
                return False
        for s in drafting:
            if s.course.unheard >= self._listens and not s.course.hear(s.token_ids):
                self._num_slept = 0
                return False
        for s in drafting:
            s.course.rest()
        self._num_slept += 1
        if self._num_slept % RARELY == 0:
            self._note_plain_step(sequences)
        return True

    @property
    def _listens(self) -> float:
        """Steps of a pause after which a text is read for repeats."""
        return 0 if self._copies else LISTENS if self._copying else inf

    def _note_plain_step(self, sequences: Seq[RunningSequence]) -> None:
        """What is timed next is a step of plain decoding behind others."""
        self._rows = self._batch = len(sequences)
        self._steps = self._drafting = 0
        self._alike = SETTLED
        self._num_tokens = sum(len(s.token_ids) for s in sequences) / len(sequences)
        self._unpaid.clear()

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
        if self._reads and not course.paused and course.credit < _least_loss(number, costs):
            self._stop(s, course)
            return True
        acceptance = self.acceptance[params.greedy]
        plain = speed_of([], number, costs)
        drafts = [acceptance.expected, Expected(1.0 + acceptance.rates[FIRST], 1.0, 1.0)]
        if number == 1:
            drafts.append(CERTAIN)
        fastest = max(speed_of([draft] * number, number, costs) for draft in drafts)
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
        self._num_tokens = sum(len(s.token_ids) for s in sequences) / max(len(sequences), 1)
        self._batch = max(len(sequences), 1)
        self._share = None
        self._candidates = [c for s, c in zip(sequences, courses, strict=True) if s.drafting and not c.paused]
        for s, course in zip(sequences, courses, strict=True):
            course.step_budget = self._next(s, course) if s.drafting else NOTHING
        costs = self.live.costs.behind(self._num_tokens, self._batch)
        fit(
            [course for s, course in zip(sequences, courses, strict=True) if s.drafting],
            self._batch,
            self._riding,
            costs,
        )
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
            course.credit = max(course.credit, CREDIT)
        if (
            self._copying
            and course.weighed.speed
            and course.repeats.length
            and (copied := self._copied(s, course))
        ):
            return Budget.copying(copied)
        if course.rest():
            return NOTHING
        if self._reads and s.state is None and not self.opens(s, max(self._expected, self._batch)):
            course.meet(Event.CLOSED)
        if course.paused:
            return NOTHING
        if course.held and course.budget is not NOTHING and course.acceptance.steps >= SURE:
            course.held -= 1
            return course.budget
        course.budget = self._weighed(s, course)
        return course.budget

    def _costs(self, s: RunningSequence, course: Course) -> Costs:
        """Costs behind the texts of the batch, or behind this one's alone."""
        return (
            course.costs.behind(len(s.token_ids))
            if course.costs
            else self.live.costs.behind(self._num_tokens, self._batch)
        )

    def _copied(self, s: RunningSequence, course: Course) -> tuple[int, ...]:
        """What is copied from the text; nothing where the drafter's own drafts promise more."""
        costs = self._costs(s, course)
        speed, rows, draft_gain = course.weighed
        reading = (
            speed * costs.draft_step * costs.row(1) / costs.rows(1)
        )  # a draft model reads what it did not draft
        reach = 1.0
        value = 0.0
        count = 0
        tokens = course.repeats.tokens(MOST_COPIED)
        for acceptance in course.repeats.acceptance(len(tokens)):
            reach *= acceptance
            if (
                reach * (1.0 - reading) < speed * costs.row(rows + count)
                or costs.step(rows + count + 1, 0) > self._max_step
            ):
                break
            value = value + reach * (1.0 - reading)
            count = count + 1
        return (
            tokens[:count]
            if value - speed * (costs.rows(rows + count) - costs.rows(rows)) > max(draft_gain, 0.0)
            else ()
        )

    def _share_of(self, costs: Costs) -> Share:
        """Which drafts of the batch survive most often and make the fastest step, beside the rows of those that decode plainly. Once a step."""
        if self._share is None:
            ranked = sorted(self._candidates, key=lambda course: course.survival, reverse=True)
            count, speed = fastest_share(
                [course.acceptance.expected for course in ranked], self._batch, costs
            )
            nodes = sum(course.acceptance.expected.nodes for course in ranked[:count])
            self._share = Share(speed, frozenset(map(id, ranked[:count])), nodes)
        return self._share

    def _weighed(self, s: RunningSequence, course: Course) -> Budget:
        """The draft that the rule is for; nothing, and a pause, where the whole draft does not pay: in the batch or, with a seed, as if alone."""
        costs = self._costs(s, course)
        expected = course.acceptance.expected
        if course.costs:
            count, speed = fastest_share([expected], 1, costs)
            batch = 1
            is_chosen = count == 1
            beside = Beside(speed, 1.0, 1, costs)
        else:
            share = self._share_of(costs)
            batch = self._batch
            is_chosen = id(course) in share.drafting
            rows = batch + share.nodes - is_chosen * expected.nodes
            beside = Beside(share.speed, rows, len(share.drafting) + (not is_chosen), costs)
        worth = gain(expected, *beside)
        course.weighed = Weighed(beside.speed, beside.rows, worth if is_chosen else min(worth, 0.0))
        course.earn(len(s.token_ids))
        course.least_credit = _least_loss(batch, beside.costs)
        if course.credit < course.least_credit:
            self._spare(s, course)
            return NOTHING
        plain = beside.costs.step(batch, 0)
        self._longest = min(self._max_step, beside.costs.step(beside.rows, 0) + course.credit * plain / batch)
        if course.weighed.gain > 0:
            course.meet(Event.PAYS)
        elif course.looks and gain(CERTAIN, *beside) > 0:
            course.meet(Event.HOPES)
        else:
            course.meet(Event.FAILS, min_pause(batch, costs))
            course.acceptance.forget(REMEMBERED)
            return NOTHING
        return self._budget(s.request.params, course, beside)

    def _spare(self, s: RunningSequence, course: Course) -> None:
        """Nothing is drafted, as the credit does not pay for it: until it does, where drafts of all requests together paid; else for good."""
        if course.costs is None and self._credit[s.request.params.greedy] > 2 * CREDIT:
            course.meet(Event.CLOSED, ceil((course.least_credit - course.credit) / CREDIT_RATE))
            course.looks = LOOK
            course.acceptance.forget(REMEMBERED)
        else:
            self._stop(s, course)

    def _stop(self, s: RunningSequence, course: Course) -> None:
        """Nothing is drafted for it any more, unless its text repeats itself."""
        course.meet(Event.SPENT)
        s.stopped = not self._copies

    def _most_nodes(self, most: int, depth: int, beside: Beside) -> int:
        """Nodes of a draft of such a depth, at most, that a step has time for, and the credit pays for if all are rejected."""
        for nodes in range(most, 0, -1):
            if beside.costs.step(beside.rows + nodes, min(nodes, depth), beside.drafting) <= self._longest:
                return nodes
        return 0

    def _budget(self, params: SamplingParams, course: Course, beside: Beside) -> Budget:
        """The draft whose tokens are each worth their price."""
        acceptance = course.acceptance
        rates = acceptance.rates
        reaches = min_reaches(next_acceptance=max(rates[NEXT], 0.05), **beside._asdict())
        depth = self._most_nodes(len(reaches), len(reaches), beside)
        if not depth:
            return NOTHING
        stop = Stop(reaches[:depth], tuple(rates[:BINS]))
        wants_tree = self._greedy_trees and params.greedy
        # a seed repeats its text whatever runs beside it, and spare siblings are left out beside several paths
        takes_spares = self._spares and not params.greedy and params.seed is None
        if self._foretells and (takes_spares or wants_tree):
            return self._foretold(acceptance, stop, beside, greedy=params.greedy)
        if self._ranked or (wants_tree and self._has_cheap_rows(beside)):
            row = beside.speed * beside.costs.row(beside.rows + acceptance.expected.nodes)
            nodes = self._most_nodes(TREE_NODES, depth, beside)
            return Budget.grown(nodes, depth, TREE_WIDTH, min(row, 1.0)).ending(stop)
        if takes_spares:
            stop = self._with_spares(stop, rates, beside)
        if self._confident:
            return Budget.fixed(tree.chain(depth)).ending(stop)
        return Budget.fixed(tree.chain(depth_of(stop.min_reach, rates[FIRST], rates[NEXT])))

    def _has_cheap_rows(self, beside: Beside) -> bool:
        """Whether further rows of the forward pass cost little, see CHEAP_ROW; as measured, not as assumed."""
        costs = beside.costs
        sixteen_rows = costs.rows(beside.rows + 16) - costs.rows(beside.rows)
        return not self.missing and sixteen_rows < 16 * CHEAP_ROW * costs.rows(1)

    def _with_spares(self, stop: Stop, rates: Seq[float], beside: Beside) -> Stop:
        """The stop of a chain beside which spare siblings are drawn where they are worth their rows."""
        depth = len(stop.min_reach)
        chances = min_spare_chances(beside.speed, _likeliest_spare(rates), beside.rows, depth, beside.costs)
        nodes = self._most_nodes(len(chances) + 1, depth, beside)
        return stop._replace(min_spare_chance=chances[: max(nodes - 1, 0)], spare_acceptance=rates[SPARE])

    def _foretold(self, acceptance: Acceptance, stop: Stop, beside: Beside, *, greedy: bool) -> Budget:
        """A tree of a head that foretells all depths in one forward pass: a branch costs a row, as a deeper token does. At temperature 0 nodes join best
        first up to the one that is not worth its row; above, spare siblings do, and chains behind them are priced as the last row that is expected.
        """
        rates = acceptance.rates
        depth = len(stop.min_reach)
        most = self._most_nodes(FORETOLD_NODES, depth, beside)
        likeliest = 1.0 if greedy else _likeliest_spare(rates)
        chances = min_branch_chances(beside.speed, likeliest, beside.rows, most, beside.costs)
        if not chances:
            return Budget.fixed(tree.chain(depth)).ending(stop)
        nodes = 0.0 if greedy else acceptance.expected.nodes
        reaches = min_reaches(next_acceptance=max(rates[NEXT], 0.05), nodes=nodes, **beside._asdict())[:depth]
        stop = stop._replace(min_reach=reaches, min_spare_chance=chances, spare_acceptance=rates[SPARE])
        width = FORETOLD_NODES if greedy else TREE_WIDTH
        return Budget.grown(len(chances) + 1, len(reaches), width).ending(stop)

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
        before = self._steps
        self._unpaid.clear()
        self._begins = False
        self._rows = len(sequences)
        self._steps = 0
        self._drafting = 0
        self._batch = len(sequences)
        for b, s in enumerate(sequences):  # those that failed in this step have no row
            course = self.course(s)
            budget = course.step_budget
            if s.drafting and budget.copied:
                self._rows += int((parents[b, 1:] >= 0).sum())
            elif s.drafting and budget.max_depth:
                drafted = parents[b], paths[b], None if confidence is None else confidence[b]
                greedy = s.request.params.greedy
                nodes, depth = course.acceptance.observe(*drafted, in_turn=budget.has_spares and not greedy)
                self.acceptance[greedy].observe(*drafted, in_turn=budget.has_spares and not greedy)
                if course.costs is None:
                    self._unpaid.append((course, greedy, len(paths[b])))
                    self._begins |= course.acceptance.steps == 1
                else:
                    course.pay(self._foreseen_loss(s, course, nodes, depth) - len(paths[b]))
                course.read = len(s.token_ids) + len(paths[b]) + 1
                self._rows = self._rows + nodes
                self._steps = max(self._steps, depth)
                self._drafting = self._drafting + 1
        self._alike = self._alike + 1 if (before > 0) == (self._steps > 0) else 0

    def time(self, seconds: Mapping[str, float]) -> None:
        """Take note of what the step that was learnt from took, by phase."""
        if self._num_slept % RARELY:
            return
        if self._unpaid:
            self._pay(seconds)
        self._timed += 1
        is_seldom = self._timed > OFTEN and self._timed % SELDOM and not self._num_slept
        if self._alike < SETTLED or is_seldom:
            return
        rest = seconds["verifying"] + seconds["other"]
        num_sequences = max(self._drafting, 1)
        parts = {"scoring": seconds["scoring"], "drafting": seconds["drafting"], "rest": rest}
        behind = {"num_tokens": self._num_tokens, "batch": max(self._batch, 1)}
        self.live.observe(self._rows, self._steps, **parts, num_sequences=num_sequences, **behind)

    def _foreseen_loss(self, s: RunningSequence, course: Course, nodes: int, depth: int) -> float:
        """Plain steps that a step with drafts takes beyond one, by measured costs; with what the drafter read that it had missed."""
        assert course.costs is not None  # of a request with a seed
        costs = course.costs.behind(len(s.token_ids))
        missed = len(s.token_ids) - course.read if course.read and self._reads else 0
        reading = costs.draft_step * costs.breadth(missed) if missed else 0.0
        return (costs.step(1 + nodes, depth) + reading) / costs.step(1, 0) - 1.0

    def _pay(self, seconds: Mapping[str, float]) -> None:
        """Take what the step lost from the credit of those that drafted, with all that drafts made it do: heads, catching up, verification.

        What a drafter reads before its first draft was weighed when the request was opened.
        """
        costs = self.live.costs.behind(self._num_tokens, self._batch)
        reading = seconds["prefill"]
        most = STALLED * costs.step(self._rows, self._steps, self._drafting)
        whole = min(sum(seconds.values()) - reading, most) + (0.0 if self._begins else reading)
        longer = whole / costs.step(self._batch, 0) - 1.0
        for course, greedy, accepted in self._unpaid:
            loss = longer * self._batch / len(self._unpaid) - accepted
            course.pay(loss)
            self._credit[greedy] = min(max(self._credit[greedy] - loss, 0.0), MOST_SHARED)
        self._unpaid.clear()

    def store_costs(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Remember what steps have shown, once, where costs were assumed and are still missing."""
        if self.missing and not self._stored and self._timed >= ENOUGH:
            self._stored = True
            remember_steps(target, drafter, verifier, self.live.costs)

    def learnt(self) -> Profile:
        """What is known by now, as a profile to start from."""
        modes = [
            (tuple(self.acceptance[greedy].rates), self.acceptance[greedy].expected)
            for greedy in (False, True)
        ]
        return Profile(self.live.costs, *modes, self.profile.about)
