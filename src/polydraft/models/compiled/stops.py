"""What ends drafted paths, and the spare siblings beside a chain, for compiled proposals; see `budget.Stop`."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core.budget import Stop
from polydraft.core.confidence import BINS, acceptance_at
from polydraft.models.matrices.kernels import copy_row
from polydraft.numerics.compile_time import inner
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import DRAFT, uniform_at

__all__ = ["Stops", "add_spares", "stops_asked"]


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


@inner(error_model="numpy")
def add_spares(trees, b, stops, key, rest):
    """Spare siblings of a drawn chain, behind its last node. trees: `proposals.Trees`.  key: of the noise.  rest: room for a row of q."""
    size = 1
    while size < trees.parents.shape[1] and trees.parents[b, size] >= 0:
        size += 1
    chances = np.empty(size - 1)
    node = size  # of acceptance, by the parent of the spare
    for parent in range(size - 1):
        elder = acceptance_at(trees.confidence[b, parent + 1], stops.acceptance[b])
        chances[parent] = trees.reach[b, parent] * (1.0 - elder) * stops.spare_acceptance[b]
    for _ in range(size - 1):
        parent = chances.argmax()
        if (
            node - 2 >= stops.min_spare_chance.shape[1]
            or chances[parent] < stops.min_spare_chance[b, node - 2]
        ):
            return
        row = trees.row[b, parent]
        chances[parent] = -1.0
        copy_row(trees.probs[b, row], rest)
        rest[trees.tokens[b, parent + 1]] = 0.0
        token = choose_row(rest, uniform_at(key.seed, key.sample, key.position, DRAFT, node))
        if token >= 0:
            trees.tokens[b, node] = token
            trees.parents[b, node] = parent
            trees.rows[b, node] = row
            trees.confidence[b, node] = trees.probs[b, row, token]
            trees.first[b, node] = node
            node += 1
