"""What a plan knows before it has measured anything, and how it learns the rest from the rounds that run anyway.

    start   a pass reads the weights once: bytes / bandwidth, the latter measured in milliseconds; rows, calls and contexts cost the usual shares of it
    scale   of what rounds without drafts took over what the start says; of all rounds as long as there are none and the start is in passes
    costs   least squares on relative errors over the kinds of rounds seen, and of each price over scale x start (weight BELIEF), none negative
    prior   acceptance by depth, and how often there is something to draft, over all requests, with a long decay

A kind is a batch, its drafted nodes and the deepest path; of each the last KEPT rounds count, from LEAST on, a stalled one for STALLED medians at
most. Some sizes no plan asks for, and rounds without drafts are what all others are compared to: a few are tried now and then in place of a planned
draft, those without first, and in pauses, a few rounds in a row, for at most EXPLORING of the time so far.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from polydraft.core import Budget, Drafter, Target
from polydraft.models.memory import read_bandwidth
from polydraft.plan.acceptance import DEPTHS, Record
from polydraft.plan.costs import Charges, RoundCosts, Work, charges
from polydraft.plan.profile import PRIOR, Profile
from polydraft.plan.sizes import NOTHING, Grid

__all__ = ["BURST", "EXPLORING", "LASTING", "SETTLED", "Learner", "assumed"]

EXPLORING, PAUSED = 0.02, 0.005
"""Share of the time that sizes which no plan asked for may take, and while nothing is drafted."""
ENOUGH = 6
"""Rounds of such a size, or of trying it, after which it is not tried again."""
AGAIN = 1.1
"""Times as long as until now, it takes until one looks again whether all such sizes, of this batch, were seen."""
SETTLED, BURST = 2, 3
"""Rounds alike in a row that are not timed, as the caches still hold what ran before and drafters catch up; timed rounds of a size that is tried."""
KEPT, LEAST, STALLED = 16, 2, 2.0
KINDS = 32
"""Kinds that are remembered, the latest."""
BELIEF = 0.05
"""Weight of a price's start against a relative error of 1 in one round."""
LASTING = 0.998
"""What is left of a round's acceptance after the next."""
REFIT, MOST = 1.5, 128
"""Costs are fitted again when so many times as many rounds are known, or so many more, and where a kind begins to count or takes another time than it did."""
MOVED = 0.1
"""Share by which it does."""
SECONDS = "seconds"
"""What is assumed where the size of the weights is known; else passes."""
CALL, ROW = 2e-4, 1e-5
"""Seconds of a round, and of a row in it, beside reading the weights: the embedded pair."""
SHARES = {"rows": 0.05, "rows_beyond": 0.07, "context": 2e-4, "rows_context": 2e-5}
"""Of a pass of one row: eight rows cost 1.04 to 1.6 of one at 110M and 135M parameters, a token of context what its keys and values are of the weights."""


@lru_cache(maxsize=32)
def _bandwidth(num_bytes: int, device: str) -> float:
    return read_bandwidth(num_bytes, rounds=3, device=device)


def _reading(model: Any) -> float:
    """Seconds to read a model's weights once, small ones from the caches; 0 where their size is not known."""
    size = getattr(model, "weight_bytes", 0)
    measured = 1 << min(max(size.bit_length(), 20), 25)
    return size / _bandwidth(measured, str(getattr(model, "device", "cpu"))) if size else 0.0


def assumed(target: Target, drafter: Drafter) -> Profile:
    """The profile of parts of which nothing was measured; where their size is not known, in passes of one row."""
    once = _reading(target)
    if not once:
        return Profile.assumed()
    drafting = sum(_reading(getattr(each, "model", None)) for each in getattr(drafter, "members", [drafter]))
    known = {name: share * once for name, share in SHARES.items()}
    known["once"], known["rows"] = CALL + once, known["rows"] + ROW
    known |= {"plain_" + name: known[of] for name, of in (("once", "once"), ("sequences", "rows"), ("context", "context"))}
    known |= {
        "depth": drafting + ROW * bool(drafting),
        "nodes": 0.05 * drafting + ROW / 10,
        "asked": 5 * ROW,
        "branching": 5 * ROW,
    }
    return Profile(RoundCosts.whole(Charges(**known)), (PRIOR,) * DEPTHS, {"assumed": SECONDS})


class _Kind:
    """Rounds alike: what the latest of them are charged for, and took; how many there were."""

    def __init__(self) -> None:
        self.charges: deque[Charges] = deque(maxlen=KEPT)
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.count = 0
        self.fitted = 0.0
        """The mean that the costs were last fitted to."""

    def mean(self) -> float:
        """Seconds, a stalled round counting for STALLED medians."""
        most = STALLED * median(self.seconds)
        return sum(min(each, most) for each in self.seconds) / len(self.seconds)


class Learner:
    """A profile that is learnt while it is used; see the module.

    start: what is assumed.  grid: of the plan's sizes.
    profile: what is known now.  seconds: of all rounds.  exploring: of them, those that no plan asked for.

    Example:
        >>> from polydraft.plan.sizes import Paths
        >>> learner, work = Learner(Profile.assumed(), Paths(12, [(1, 0)])), Work(1, 10, nodes=4, depth=4, asked=1)
        >>> for _ in range(8):
        ...     learner.time(work, 3e-3)
        >>> round(1e3 * learner.profile.costs.seconds(work), 1)
        3.0
    """

    def __init__(self, start: Profile, grid: Grid) -> None:
        self.profile = self._start = start
        self._grid = grid
        self.seconds = self.exploring = self._not_before = 0.0
        self._rounds, self._due = 0, LEAST
        self._tries = Counter[tuple[int, Budget]]()
        self._kinds: OrderedDict[tuple[Any, ...], _Kind] = OrderedDict()
        self.shown: dict[bool, Record] = {}
        """What all sequences have shown, greedy ones apart."""

    def of_all(self, greedy: bool) -> Record:
        """What all sequences of this kind have shown."""
        if greedy not in self.shown:
            self.shown[greedy] = self._grid.record()
        return self.shown[greedy]

    @property
    def share(self) -> float:
        """Of the rounds in which a draft was asked for, those in which there was one."""
        asked, had = (sum(getattr(r, name) for r in self.shown.values()) for name in ("asked", "had"))
        return (had + ENOUGH) / (asked + ENOUGH)

    def time(self, work: Work, seconds: float) -> None:
        """Learn from a round: what it did, and what it took."""
        self._rounds += 1
        key = _key(work)
        kind = self._kinds.setdefault(key, _Kind())
        kind.charges.append(charges(work))
        kind.seconds.append(seconds)
        kind.count += 1
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        if self._rounds >= self._due or (kind.count >= LEAST and abs(kind.mean() - kind.fitted) > MOVED * kind.fitted):
            self._due = math.ceil(min(REFIT * self._rounds, self._rounds + MOST))
            self._learn()

    def untried(self, contexts: Sequence[int], *, paused: bool) -> Budget | None:
        """The first size that was hardly seen, or that which was seen least, where a burst of it fits into the time for exploring. paused: nothing is drafted.

        What drafts are thought to cost beyond two plain rounds keeps none from being tried again.
        """
        if self.seconds < self._not_before:
            return None
        B, counts = len(contexts), dict[Budget, int]()
        for size in (NOTHING, *self._grid.tried):
            kind = self._kinds.get(_key(Work.of([size] * B, contexts)))
            counts[size] = max(0 if kind is None else kind.count, self._tries[B, size], LEAST - 1)
        size = min(counts, key=lambda size: counts[size])
        if counts[size] >= ENOUGH:
            self._not_before = AGAIN * self.seconds
            return None
        plain, price = (self.profile.costs.seconds(Work.of([each] * B, contexts)) for each in (NOTHING, size))
        self._not_before = (self.exploring + (SETTLED + BURST) * min(price, 2.0 * plain)) / (PAUSED if paused else EXPLORING)
        if self.seconds < self._not_before:
            return None
        self._tries[B, size] += BURST
        return size

    def _learn(self) -> None:
        known: dict[str, Any] = {"costs": self._costs()}
        for greedy, record in self.shown.items():
            known |= self._grid.learnt(record, self._start.prior(1.0, ranked=self._grid.ranked), greedy=greedy)
        self.profile = replace(self._start, **known)

    def _seconds(self) -> list[float]:
        """Of each kind that counts; a round without drafts takes no longer than one that asked for drafts and had none."""
        known = {key: kind.fitted for key, kind in self._kinds.items() if len(kind.seconds) >= LEAST}
        vain: dict[int, float] = {}
        for (sequences, nodes, _, asked, _), taken in known.items():
            if asked and not nodes:
                vain[sequences] = min(taken, vain.get(sequences, taken))
        return [
            taken if nodes or asked else min(taken, vain.get(sequences, taken))
            for (sequences, nodes, _, asked, _), taken in known.items()
        ]

    def _costs(self) -> RoundCosts:
        kinds = [kind for kind in self._kinds.values() if len(kind.seconds) >= LEAST]
        if not kinds:
            return self._start.costs
        start, x = np.array(self._start.costs.prices), np.array([np.mean(kind.charges, 0) for kind in kinds])
        for kind in kinds:
            kind.fitted = kind.mean()
        y, weight = np.array(self._seconds()), np.sqrt([len(kind.seconds) for kind in kinds])
        plain = x[:, Charges._fields.index("plain_once")] > 0  # all else is compared to it
        if not plain.any():
            plain[:] = self._start.about.get("assumed") != SECONDS
        scale = math.exp(np.average(np.log(y / (x @ start))[plain], weights=weight[plain])) if plain.any() else 1.0
        part = x * (scale * start) * (weight / y)[:, None]
        squares, sums, free = part.T @ part + BELIEF**2 * np.eye(len(start)), part.T @ weight + BELIEF**2, np.arange(len(start))
        times = np.linalg.solve(squares, sums)
        while (times < 0).any():  # those are 0, and the others are solved for again
            free = free[times > 0]
            times = np.linalg.solve(squares[np.ix_(free, free)], sums[free])
        prices = np.zeros(len(start))
        prices[free] = times * scale * start[free]
        return RoundCosts.whole(Charges(*prices.tolist()))


def _key(work: Work) -> tuple[Any, ...]:
    return work.sequences, work.nodes, work.depth, work.asked, work.branching
