"""How many sequences run together soon: as many as now, or nearly as many as a moment ago.

Clients that have their answers ask anew, one after the other: the first of them would see an empty batch, and drafts that a full one does not pay.
"""

from collections.abc import Callable
from math import exp

FADES = 1.0
"""Seconds after which 1 / e of those that left are still expected back. Sixteen that have left count for two after three seconds."""


class Arrivals:
    """The number of sequences that is expected. clock: in seconds.

    Example:
        >>> now = 0.0
        >>> arrivals = Arrivals(lambda: now)
        >>> arrivals.expect(16)
        16
        >>> now = 0.1
        >>> arrivals.expect(1), arrivals.expect(20)
        (15, 20)
        >>> now = 5.0
        >>> arrivals.expect(1)
        1
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected = 0.0
        self._time = 0.0

    def expect(self, num_sequences: int) -> int:
        """So many run and wait now."""
        now = self._clock()
        faded = exp(min(self._time - now, 0.0) / FADES)
        self._time = now
        self._expected = num_sequences + max(self._expected - num_sequences, 0.0) * faded
        return round(self._expected)
