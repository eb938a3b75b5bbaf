"""What a plan knows before it has measured anything, and how it learns the rest from the rounds that run anyway.

    start   a pass reads the weights once: bytes / bandwidth, the latter measured in milliseconds; rows, calls and contexts cost the usual shares of it
    pace    of the latest rounds without drafts, what they took over what the start says of them, for each size of the batch
    costs   of rounds with drafts, by their seconds over the pace of that moment: a machine that slows down slows all of them. Least squares on
            relative errors over the kinds of rounds seen, and of each price over the start (weight BELIEF), none negative
    prior   acceptance by depth, and how often there is something to draft, over all requests, with a long decay
    lost    plain rounds that drafts have cost beyond the tokens they gave: CREDIT at first, and then RATE of all rounds, may be lost at most;
            what they gain is forgotten

A kind is a batch, its drafted nodes and the deepest path; of each the last KEPT rounds count, of those without drafts BURST, from LEAST on, a stalled one for STALLED
medians at most. So whatever is believed of costs, or was timed in a bad moment, drafts that do not pay stop after some rounds.
"""

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
from polydraft.plan.sizes import NOTHING

__all__ = ["BURST", "CREDIT", "RATE", "SETTLED", "Learner", "assumed"]

CREDIT, RATE = 6.0, 0.005
"""Plain rounds that may be lost at first, and of each further one."""
ENOUGH, LEAST_LEFT = 6, 1.0
"""Rounds of trying a size, after which it is not tried again; plain rounds that may still be lost, below which none is."""
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
"""Costs are fitted again when so many times as many rounds with drafts are known, or so many more, and where a kind begins to count."""
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
    return Profile(RoundCosts.whole(Charges(**known)), (PRIOR,) * DEPTHS, {"assumed": "seconds"})


class _Recent:
    """The latest rounds of one kind: what each was charged for, and took; how many there were."""

    def __init__(self, kept: int) -> None:
        self.charges: deque[Charges] = deque(maxlen=kept)
        self.taken: deque[float] = deque(maxlen=kept)
        self.count = 0

    def add(self, charged: Charges, taken: float) -> None:
        """One more."""
        self.charges.append(charged)
        self.taken.append(taken)
        self.count += 1

    def mean(self) -> float:
        """Of what they took, a stalled round counting for STALLED medians."""
        most = STALLED * median(self.taken)
        return sum(min(each, most) for each in self.taken) / len(self.taken)


class Learner:
    """A profile that is learnt while it is used; see the module.

    start: what is assumed.
    profile: what is known now.  lost: plain rounds lost to drafts.  deepest: draft that was timed.  shown: what all sequences have shown, greedy ones apart.

    Example:
        >>> learner, plain, drafted = Learner(Profile.assumed()), Work(1, 10), Work(1, 10, nodes=4, depth=4, asked=1)
        >>> for _ in range(8):
        ...     learner.time(plain, 1e-3)
        ...     learner.time(drafted, 3e-3)
        >>> round(1e3 * learner.profile.costs.seconds(drafted), 1)
        3.0
    """

    def __init__(self, start: Profile) -> None:
        self.profile = self._start = start
        self.lost, self.deepest, self._drafted, self._due = 0.0, 0, 0, LEAST
        self._taken = self._given = 0.0
        """Of rounds with drafts that were not compared yet: what they took, in units of the start's rounds without, and their tokens."""
        self._tries = Counter[tuple[int, Budget]]()
        self._plain: OrderedDict[float, _Recent] = OrderedDict()
        """Rounds without drafts by batch, in units of the start's; the latest batch last."""
        self._kinds: OrderedDict[tuple[float, ...], _Recent] = OrderedDict()
        """Rounds with drafts, in units of the pace."""
        self.shown: dict[bool, Record] = {greedy: Record(lasting=LASTING) for greedy in (False, True)}

    @property
    def share(self) -> float:
        """Of the rounds in which a draft was asked for, those in which there was one."""
        asked, had = (sum(getattr(r, name) for r in self.shown.values()) for name in ("asked", "had"))
        return (had + ENOUGH) / (asked + ENOUGH)

    def _pace(self, batch: float) -> float:
        """Of rounds without drafts, what they take over what the start says; of another batch where there were none of this."""
        known = self._plain.get(batch) or next(reversed(self._plain.values()), None)
        return 1.0 if known is None else known.mean()

    def time(self, work: Work, seconds: float) -> None:
        """Learn from a round like those before it: what it did, and what it took."""
        if work.asked:
            key = work.sequences, work.nodes, work.depth, work.asked, work.branching
            kind = _latest(self._kinds, key, KEPT)
            kind.add(charges(work), seconds / self._pace(work.sequences))
            self._drafted += 1
            if kind.count == LEAST:
                self.deepest = max(self.deepest, int(work.depth))
            if self._drafted >= self._due or kind.count == LEAST:
                self._due = int(min(REFIT * self._drafted, self._drafted + MOST)) + 1
                self._learn()
        else:
            plain = _latest(self._plain, work.sequences, BURST)
            plain.add(charges(work), seconds / self._start.costs.seconds(work))
            if plain.count == LEAST:
                self._learn()

    def gain(self, work: Work, seconds: float, tokens: float) -> None:
        """Take note that rounds with drafts gave so many tokens to each sequence in so many seconds, until they are compared."""
        self._taken += seconds / self._start.costs.seconds(Work(work.sequences, work.context))
        self._given += tokens
        if self._taken / self._pace(work.sequences) - self._given < -CREDIT:
            self._taken, self._given = 0.5 * self._taken, 0.5 * self._given

    def compare(self, batch: float, at: int) -> None:
        """Settle in round `at` what drafts have lost since the last time, by the pace of now."""
        self.lost = max(self.lost, RATE * at) + self._taken / self._pace(batch) - self._given
        self._taken = self._given = 0.0

    def barred(self, batch: float, at: int) -> int:
        """The round until which drafts may lose no more, as it looks in round `at`."""
        lost = max(self.lost, RATE * at) + self._taken / self._pace(batch) - self._given
        return int((lost - CREDIT) / RATE)

    def untried(self, sizes: Sequence[Budget], contexts: Sequence[int], at: int) -> Budget | None:
        """Of these sizes one that was hardly seen, where what a burst of it may lose is left in round `at`."""
        B, left = len(contexts), CREDIT + min(RATE * at - self.lost, 0.0)
        for size in sizes if left >= LEAST_LEFT else ():
            if self._tries[B, size] < ENOUGH:
                plain, drafted = (self.profile.costs.seconds(Work.of([each] * B, contexts)) for each in (NOTHING, size))
                if left < min((SETTLED + BURST) * (drafted / plain - 1.0), CREDIT / 2.0):
                    return None
                self._tries[B, size] += BURST
                return size
        return None

    def _learn(self) -> None:
        known: dict[str, Any] = {"costs": self._costs()}
        for greedy, record in self.shown.items():
            if record.counted:
                known["greedy" if greedy else "acceptance"] = record.learnt(self._start.prior(1.0))
        self.profile = replace(self._start, **known)

    def _costs(self) -> RoundCosts:
        start, kinds = np.array(self._start.costs.prices), [kind for kind in self._kinds.values() if len(kind.taken) >= LEAST]
        prices = start
        if kinds:
            weight = np.sqrt([len(kind.taken) for kind in kinds])
            taken = np.array([kind.mean() for kind in kinds])
            part = np.array([np.mean(kind.charges, 0) for kind in kinds]) * start * (weight / taken)[:, None]
            squares, sums, free = (
                part.T @ part + BELIEF**2 * np.eye(len(start)),
                part.T @ weight + BELIEF**2,
                np.arange(len(start)),
            )
            times = np.linalg.solve(squares, sums)
            while (times < 0).any():  # those are 0, and the others are solved for again
                free = free[times > 0]
                times = np.linalg.solve(squares[np.ix_(free, free)], sums[free])
            prices = np.zeros(len(start))
            prices[free] = times * start[free]
        return RoundCosts.whole(Charges(*(self._pace(0.0) * prices).tolist()))


def _latest(kinds: OrderedDict[Any, _Recent], key: Any, kept: int) -> _Recent:
    """Of this key, which is now the latest of KINDS."""
    found = kinds.setdefault(key, _Recent(kept))
    kinds.move_to_end(key)
    if len(kinds) > KINDS:
        kinds.popitem(last=False)
    return found
