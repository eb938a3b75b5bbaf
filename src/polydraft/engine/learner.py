"""What a plan knows before it has measured anything, and how it learns the rest from the rounds that run anyway.

    start   a pass reads the weights once: bytes / bandwidth, the latter measured in milliseconds; rows, calls and contexts cost the usual shares of it
    scale   of what rounds without drafts took over what the start says; of all rounds as long as there are none and the start is in passes
    costs   least squares on relative errors over the kinds of rounds seen, and of each coefficient over scale x start (weight BELIEF), none negative
    prior   acceptance by depth, and how often there is something to draft, over all requests, with a long decay

A kind is a batch, its drafted nodes and the deepest path; of each the last KEPT rounds count, from LEAST on, a stalled one for STALLED medians at
most. Some sizes no plan asks for, and rounds without drafts are what all others are compared to: a few are tried now and then in place of a planned
draft, those without first, and in pauses, a few rounds in a row, for at most EXPLORING of the time so far.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from polydraft.core import Drafter, Target, Verifier
from polydraft.engine import acceptance, places
from polydraft.engine.acceptance import DEPTHS, Acceptance
from polydraft.engine.costs import FEATURES, HINGE, RoundCosts, features
from polydraft.engine.profile import PRIOR, Profile, widest
from polydraft.models.memory import read_bandwidth

__all__ = ["EXPLORING", "Learner", "assumed"]

EXPLORING, PAUSED = 0.02, 0.005
"""Share of the time that sizes which no plan asked for may take, and while nothing is drafted."""
TRIED = ((1, 0), (1, 1), (1, 4), (2, 4))
"""(width, depth) of them; `calibrate.SIZES` has more."""
ENOUGH = 6
"""Rounds of such a size after which it is not tried again."""
AGAIN = 1.1
"""Times as long as until now, it takes until one looks again whether all such sizes, of this batch, were seen."""
KEPT, LEAST, STALLED = 16, 2, 2.0
_OF_A_KIND = [FEATURES.index(name) for name in FEATURES if "context" not in name]
_PLAIN, _DEPTHS = FEATURES.index("without drafts: once"), FEATURES.index("depths")
KINDS = 32
"""Kinds that are remembered, the latest."""
BELIEF = 0.05
"""Weight of a coefficient's start against a relative error of 1 in one round."""
LASTING = 0.998
"""What is left of a round's acceptance after the next."""
REFIT, MOST = 1.25, 128
"""Costs are fitted again when so many times as many rounds are known, or so many more, and where a kind begins to count."""
SECONDS = "seconds"
"""What is assumed where the size of the weights is known; else passes."""
CALL, ROW = 2e-4, 1e-5
"""Seconds of a round, and of a row in it, beside reading the weights: the embedded pair."""
SHARES = {"rows": 0.05, "rows beyond 8": 0.07, "context": 2e-4, "rows x context": 2e-5}
"""Of a pass of one row: eight rows cost 1.04 to 1.6 of one at 110M and 135M parameters, a token of context what its keys and values are of the weights."""


@lru_cache(maxsize=32)
def _bandwidth(num_bytes: int, device: str) -> float:
    return read_bandwidth(num_bytes, rounds=3, device=device)


def _reading(model: Any) -> float:
    """Seconds to read a model's weights once, small ones from the caches; 0 where their size is not known."""
    size = getattr(model, "weight_bytes", 0)
    measured = 1 << min(max(size.bit_length(), 20), 25)
    return size / _bandwidth(measured, str(getattr(model, "device", "cpu"))) if size else 0.0


def assumed(target: Target, drafter: Drafter, verifier: Verifier) -> Profile:
    """The profile of parts of which nothing was measured; where their size is not known, in passes of one row."""
    once = _reading(target)
    if not once:
        return Profile.assumed(widest(drafter, verifier))
    drafting = sum(_reading(getattr(each, "model", None)) for each in getattr(drafter, "members", [drafter]))
    known = {name: share * once for name, share in SHARES.items()}
    known["once"], known["rows"] = CALL + once, known["rows"] + ROW
    known |= {"without drafts: " + name: known[of] for name, of in (("once", "once"), ("batch", "rows"), ("context", "context"))}
    known |= {
        "depths": drafting + ROW * bool(drafting),
        "drafted nodes": 0.05 * drafting + ROW / 10,
        "drafting sequences": 5 * ROW,
    }
    known["branching sequences"] = 5 * ROW
    zero = (0.0,) * len(FEATURES)
    costs = RoundCosts({"drafting": zero, "scoring": tuple(known.get(name, 0.0) for name in FEATURES), "other": zero})
    return Profile(costs, (PRIOR,) * DEPTHS, widest(drafter, verifier), {"assumed": SECONDS})


@lru_cache(maxsize=64)
def _key(batch: int, width: int, depth: int) -> tuple[float, ...]:
    """Of a kind."""
    return tuple(features([(width, depth)] * batch, [0] * batch)[_OF_A_KIND].tolist())


class _Kind:
    """Rounds alike: what the latest of them are charged for, and took; how many there were."""

    def __init__(self) -> None:
        self.features: deque[np.ndarray] = deque(maxlen=KEPT)
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.count = 0

    def add(self, features: np.ndarray, seconds: float) -> None:
        self.features.append(features)
        self.seconds.append(seconds)
        self.count += 1

    @property
    def mean(self) -> float:
        """Seconds, a stalled round counting for STALLED medians."""
        taken = np.array(self.seconds)
        return float(np.minimum(taken, STALLED * np.median(taken)).mean())


class Learner:
    """A profile that is learnt while it is used; see the module.

    start: what is assumed.  ranked: its drafter makes most probable trees, see `engine/places.py`.
    `profile`: what is known now.  `share`: of the rounds in which a draft was asked for, those in which there was one.  `seconds`: of all rounds; `exploring`: of them, those that no plan asked for; `not_before`: of them, when the next may be tried.

    Example:
        >>> from polydraft.engine.costs import features
        >>> learner = Learner(Profile.assumed())
        >>> for _ in range(8):
        ...     learner.time(features([(1, 4)], [10]), 3e-3)
        >>> round(1e3 * learner.profile.costs.seconds([(1, 4)], [10]), 1)
        3.0
    """

    def __init__(self, start: Profile, *, ranked: bool = False) -> None:
        from scipy.optimize import nnls  # a third of a second: here, not in the middle of the first text

        self._nnls = nnls
        self.profile = self._start = start
        self.seconds = self.exploring = self.not_before = self._asked = self._had = 0.0
        self.share = 1.0
        self._ranked, self._rounds, self._due = ranked, 0, LEAST
        self._kinds: OrderedDict[tuple[float, ...], _Kind] = OrderedDict()
        self._seen: dict[bool, Acceptance] = {}

    def time(self, charged: np.ndarray, seconds: float) -> None:
        """Learn from a round: what it is charged for, see `costs.charged`, and what it took."""
        self._rounds += 1
        key = tuple(charged[_OF_A_KIND].tolist())
        kind = self._kinds.setdefault(key, _Kind())
        kind.add(charged, seconds)
        self._kinds.move_to_end(key)
        if len(self._kinds) > KINDS:
            self._kinds.popitem(last=False)
        if self._rounds >= self._due or kind.count == LEAST:
            self._due = math.ceil(min(REFIT * self._rounds, self._rounds + MOST))
            self._learn()

    def untried(
        self, batch: int, max_width: int, contexts: Seq[int], paused: bool = False, rounds: int = 1, unread: int = 0
    ) -> tuple[int, int] | None:
        """The first size that was hardly seen, or that which was seen least, where so many rounds of it fit into the time for exploring.

        paused: nothing is drafted; less time is for exploring then, and what drafts are thought to cost keeps none from being tried again.
        unread: tokens that the drafter has to catch up on before.
        """
        seen = {(w, d): max(self._count(batch, w, d), LEAST - 1) for w, d in TRIED if w <= max_width}
        size = min(seen, key=lambda size: seen[size])
        if seen[size] >= ENOUGH:
            self.not_before = AGAIN * self.seconds
            return None
        costs = self.profile.costs
        price = rounds * costs.seconds([size] * batch, contexts) + (unread / HINGE) * costs.flat[_DEPTHS] * bool(size[1])
        if paused:
            price = min(price, rounds * 2.0 * costs.seconds([(1, 0)] * batch, contexts))
        share = PAUSED if paused else EXPLORING
        self.not_before = (self.exploring + price) / share - price
        return size if self.seconds >= self.not_before else None

    def _count(self, batch: int, width: int, depth: int) -> int:
        key = _key(batch, width, depth)
        return self._kinds[key].count if key in self._kinds else 0

    def fold(self, greedy: bool, before: Acceptance, after: Acceptance) -> None:
        """Add what a round told of one sequence to what is known of all. before: its record before the round."""
        if after.asked != before.asked:
            had = after.had - acceptance.HAVING_DECAY * before.had
            self._asked = LASTING * self._asked + 1.0
            self._had = LASTING * self._had + had
            self.share = (self._had + ENOUGH) / (self._asked + ENOUGH)
        if after.folded != before.folded:
            seen = self._seen.setdefault(greedy, places.fit(Acceptance()) if self._ranked else Acceptance())
            decay = places.DECAY if self._ranked else acceptance.DECAY
            seen.kept = LASTING * seen.kept + after.kept - decay * before.kept
            seen.seen = LASTING * seen.seen + after.seen - decay * before.seen

    def _learn(self) -> None:
        known: dict[str, Any] = {"costs": self._costs()}
        for greedy, seen in self._seen.items():
            rates = np.empty(DEPTHS)
            if self._ranked:
                table = np.empty(places.SIZE + places.BINS)
                places.means(seen.kept, seen.seen, places.assumed(self._start.acceptance), 0.0, table)
                known["greedy_places" if greedy else "places"] = tuple(table.tolist())
            else:
                acceptance.by_depth(seen.kept, seen.seen, np.array(self._start.acceptance), 1.0, 0.0, rates)
                known["greedy" if greedy else "acceptance"] = tuple(rates.tolist())
        self.profile = replace(self._start, **known)

    def _costs(self) -> RoundCosts:
        kinds = [kind for kind in self._kinds.values() if len(kind.seconds) >= LEAST]
        if not kinds:
            return self._start.costs
        start, x = self._start.costs.flat, np.array([np.mean(kind.features, 0) for kind in kinds])
        y, weight = np.array([kind.mean for kind in kinds]), np.sqrt([len(kind.seconds) for kind in kinds])
        plain = x[:, _PLAIN] > 0  # all else is compared to it
        if not plain.any():
            plain[:] = self._start.about.get("assumed") != SECONDS
        scale = math.exp(np.average(np.log(y / (x @ start))[plain], weights=weight[plain])) if plain.any() else 1.0
        believed = BELIEF * np.eye(len(start))
        times, _ = self._nnls(
            np.vstack([x * (scale * start) * (weight / y)[:, None], believed]), np.concatenate([weight, believed.sum(1)])
        )
        zero = (0.0,) * len(FEATURES)
        return RoundCosts({"drafting": zero, "scoring": tuple((times * scale * start).tolist()), "other": zero})
