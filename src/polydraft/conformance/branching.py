"""Every outcome of a function that draws random numbers, with its exact probability.

The function runs once for each way that its comparisons can go. A `Uniform` is no number: it knows the interval that earlier comparisons left
of [0, 1). `u < t` is certain where t lies outside of it; otherwise both answers are followed, one after the other.

    Pr(outcome) = sum over the runs that end so of  product over comparisons of  length of the interval kept / length of the interval before

Certain: all runs are followed, so the probabilities are exact up to the rounding of float64. Valid where uniforms are compared with numbers, as
they are, shifted or scaled, also element by element and by `np.searchsorted`. What takes them for numbers is refused; see `intervals`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from polydraft.errors import InvalidInputError

Outcome = TypeVar("Outcome", bound=Hashable)
SMALLEST = 1e-14
"""Intervals shorter than this are not followed: thresholds that are equal but for their rounding."""
MOST_RUNS = 200_000
"""Runs of a function after which it has too many outcomes to enumerate."""


class TakenOption(NamedTuple):
    """An option that was taken, those that are left, and the probabilities of all."""

    option: int
    rest: list[int]
    probs: tuple[float, ...]


@dataclass
class Branches:
    """A source of randomness whose draws follow a script, one decision after the other, and then the first option that is possible.

    script: decisions to take again, the last one by its next option.  trail: decisions taken.  probability: of all of them.
    """

    script: Sequence[TakenOption] = ()
    trail: list[TakenOption] = field(default_factory=list[TakenOption])
    probability: float = 1.0

    def branch(self, probs: Sequence[float] | np.ndarray) -> int:
        """One of several options of these probabilities, which sum to 1."""
        weights = tuple(np.asarray(probs, np.float64).tolist())
        turn = len(self.trail)
        if turn < len(self.script):
            decision = self.script[turn]
            if decision.probs != weights:
                raise InvalidInputError(
                    "the function drew other numbers when it ran again; expected a function of p, q, draft tokens and its uniforms alone."
                )
        else:
            option, *rest = [x for x, weight in enumerate(weights) if weight > SMALLEST]
            decision = TakenOption(option, rest, weights)
        self.trail.append(decision)
        self.probability *= weights[decision.option]
        return decision.option

    def __call__(self) -> "Uniform":
        """A uniform of [0, 1)."""
        return Uniform(self, Interval())

    def random(self, size: int | tuple[int, ...] | None = None) -> Any:
        """Uniforms of [0, 1), as `numpy.random.Generator.random` gives them."""
        if size is None:
            return self()
        uniforms = np.empty(size, object)
        for index in np.ndindex(uniforms.shape):
            uniforms[index] = self()
        return uniforms

    def choice(self, a: int | Sequence[int], p: np.ndarray | None = None) -> int:
        """One of `a`, or of the numbers below it, with probabilities p, as of `numpy.random.Generator.choice`."""
        options = range(a) if isinstance(a, int) else a
        probs = np.full(len(options), 1 / len(options)) if p is None else np.asarray(p, np.float64)
        return options[self.branch(probs / probs.sum())]


@dataclass
class Interval:
    """What is known of a uniform."""

    low: float = 0.0
    high: float = 1.0


class Uniform:
    """scale * u + shift for a uniform u of which an interval is known."""

    __array_ufunc__ = None
    """Arrays leave operations with it to it."""
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, source: Branches, interval: Interval, scale: float = 1.0, shift: float = 0.0) -> None:
        self._source = source
        self._interval = interval
        self._scale = scale
        self._shift = shift

    def _moved(self, other: Any, of: Callable[[float], tuple[float, float]]) -> Any:
        """The same uniform with another scale and shift, for each number of `other`."""
        if isinstance(other, Uniform):
            raise _refused("two uniforms in one expression")
        if np.ndim(other):
            numbers = np.asarray(other)
            moved = np.empty(numbers.shape, object)
            for index in np.ndindex(numbers.shape):
                moved[index] = self._moved(float(numbers[index]), of)
            return moved
        scale, shift = of(float(other))
        return Uniform(self._source, self._interval, scale, shift)

    def __mul__(self, other: Any) -> Any:
        return self._moved(other, lambda factor: (self._scale * factor, self._shift * factor))

    def __truediv__(self, other: Any) -> Any:
        return self._moved(other, lambda divisor: (self._scale / divisor, self._shift / divisor))

    def __add__(self, other: Any) -> Any:
        return self._moved(other, lambda number: (self._scale, self._shift + number))

    def __sub__(self, other: Any) -> Any:
        return self._moved(other, lambda number: (self._scale, self._shift - number))

    def __rsub__(self, other: Any) -> Any:
        return self._moved(other, lambda number: (-self._scale, number - self._shift))

    def __neg__(self) -> "Uniform":
        return Uniform(self._source, self._interval, -self._scale, -self._shift)

    __rmul__ = __mul__
    __radd__ = __add__

    def _is_below(self, threshold: Any) -> Any:
        """Whether it is below a number, or each of several."""
        if threshold is self:  # as searches do, for values that are no numbers
            return False
        if isinstance(threshold, Uniform):
            raise _refused("a comparison of two uniforms")
        if np.ndim(threshold):
            numbers = np.asarray(threshold)
            answers = [self._is_below(float(number)) for number in numbers.ravel()]
            return np.array(answers, bool).reshape(numbers.shape)
        if self._scale == 0:
            return self._shift < threshold
        at = (float(threshold) - self._shift) / self._scale
        return self._first_part(at) if self._scale > 0 else not self._first_part(at)

    def _first_part(self, at: float) -> bool:
        """Whether the uniform itself lies below `at`; what is known of it is narrowed to the answer."""
        interval = self._interval
        share = (at - interval.low) / (interval.high - interval.low)
        if not share > SMALLEST:
            return False
        if share >= 1 - SMALLEST:
            return True
        below = self._source.branch((share, 1 - share)) == 0
        if below:
            interval.high = at
        else:
            interval.low = at
        return below

    def __lt__(self, other: Any) -> Any:
        return self._is_below(other)

    __le__ = __lt__

    def __gt__(self, other: Any) -> Any:
        return np.logical_not(self._is_below(other)) if np.ndim(other) else not self._is_below(other)

    __ge__ = __gt__

    def __float__(self) -> float:
        raise _refused("a uniform as a number")


def _refused(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what} was asked for, which cannot be enumerated; expected comparisons of a uniform with numbers. "
        "Check the sampler by intervals or by sampling."
    )


def outcomes(function: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Probability of each outcome of a function of a source of randomness.

    Raises:
        InvalidInputError: a function that uses a uniform as a number, that is none of its uniforms alone, or with too many outcomes.

    Example:
        >>> outcomes(lambda source: "heads" if source() < 0.25 else "tails")
        {'heads': 0.25, 'tails': 0.75}
        >>> outcomes(lambda rng: int(np.searchsorted(np.array([0.5, 0.75, 1.0]), rng.random())))
        {0: 0.5, 1: 0.25, 2: 0.25}
    """
    totals = dict[Outcome, float]()
    script = list[TakenOption]()
    for _ in range(MOST_RUNS):
        source = Branches(script)
        outcome = function(source)
        totals[outcome] = totals.get(outcome, 0.0) + source.probability
        script = source.trail
        while script and not script[-1].rest:
            script.pop()
        if not script:
            return totals
        _, (option, *rest), probs = script.pop()
        script.append(TakenOption(option, rest, probs))
    raise InvalidInputError(
        f"the function has more than {MOST_RUNS} runs; expected fewer. Give fewer tokens or draft tokens, or check it by sampling."
    )
