"""How much to draft in the next round, decided from past rounds and tables only.

A plan may look at tables and at rounds that are over, never at the draft it is deciding about: depth, width, trunk, short paths or the
whole tree are fixed before the first token of a round is drawn, so every choice here keeps the output law.
A given profile is such a table. Without one, costs and acceptance are learnt from the rounds that are over (`engine/learner.py`).
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft import tree
from polydraft.core import Budget, Draft, Drafter, Outcome, Target, Verifier
from polydraft.engine import acceptance, size_search
from polydraft.engine.acceptance import DEPTHS, Acceptance
from polydraft.engine.costs import budget_of, charged
from polydraft.engine.learner import Learner, assumed
from polydraft.engine.profile import Profile, identity, remembered
from polydraft.engine.sequence import Sequence

__all__ = ["AdaptivePlan", "FixedPlan", "Plan"]

REMEMBERED = 4.0
"""Rounds of the past that a probe is weighed against: few, so that a change is seen, and enough to hold against the prior."""
RISEN = 0.1
"""Acceptance of a first draft that a probe must add to be followed by another one at once."""
PROBING = 0.0025
"""Share of the time without drafts that probes may take, beside the drafter's reading of what it missed."""
HELD = 4
"""Drafting rounds for which a plan holds, as planning costs 4% of a round of the embedded pair; chosen like `acceptance.DECAY`: 8 is late where texts change."""

SETTLED, BURST = 2, 3
"""Rounds alike in a row that are not timed, as the caches still hold what ran before and drafters catch up; timed rounds of a size that is tried."""
LOOKING = 8
"""Rounds from one look for a size to try to the next."""
FIRST, EVERY, SELDOM = 128, 32, 7
"""The first FIRST rounds with drafts are all looked at by what learns, then one in SELDOM, which shares no divisor with HELD; of the others the first
EVERY and then one in EVERY: a look takes a tenth of a round of the embedded target."""
NOTHING, CHAIN_OF_ONE = Budget.fixed(tree.chain(0)), Budget.fixed(tree.chain(1))
ASKING = 4e-5
"""Seconds that asking for drafts takes at least: 40 to 60 us of calls to n-grams and tables, which a clock on a busy machine may not tell from none."""


class Plan(Protocol):
    """Budgets for the next round of each sequence. One that has `time(sequences, draft, seconds)` is told what each round took."""

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]: ...

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Take note of a round that is over; processed: the target's processed logits at the drafted nodes."""
        ...


@dataclass(frozen=True)
class FixedPlan:
    """The same budget in every round, for reproducible comparisons.

    Example:
        >>> FixedPlan(Budget.fixed(tree.paths(2, 4))).budget.max_nodes
        8
    """

    budget: Budget

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Nothing: the plan is fixed."""


@dataclass
class AdaptivePlan:
    """Width, depth, trunk and short paths, or the tree, of most expected tokens per second; no drafts while they do not pay, tried again after longer and longer waits.

        speed(size) = E[tokens | acceptance by depth] / seconds(batch, rows, depth, context), the geometric mean over the batch

    Seconds come from the profile: a given one (`polydraft tune`) does not change; without one they are assumed, and learnt from the rounds
    that run (`learner`). Acceptance is each sequence's own, from its past rounds, around the profile's (`engine/acceptance.py`).
    Only these decide, before the round's first draw: the output law is kept. For a given profile a seed gives one text; where costs are learnt, the
    clock and the requests before have a say in how much is drafted, and with it in which text of the same law a seed gives.

    profile: None to start from assumed costs and learn in an engine; without an engine, assumed costs.
    max_depth, max_width, max_trunk, max_short: bounds of the search; max_short: of the second of a ragged pair, 0 for none, to
        which an engine sets it where its drafter does not make them or its rule is not exact for them.
    max_tree_nodes: most nodes of a tree by position that is looked for, 0 for none, likewise.
    margin: share by which drafting must promise to beat plain decoding; below 0 as a pause is not free: what is missed is read
        before the next draft, and sizes that change cost.
    first_pause, longest_pause: rounds without drafts after a stop, at least and at most: so many that the draft which
        falls least short of plain decoding loses 0.25% of them, doubled each time one changes nothing.

    After Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), section on throughput.

    Example:
        >>> plan = AdaptivePlan(Profile.assumed())
        >>> plan.best(0.9).max_nodes, plan.best(0.02).max_depth
        (11, 0)
    """

    profile: Profile | None = None
    max_depth: int = 12
    max_width: int = 4
    max_trunk: int = 2
    max_short: int = 3
    max_tree_nodes: int = 16
    margin: float = -0.05
    first_pause: int = 4
    longest_pause: int = 256
    _planned: list[tuple[int, int, bool, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _records: list[Acceptance] = field(default_factory=list, init=False, repr=False, compare=False)
    """Those of `_planned`, held so that no other record takes their ids."""
    _held: list[tuple[Acceptance, Budget]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Records and the budgets that hold while these and no others draft, for `_holding` rounds more."""
    _holding: int = field(default=0, init=False, repr=False, compare=False)
    _given: list[tuple[Acceptance, Budget]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Records and budgets of the round that runs; empty where none is asked for drafts."""
    _last: tuple[list[list[Any]], float] = field(default=([], 0.0), init=False, repr=False, compare=False)

    learner: Learner | None = field(default=None, init=False, repr=False, compare=False)
    """What the profile is learnt by while the plan is used; None where it was given."""
    _explored: bool = field(default=False, init=False, repr=False, compare=False)
    _rounds: int = field(default=0, init=False, repr=False, compare=False)
    _drafting: int = field(default=0, init=False, repr=False, compare=False)
    """Of `_rounds`, those in which a draft was asked for."""
    _trying: int = field(default=0, init=False, repr=False, compare=False)
    """Rounds that the size tried is still asked for, `_tried_size`."""
    _tried_size: Budget = field(default=NOTHING, init=False, repr=False, compare=False)
    _kind: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """Nodes and depth that were asked for in the last round; `_alike`: rounds of that kind in a row."""
    _alike: int = field(default=0, init=False, repr=False, compare=False)
    _ranked: ClassVar[bool] = False

    def begin(self, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        """Get a profile where none was given: one that was measured of these parts before, else an assumed one to learn from."""
        if self.profile is None:
            self.profile = remembered(identity(target, drafter, verifier))
        if self.profile is None:
            self.learner = Learner(assumed(target, drafter, verifier), ranked=self._ranked)
            self.profile = self.learner.profile

    @property
    def known(self) -> Profile:
        """The profile, or the assumed one."""
        if self.profile is None:
            self.profile = Profile.assumed()
        return self.profile

    def _sizes(
        self, records: Seq[Acceptance], widths: list[int], contexts: list[int], priors: Seq[np.ndarray]
    ) -> tuple[list[list[Any]], float]:
        sizes, trees = np.empty((len(records), 5), np.int64), np.empty((len(records), 1 + self.max_tree_nodes), np.int64)
        bounds = self.max_depth, self.max_trunk, self.max_short, self.margin
        speed = size_search.choose(*self._asked(records, widths, contexts, priors), *bounds, sizes, trees)
        found: list[list[Any]] = sizes.tolist()
        for size, parents in zip(found, trees, strict=True):
            nodes = size.pop()
            if nodes:
                size.append(tuple(parents[: 1 + nodes].tolist()))
        return found, speed

    def _asked(
        self, records: Seq[Acceptance], widths: list[int], contexts: list[int], priors: Seq[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """kept, seen, priors, asked and costs as `size_search` takes them."""
        if len(records) == 1:
            kept, seen, prior = records[0].kept[None], records[0].seen[None], priors[0][None]
        else:
            kept, seen, prior = np.array([r.kept for r in records]), np.array([r.seen for r in records]), np.array(priors)
        asked = np.array([[r.gain, w, c, r.failed, r.depth] for r, w, c in zip(records, widths, contexts, strict=True)])
        return kept, seen, prior, asked, self.known.costs.flat

    def _priors(self, sequences: Seq[Sequence]) -> list[np.ndarray]:
        return [self.known.prior(s.request.params.temperature) for s in sequences]

    def promise(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[list[list[Any]], float]:
        """The size of each sequence, as `costs.budget_of` takes them, and the speed that they promise: the geometric mean of tokens per second over the batch.

        out: sequences that draft nothing in any case.  At temperature 0 one chain, as a second path would be a copy.
        """
        widest, records = min(self.max_width, self.known.max_width), [s.acceptance for s in sequences]
        greedy = [s.request.params.greedy for s in sequences]
        widths = [0 if o else 1 if g else widest for o, g in zip(out, greedy, strict=True)]
        seen = [(id(r), r.folded, r.due, w) for r, w in zip(records, widths, strict=True)]
        if seen != self._planned:
            contexts = [len(s.token_ids) for s in sequences]
            self._planned, self._records = seen, records
            self._last = self._sizes(records, widths, contexts, self._priors(sequences))
        return self._last

    def best(self, rate: float, *, batch: int = 1, context: int = 0, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of one draft, the same at every depth."""
        record = Acceptance(kept=np.full(DEPTHS, 1e9 * rate), seen=np.full(DEPTHS, 1e9))
        width = 1 if greedy else min(self.max_width, self.known.max_width)
        priors = [self.known.prior(0.0 if greedy else 1.0)] * batch
        return self._of(self._sizes([record] * batch, [width] * batch, [context] * batch, priors)[0][0])

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each."""
        if not self.known.drafts:
            self._given, self._explored = [], False
            return [NOTHING] * len(sequences)
        if self.learner is not None and self._rounds < SETTLED + BURST:  # all else is compared to rounds without drafts
            self._given, self._explored = [], False
            return [NOTHING] * len(sequences)
        tried = None if self.learner is None else self._tried(self.learner, sequences)
        self._explored = tried is not None
        if tried is None and len(sequences) == 1 and sequences[0].acceptance.waiting:
            sequences[0].acceptance.waiting -= 1
            self._given = []
            return [NOTHING]
        return self.give(sequences, self._next(sequences) if tried is None else [tried] * len(sequences))

    def _tried(self, learner: Learner, sequences: Seq[Sequence]) -> Budget | None:
        """Now and then, in pauses too, a size that is seldom seen, for a few rounds in a row: the first of them let caches and drafters settle."""
        if self._trying:
            self._trying -= 1
            if self._trying:
                return self._tried_size
        if self._rounds % LOOKING or learner.seconds < learner.not_before or not all(s.drafting for s in sequences):
            return None
        paused = all(s.acceptance.waiting for s in sequences)
        contexts = [len(s.token_ids) for s in sequences]
        unread = sum(c - (0 if s.state is None else s.num_read) for s, c in zip(sequences, contexts, strict=True))
        width = min(self.max_width, self.known.max_width)
        size = learner.untried(len(sequences), width, contexts, paused, SETTLED + BURST, unread)
        if size is None or size[1] > self.max_depth:
            return None
        self._trying, self._tried_size = SETTLED + BURST, Budget.fixed(tree.paths(size[0], size[1]))
        return self._tried_size

    def time(self, sequences: Seq[Sequence], draft: Draft, seconds: float) -> None:
        """Learn what a round took that is over, if it was like the rounds before it."""
        learner, given = self.learner, self._given
        if learner is None or not sequences:
            return
        learner.seconds += seconds
        if self._explored:
            learner.exploring += seconds
        noted = self._noted()
        kind = [(g.max_nodes, g.max_depth) for _, g in given] if given else given
        self._alike = self._alike + 1 if kind == self._kind else 1
        self._kind = kind
        self._rounds += 1
        if given:
            self._drafting += 1
        if not noted or self._alike <= SETTLED:
            return
        contexts, nodes, deep = [len(s.token_ids) for s in sequences], [0] * len(sequences), [0] * len(sequences)
        if draft.tree.num_nodes > 1:
            nodes, deep = (draft.tree.parents >= 0).sum(1).tolist(), tree.depths(draft.tree).amax(1).tolist()
        branching = sum(n > d for n, d in zip(nodes, deep, strict=True))
        asked = sum(g.max_depth > 0 for _, g in given)
        learner.time(charged(nodes, max(deep), asked, branching, contexts), seconds)
        self.profile = learner.profile

    def _noted(self) -> bool:
        """Whether the learner looks at this round."""
        if self._given:
            return self._explored or self._drafting < FIRST or self._drafting % SELDOM == 0
        return self._explored or self._rounds < EVERY or self._rounds % EVERY == 0

    def give(self, sequences: Seq[Sequence], budgets: list[Budget]) -> list[Budget]:
        """Take note of what this round is given; from its draft `learn` sees who was asked in vain."""
        asking = any(g.max_depth for g in budgets)
        self._given = [(s.acceptance, g) for s, g in zip(sequences, budgets, strict=True)] if asking else []
        return budgets

    def _next(self, sequences: Seq[Sequence]) -> list[Budget]:
        if (
            self._holding
            and len(sequences) == len(self._held)
            and all(s.drafting and s.acceptance is r for s, (r, _) in zip(sequences, self._held, strict=True))
        ):
            self._holding -= 1
            return [budget for _, budget in self._held]
        out = [s.acceptance.waiting > 0 or not s.drafting for s in sequences]
        sizes, speed = ([[1, 0, 0, 0]] * len(sequences), 0.0) if all(out) else self.promise(sequences, out)
        if not all(out) and not self._worth_asking(sequences, out, sizes, speed):
            sizes = [[1, 0, 0, 0]] * len(sequences)
        probe, pause = CHAIN_OF_ONE, self.first_pause  # beside others' drafts a probe is cheap
        if not all(out) and not any(size[1] for size in sizes):
            probe, pause = self._probe(sequences, out)
            plain, in_vain, share = self._asking(sequences, out)
            if share < 1.0:
                pause = max(pause, math.ceil((in_vain / plain - 1.0) / PROBING))
        budgets = [self._budget(s, o, size, probe, pause) for s, o, size in zip(sequences, out, sizes, strict=True)]
        drafting = all(size[1] for size in sizes)
        self._held = [(s.acceptance, g) for s, g in zip(sequences, budgets, strict=True)] if drafting else []
        self._holding = HELD - 1 if drafting else 0
        return budgets

    def _asking(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[float, float, float]:
        """Seconds of a round without drafts, and of one that asks for drafts in vain; the share of rounds that do not."""
        costs, cached = self.known.costs.flat, np.array([len(s.token_ids) for s in sequences], np.float64)
        expected = 1.0 if self.learner is None else self.learner.share
        shares = [s.acceptance.share(expected) for s, o in zip(sequences, out, strict=True) if not o]
        plain, in_vain = (
            size_search.plain_seconds(costs, cached),
            size_search.base_seconds(costs, cached) + costs[8] * len(shares),
        )
        return float(plain), max(float(in_vain), float(plain) + ASKING), sum(shares) / len(shares)

    def _worth_asking(self, sequences: Seq[Sequence], out: Seq[bool], sizes: list[list[Any]], speed: float) -> bool:
        """Whether drafts of these sizes pay, those counted that are asked for in vain: h of the rounds have something to draft.

        (h T + 1 - h) / (h S + (1 - h) S_in_vain) >= 1 / S_0
        """
        plain, in_vain, share = self._asking(sequences, out)
        if share == 1.0:
            return True
        full = self.seconds(sizes, [len(s.token_ids) for s in sequences])
        return plain * (share * speed * full + 1.0 - share) >= share * full + (1.0 - share) * in_vain

    def _probe(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[Budget, int]:
        """The draft that loses least where none promises a gain, and rounds of the first pause: so many that it costs PROBING of them."""
        records, contexts = [s.acceptance for s in sequences], [len(s.token_ids) for s in sequences]
        asked = self._asked(records, [int(not o) for o in out], contexts, self._priors(sequences))
        depth, loss = size_search.probe(*asked, self.max_depth)
        return Budget.fixed(tree.chain(depth)), max(self.first_pause, math.ceil(loss / PROBING))

    def seconds(self, sizes: Seq[Seq[Any]], contexts: Seq[int]) -> float:
        """Of a round of the sizes that were promised."""
        return self.known.costs.seconds([tuple(size) for size in sizes], contexts)

    def _of(self, size: list[Any]) -> Budget:
        """The budget of a size."""
        return budget_of(size)

    def _budget(self, sequence: Sequence, out: bool, size: list[Any], probe: Budget, shortest: int) -> Budget:
        """Keeps the account of pauses: when one ends and nothing promises a gain, a draft probes, and another if it fitted well."""
        record = sequence.acceptance
        record.depth = size[1] if size[0] == 1 and not out else 0
        if out:
            record.waiting = max(record.waiting - 1, 0)
            return NOTHING
        if size[1]:
            if size[:2] != [1, 1]:
                record.pause = 0
            return self._of(size)
        if record.due or record.rate > record.before + RISEN:
            before = record.rate if record.folded else float(self.known.prior(sequence.request.params.temperature)[0])
            record.due, record.before, record.rounds = False, before, 0
            record.fade(min(1.0, REMEMBERED / max(float(record.seen[0]), REMEMBERED)))
            return probe
        record.pause = min(max(2 * record.pause, shortest), self.longest_pause)
        record.waiting, record.due = record.pause, True
        return NOTHING

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into each sequence's record; see `engine/acceptance.py`."""
        if not self._given:
            return
        records = [s.acceptance for s in sequences]
        if len(records) < len(self._given):  # requests that failed in this round
            self._given = [given for given in self._given if any(given[0] is r for r in records)]
        learner = self.learner if self._noted() else None
        before = [] if learner is None else [replace(r, kept=r.kept.copy(), seen=r.seen.copy()) for r in records]
        self._ask(draft)
        self._fold(sequences, draft, processed, outcome)
        if learner is not None:
            for s, past in zip(sequences, before, strict=True):
                learner.fold(s.request.params.greedy, past, s.acceptance)

    def _fold(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        records = [s.acceptance for s in sequences]
        if rows := acceptance.count(records, draft, outcome):
            greedy = [s.request.params.greedy for s in sequences]
            acceptance.look(records, draft, processed, greedy, self._priors(sequences), outcome, rows=rows)

    def _ask(self, draft: Draft) -> None:
        """Note who was asked for a draft and had one, without which nothing holds."""
        parents = draft.tree.host[1]
        for b, (record, g) in enumerate(self._given):
            if g.max_depth:
                had = parents.shape[1] > 1 and parents[b, 1] == 0
                record.ask(had)
                self._holding *= had
