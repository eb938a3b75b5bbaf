"""What ends drafted paths, and the spare siblings beside a chain, for compiled proposals; see `budget.Stop`."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core.budget import Stop
from polydraft.core.confidence import BINS


class Stops(NamedTuple):
    """As of `budget.Stop`, of every row; D = 0 draws whole trees, S = 0 no spare siblings."""

    min_reach: Float[np.ndarray, "B D"]
    acceptance: Float[np.ndarray, "B BINS"]
    min_spare_chance: Float[np.ndarray, "B S"]
    spare_acceptance: Float[np.ndarray, " B"]


@lru_cache(maxsize=256)
def stops_asked(stops: tuple[Stop | None, ...], count: int) -> Stops:
    """Of every row; D = 0 where none has a stop.

    Example:
        >>> stops_asked((Stop((0.3, 0.5)), None), 2).min_reach.tolist()
        [[0.3, 0.5], [0.0, 0.0]]
    """
    most = max((len(stop.min_reach) for stop in stops if stop), default=0)
    spares = max((len(stop.min_spare_chance) for stop in stops if stop), default=0)
    arrays = Stops(
        np.zeros((count, most)), np.ones((count, BINS)), np.full((count, spares), np.inf), np.ones(count)
    )
    for b, stop in enumerate(stops):
        if stop:
            arrays.min_reach[b] = stop.min_reach + stop.min_reach[-1:] * (most - len(stop.min_reach))
            arrays.acceptance[b] = stop.acceptance
            arrays.spare_acceptance[b] = stop.spare_acceptance
            arrays.min_spare_chance[b, : len(stop.min_spare_chance)] = stop.min_spare_chance
    return arrays
