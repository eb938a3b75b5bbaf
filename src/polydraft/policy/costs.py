"""Seconds of a step: of the target's forward pass by its rows, of drafting by its steps, and of what every step does beside them.

    rows(n)        linear between KNOTS, measured at 1, 4 to 8 and 16 rows
    row(n)         the price of one more, which never falls as rows are added: the slope of the greatest convex function below rows(n)
    drafting(n)    n draft steps, and what a draft costs before its first one and in its verification; of several sequences at a time it grows as a
                   forward pass of so many rows does
    behind(L)      the same behind texts of L tokens, whose keys and values every row of a forward pass and every draft step attends to

Measured with an idle engine (`measuring`), and stored with the profile. While requests run, live costs are exponential averages of what steps took (`LiveCosts`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidInputError

MEASURED = (1, 4, 5, 6, 7, 8, 16)
"""Numbers of rows that are timed. Forward passes of 1 to 8 rows take 33, 31, 32, 33, 38, 39, 51 and 52 ms (Qwen2.5-Coder-1.5B, one thread of an AMD EPYC), one of 16
takes 99. Drafts by a line from 4 to 8 are 1 to 2% slower on code (simulated on 1,280 contexts of the Qwen pair, one thread and two) and as fast on chat."""
KNOTS = (*MEASURED, 32, 64, 72)
"""Numbers of rows between which forward passes are interpolated. The rows after the 64th of one read the weights again: 64, 65 and 72 take 110, 127 and
139 ms (Qwen2.5-Coder-0.5B), 42, 48 and 50 (SmolLM2-135M; one thread of an AMD EPYC)."""
LATEST = 1 / 16
"""Weight of the latest step in the averages."""
STALLED = 2.0
"""How much longer than expected a step counts at most."""
COMMON = 1 / 32
"""Weight of the latest step in the factor of all costs."""
TOKEN_SECONDS = ("first_row_token", "row_token", "draft_token")
"""What a token of the context costs."""
SECONDS = ("draft_start", "draft_step", "overhead", *TOKEN_SECONDS)
"""Costs beside those of forward passes by their rows."""


class _Pool(NamedTuple):
    """Pieces between neighbouring knots whose rows have one price. rise: in seconds.  width: in rows."""

    rise: float
    width: int
    pieces: int

    @property
    def price(self) -> float:
        return self.rise / self.width


def _prices(knots: Sequence[float]) -> list[float]:
    """From each knot on, of one more row: slopes of the greatest convex function below the knots, by pooling neighbours whose prices would fall."""
    pools = list[_Pool]()
    for k, (low, high) in enumerate(pairwise(max(seconds, knots[0]) for seconds in knots)):
        pool = _Pool(high - low, KNOTS[k + 1] - KNOTS[k], 1)
        while pools and pools[-1].price > pool.price:
            before = pools.pop()
            pool = _Pool(pool.rise + before.rise, pool.width + before.width, pool.pieces + before.pieces)
        pools.append(pool)
    return [pool.price for pool in pools for _ in range(pool.pieces)]


@dataclass(frozen=True)
class Costs:
    """knots: seconds of a forward pass of as many rows as KNOTS.  draft_start, draft_step: see the module.  overhead: of any step beside forward passes and
        drafts.
    first_row_token, row_token, draft_token: seconds that each token of the context adds to a sequence's first row, to a further one, and to a draft step.

    Raises:
        InvalidInputError: seconds that are negative or not finite, or a forward pass that takes none.

    Example:
        >>> costs = Costs.of({1: 1.0, 4: 0.98, 8: 1.1}, draft_start=0.05, draft_step=0.25)
        >>> costs.rows(1), costs.rows(6), round(costs.row(5), 3), round(costs.row(40), 3)
        (1.0, 1.04, 0.03, 0.03)
    """

    knots: tuple[float, ...]
    draft_start: float
    draft_step: float
    overhead: float = 0.0
    first_row_token: float = 0.0
    row_token: float = 0.0
    draft_token: float = 0.0
    _prices: list[float] = field(default_factory=list[float], init=False, repr=False, compare=False)
    """From each knot on, of one more row."""

    def __post_init__(self) -> None:
        numbers = *self.knots, *(getattr(self, name) for name in SECONDS)
        if (
            len(self.knots) != len(KNOTS)
            or not all(isfinite(x) and x >= 0 for x in numbers)
            or self.knots[0] <= 0
        ):
            raise InvalidInputError(
                f"costs {list(numbers)} were given; expected {len(KNOTS)} seconds of forward passes, the first > 0, and {len(SECONDS)} of drafting, the rest and a token of the context, >= 0. "
                "Measure them again with `polydraft tune`."
            )
        self._prices.extend(_prices(self.knots))

    @classmethod
    def of(cls, passes: Mapping[int, float], *, draft_start: float, draft_step: float) -> "Costs":
        """Of forward passes of some numbers of rows; beyond them at the dearest row of them, and beyond 64 rows as one more."""
        rows = list(passes)
        seconds = list(passes.values())
        dearest = max(0.0, *(np.diff(seconds) / np.diff(rows)))
        beyond = (dearest * max(n - rows[-1], 0) + (n > 64) * seconds[0] for n in KNOTS)
        knots = (float(more + np.interp(n, rows, seconds)) for n, more in zip(KNOTS, beyond, strict=True))
        return cls(tuple(knots), draft_start, draft_step)

    def behind(self, num_tokens: float, num_sequences: float = 1) -> "Costs":
        """Costs of steps of so many sequences behind texts of so many tokens, on the mean; these are behind none.

        Example:
            >>> costs = replace(Costs.assumed(), row_token=1e-4, draft_token=2e-4).behind(1000)
            >>> round(costs.rows(4) - costs.rows(1), 2), round(costs.draft_step, 2)
            (0.42, 0.25)
        """
        if num_tokens == 0 or not (self.first_row_token or self.row_token or self.draft_token):
            return self
        knots = (
            seconds + num_tokens * self.attention(rows, num_sequences)
            for seconds, rows in zip(self.knots, KNOTS, strict=True)
        )
        return replace(self, knots=tuple(knots), draft_step=self.draft_step + num_tokens * self.draft_token)

    def attention(self, rows: float, num_sequences: float) -> float:
        """Seconds that a token of each context adds to a forward pass."""
        firsts = min(rows, num_sequences)
        return firsts * self.first_row_token + (rows - firsts) * self.row_token

    @classmethod
    def assumed(cls) -> "Costs":
        """In forward passes of one row, for models that were not measured: 8 rows take 1.3 to 1.8 and 16 2.3 to 3.3 on an Intel Xeon and an AMD EPYC."""
        return cls.of({1: 1.0, 4: 1.12, 8: 1.4, 16: 2.5}, draft_start=0.05, draft_step=0.05)

    @property
    def first_draft(self) -> float:
        """Seconds of a draft of one token: of a head's forward pass, where it drafts."""
        return self.draft_start + self.draft_step

    def piece(self, rows: float) -> int:
        """The knot from which on a number of rows is interpolated."""
        return max(min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1, 0)

    def rows(self, rows: float) -> float:
        """Seconds of a forward pass."""
        k = self.piece(rows)
        return self.knots[k] + (rows - KNOTS[k]) * (self.knots[k + 1] - self.knots[k]) / (
            KNOTS[k + 1] - KNOTS[k]
        )

    def row(self, rows: float) -> float:
        """Seconds of one more row: those of a tile share what it costs."""
        return self._prices[self.piece(rows)]

    def drafting(self, steps: float, num_sequences: float = 1) -> float:
        """Seconds of so many draft steps of so many sequences at a time; of none 0."""
        return self.breadth(num_sequences) * (self.draft_start + steps * self.draft_step) if steps else 0.0

    def breadth(self, num_sequences: float) -> float:
        """Seconds of a forward pass of a row each, in those of one row."""
        return self.rows(num_sequences) / self.knots[0]

    def step(self, rows: float, draft_steps: float, num_sequences: float = 1) -> float:
        """Seconds of a whole step, in which so many sequences draft."""
        return self.overhead + self.rows(rows) + self.drafting(draft_steps, num_sequences)


class LiveCosts:
    """Costs that follow what steps take: all of them by one factor, the speed of the machine at present, and each by its own steps.

    start: what was measured or assumed, in any unit: the first step sets the factor.

    Example:
        >>> live = LiveCosts(Costs.of({1: 2.4e-3, 4: 2.8e-3, 8: 3.2e-3}, draft_start=0.0, draft_step=4e-4))
        >>> for _ in range(500):
        ...     live.observe(1, 0, scoring=2e-3, drafting=0.0, rest=1e-4)
        ...     live.observe(4, 3, scoring=3e-3, drafting=1.5e-3, rest=1e-4)
        >>> round(1e3 * live.costs.step(1, 0), 1), round(1e3 * live.costs.step(4, 3), 1)
        (2.1, 4.6)
    """

    def __init__(self, start: Costs) -> None:
        self.costs = start
        self._mean_steps = 3.0
        self._observed = 0
        self._knows_plain_steps = start.overhead > 0
        """Whether the overhead is that of plain steps, as it was measured, or steps without drafts were seen."""

    def observe(
        self,
        rows: int,
        draft_steps: int,
        *,
        scoring: float,
        drafting: float,
        rest: float,
        num_sequences: int = 1,
        num_tokens: float = 0.0,
        batch: int = 1,
    ) -> None:
        """Take note of a step: seconds of its forward pass, of drafting for so many sequences, and of all else.

        num_tokens: of the contexts of all `batch` sequences, on the mean: what they add, as measured, is no news about forward passes behind none.
        """
        k = self.costs.piece(rows)
        part = min((rows - KNOTS[k]) / (KNOTS[k + 1] - KNOTS[k]), 1.0)
        scoring, drafting = self._behind_none(rows, draft_steps, scoring, drafting, num_tokens, batch)
        self._scale(scoring, (1.0 - part) * self.costs.knots[k] + part * self.costs.knots[k + 1])
        now = self.costs
        knots = self._moved_knots(k, part, scoring)
        slack = 0.1 * knots[0]
        start = now.draft_start
        step = now.draft_step
        self._knows_plain_steps |= not draft_steps
        if draft_steps and self._knows_plain_steps:
            drafting += max(rest - now.overhead, 0.0)  # a draft is charged for its verification
            rest = min(rest, now.overhead)
        if draft_steps:
            start, step = self._moved_drafting(draft_steps, drafting / now.breadth(num_sequences), slack)
        else:
            rest += drafting
        overhead = now.overhead + LATEST * (min(rest, STALLED * (now.overhead + slack)) - now.overhead)
        self.costs = replace(now, knots=knots, draft_start=start, draft_step=step, overhead=overhead)

    def _moved_knots(self, k: int, part: float, scoring: float) -> tuple[float, ...]:
        """Seconds of forward passes after one between knots k and k + 1. part: how far behind the former."""
        knots = list(self.costs.knots)
        expected = (1.0 - part) * knots[k] + part * knots[k + 1]
        error = LATEST * (min(scoring, STALLED * expected) - expected)
        knots[k] = max(knots[k] + (1.0 - part) * error, 0.1 * knots[k])
        for at in range(k + 1, len(KNOTS)):  # what was never seen stays as many times dearer as it was
            knots[at] *= 1.0 + error / expected
        return tuple(knots)

    def _moved_drafting(self, draft_steps: int, drafting: float, slack: float) -> tuple[float, float]:
        """What a draft costs before its first step, and each step: a line through what drafts of several lengths took."""
        now = self.costs
        expected = now.drafting(draft_steps)
        deviation = draft_steps - self._mean_steps
        error = LATEST * (min(drafting, STALLED * (expected + slack)) - expected)
        turn = error * deviation / (1.0 + deviation * deviation)
        step = max(now.draft_step + turn, 0.0)
        start = max(now.draft_start + error - turn * self._mean_steps, 0.0)
        self._mean_steps += LATEST * deviation
        return start, step

    def _behind_none(
        self, rows: int, draft_steps: int, scoring: float, drafting: float, num_tokens: float, batch: int
    ) -> tuple[float, float]:
        """What a step would have taken behind no texts: its seconds fall as the costs do."""
        costs = self.costs
        attending = num_tokens * costs.attention(rows, batch)
        expected = costs.rows(rows)
        drafts = costs.drafting(draft_steps)
        share = drafts / (drafts + num_tokens * draft_steps * costs.draft_token) if drafts else 1.0
        return scoring * expected / (expected + attending), drafting * share

    def _scale(self, scoring: float, expected: float) -> None:
        """Put all costs into the unit of the first steps; later follow what slows all of them."""
        self._observed += 1
        ratio = scoring / expected
        if self._observed > 1 / LATEST:
            ratio = min(max(ratio, 1.0 / STALLED), STALLED)
        factor = max(ratio, 1e-9) ** max(1.0 / self._observed, COMMON)
        now = self.costs
        self.costs = Costs(
            tuple(factor * x for x in now.knots), *(factor * getattr(now, name) for name in SECONDS)
        )
