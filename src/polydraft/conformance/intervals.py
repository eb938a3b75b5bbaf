"""The outcomes of a function of an array of uniforms, with their probabilities: where its outcome changes is found by bisection.

For samplers that take numbers, such as compiled ones. One uniform after the other, in the order in which they are used: its interval [0, 1) is
looked at on a grid, with several values of the uniforms behind it, and each change between neighbours is bisected.

Exact up to BISECTIONS, under one condition: an outcome does not give way to another and come back within one step of the grid. Threshold tests and inverse
transforms never do that, however unlikely a token is. Where it is not known, use `branching`, which needs no condition.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from polydraft.errors import InvalidInputError

Outcome = TypeVar("Outcome", bound=Hashable)
BISECTIONS = 36
"""Halvings of a step of the grid; a breakpoint is then known to 1e-12."""
GRID = 16
"""Points of a uniform at which the function is looked at first, beside its two ends."""
MOST_CHANGES = 1000
"""Of the outcome over one uniform."""
LAST = 1 - 2.0**-24
"""The largest uniform of float32."""
PROBES = 4
"""Values of the uniforms behind it, at each of these points."""


def outcomes(
    function: Callable[[np.ndarray], Outcome], num_uniforms: int, *, grid: int = GRID
) -> dict[Outcome, float]:
    """Probability of each outcome of a function of `num_uniforms` uniforms, given as an array in the order of their use.

    Raises:
        InvalidInputError: no uniform, or no grid.

    Example:
        >>> found = outcomes(lambda u: bool(u[0] < 0.3 and u[1] < 0.5), 2)
        >>> {outcome: round(probability, 9) for outcome, probability in found.items()}
        {True: 0.15, False: 0.85}
    """
    if num_uniforms < 1 or grid < 2:
        raise InvalidInputError(
            f"num_uniforms={num_uniforms} and grid={grid} were given; expected at least 1 uniform and 2 points."
        )
    found = _Outcomes(function, num_uniforms, grid)
    found.split([], 1.0)
    return found.totals


class _Outcomes(Generic[Outcome]):
    """Of a function, one uniform after the other. totals: probability of each."""

    def __init__(self, function: Callable[[np.ndarray], Outcome], num_uniforms: int, grid: int) -> None:
        self.totals = dict[Outcome, float]()
        self._function = function
        self._num_uniforms = num_uniforms
        self._probes = np.random.default_rng(0).random((PROBES, num_uniforms))
        self._points = [0.0, *((np.arange(grid) + 0.5) / grid).tolist(), LAST]

    def _at(self, fixed: list[float], value: float) -> tuple[Outcome, ...]:
        """Outcomes where the first uniforms are fixed, the next one has this value, and those behind it have that of the probes."""
        turn = len(fixed)
        probes = self._probes if turn + 1 < self._num_uniforms else self._probes[:1]
        return tuple(self._function(np.array([*fixed, value, *probe[turn + 1 :]])) for probe in probes)

    def split(self, fixed: list[float], weight: float) -> None:
        """Add the outcomes of all values of the uniforms that are not fixed."""
        for low, high, value in self._constant(fixed):
            mass = weight * (high - low)
            if len(fixed) + 1 < self._num_uniforms:
                self.split([*fixed, value], mass)
            else:
                outcome = self._at(fixed, value)[0]
                self.totals[outcome] = self.totals.get(outcome, 0.0) + mass

    def _constant(self, fixed: list[float]) -> Iterator[tuple[float, float, float]]:
        """Intervals of the next uniform in which the outcomes stay as they are, and a value within each."""
        ends = [0.0]
        inside = [0.0]
        before = self._at(fixed, 0.0)
        at = partial(self._at, fixed)
        for low, high in pairwise(self._points):
            while before != at(high):
                if len(ends) > MOST_CHANGES:
                    raise InvalidInputError(
                        f"the outcome changes more than {MOST_CHANGES} times over one uniform; expected a function of its uniforms alone."
                    )
                end, low = _change(at, low, high, before)
                ends.append(end)
                inside.append(low)
                before = at(low)
        return zip(ends, [*ends[1:], 1.0], inside, strict=True)


def _change(
    seen_at: Callable[[float], tuple[Outcome, ...]], low: float, high: float, before: tuple[Outcome, ...]
) -> tuple[float, float]:
    """Where the outcomes stop being those of `low`, and a point behind it."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if seen_at(middle) == before:
            low = middle
        else:
            high = middle
    return (low + high) / 2, high
