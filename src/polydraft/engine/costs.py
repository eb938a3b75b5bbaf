"""What a round costs in seconds, by batch, rows, drafting depth and context: measured, then fitted.

    with drafts     once + batch + rows + rows beyond 8 + context + rows x context + depths + drafted nodes + drafting and branching sequences
    without drafts  once + batch + context + rows beyond 8

Each phase of a round (drafting, scoring, other) has its own non-negative coefficients, found by least squares on relative
errors (Huber's weights for outliers), so that a noisy clock can never make more work look cheaper. A round without drafts has
coefficients of its own, as all others are compared to it and the two run different code; chains, which are nearly always what is
chosen, count twice. After the throughput model of Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), where time is
measured by batch and rows and not assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from polydraft import tree
from polydraft.core import Budget
from polydraft.errors import InvalidInputError

__all__ = ["FEATURES", "IN_VAIN", "Observation", "RoundCosts", "budget_of", "charged", "features"]

FEATURES = (
    "once",
    "batch",
    "rows",
    "rows beyond 8",
    "context",
    "rows x context",
    "depths",
    "drafted nodes",
    "drafting sequences",
    "branching sequences",
    "without drafts: once",
    "without drafts: batch",
    "without drafts: context",
)
PHASES = ("drafting", "scoring", "other")
_PLAIN = FEATURES[10:]
_USED = {
    "drafting": ("once", "drafting sequences", "depths", "drafted nodes", "rows x context", *_PLAIN),
    "scoring": ("once", "batch", "rows", "rows beyond 8", "context", "rows x context", *_PLAIN),
    "other": ("once", "batch", "rows", "branching sequences", *_PLAIN),
}
CHAINS = 2.0
"""What a round of chains, or without drafts, counts for in the fit; others 1."""
HINGE = 8
IN_VAIN = 0, 0
"""The size of a sequence whose drafter was asked and had nothing to draft."""


class Observation(NamedTuple):
    """One measured kind of round: `batch` equal sequences, each with `width` paths of `depth`; seconds by phase.

    Depth 0 is a round without drafts, and width 0 one that asked for drafts in vain.
    """

    batch: int
    width: int
    depth: int
    context: int
    drafting: float
    scoring: float
    other: float

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.drafting + self.scoring + self.other


def budget_of(size: Sequence[Any]) -> Budget:
    """Of (width, depth[, trunk[, short]]), of IN_VAIN, or (width, depth, 0, 0, parents) of a tree by position.

    Example:
        >>> budget_of((2, 3, 1)).max_nodes, budget_of((2, 2, 0, 0, (-1, 0, 0, 1))).max_nodes
        (5, 3)
    """
    if len(size) == 5:
        return Budget.fixed(size[4])
    width, depth, trunk, short = (*size, *[0] * (4 - len(size)))
    return Budget.fixed(
        tree.ragged(depth, *[short] * (width - 1)) if short and width > 1 else tree.paths(max(width, 1), depth, trunk)
    )


def features(sizes: Sequence[Sequence[Any]], contexts: Sequence[int]) -> np.ndarray:
    """What a round is charged for, see `FEATURES`. sizes: of each sequence, as in `budget_of`.  contexts: cached tokens of each.

    Example:
        >>> features([(2, 3), (1, 0)], [100, 50]).tolist()
        [1.0, 2.0, 8.0, 0.0, 150.0, 750.0, 3.0, 6.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        >>> features([(1, 0)] * 2, [100, 50])[-3:].tolist()
        [1.0, 2.0, 150.0]
        >>> float(features([(2, 3, 1)], [0])[FEATURES.index("drafted nodes")])
        5.0
    """
    nodes, in_vain = [budget_of(size).max_nodes for size in sizes], sum(tuple(size) == IN_VAIN for size in sizes)
    branching = sum(size[0] > 1 and n > 0 for size, n in zip(sizes, nodes, strict=True))
    return charged(nodes, max(size[1] for size in sizes), in_vain + sum(n > 0 for n in nodes), branching, contexts)


def charged(nodes: Sequence[int], deepest: int, asked: int, branching: int, contexts: Sequence[int]) -> np.ndarray:
    """`features` of a round. nodes: that each sequence drafted.  asked, branching: sequences that were asked for drafts, and whose drafts part."""
    rows, cached = len(nodes) + sum(nodes), sum(contexts)
    beyond = max(0, rows - HINGE)
    if not asked:
        return np.array([0, 0, 0, beyond, 0, 0, 0, 0, 0, 0, 1, len(nodes), cached], dtype=np.float64)
    by_context = sum((1 + n) * c for n, c in zip(nodes, contexts, strict=True))
    drafted = [1, len(nodes), rows, beyond, cached, by_context, deepest, sum(nodes), asked, branching]
    return np.array([*drafted, 0, 0, 0], dtype=np.float64)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round. coefficients: seconds per unit of each of `FEATURES`, by phase.

    observations: what they were fitted to; empty where they are assumed.

    Raises:
        InvalidInputError: coefficients that are missing, negative, not finite or all zero.

    Example:
        >>> costs = RoundCosts.assumed()
        >>> round(costs.seconds([(1, 4)], [0]) / costs.seconds([(1, 0)], [0]), 2)
        1.46
    """

    coefficients: dict[str, tuple[float, ...]]
    observations: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        for phase in PHASES:
            given = self.coefficients.get(phase, ())
            if len(given) != len(FEATURES) or not all(np.isfinite(x) and x >= 0 for x in given):
                raise InvalidInputError(
                    f"costs of {phase} were given as {list(given)}; expected {len(FEATURES)} numbers >= 0, one each for "
                    f"{', '.join(FEATURES)}. Measure them again with `polydraft tune`."
                )
        if self.flat[:3].sum() <= 0 or self.flat[10:12].sum() <= 0:
            raise InvalidInputError("a pass that costs nothing was given; expected seconds > 0. Measure again with a real clock.")

    @cached_property
    def flat(self) -> np.ndarray:
        """[13] seconds per unit of each feature, all phases together."""
        return np.sum([self.coefficients[phase] for phase in PHASES], axis=0)

    def seconds(self, sizes: Sequence[Sequence[Any]], contexts: Sequence[int]) -> float:
        """Of a round in which sequence b drafts sizes[b], see `budget_of`, with contexts[b] cached tokens."""
        return float(self.flat @ features(sizes, contexts))

    @cached_property
    def error(self) -> float:
        """Mean relative error of the fit over its observations; 0 where there are none."""
        if not self.observations:
            return 0.0
        found = [
            abs(self.seconds([(o.width, o.depth)] * o.batch, [o.context] * o.batch) / o.seconds - 1) for o in self.observations
        ]
        return float(np.mean(found))

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> "RoundCosts":
        """Coefficients from measured rounds, least squares on relative errors, none negative; outliers count less (Huber weights).

        Raises:
            InvalidInputError: no round without drafts, or times that are not positive.
        """
        from scipy.optimize import nnls

        if not any(o.depth == 0 < o.width for o in observations) or any(o.seconds <= 0 for o in observations):
            raise InvalidInputError(
                f"{len(observations)} measured rounds were given; expected positive seconds and at least one round without "
                "drafts (depth 0). Measure plain rounds too."
            )
        x = np.array([features([(o.width, o.depth)] * o.batch, [o.context] * o.batch) for o in observations])
        weight = np.array([(CHAINS if o.width == 1 else 1.0) / o.seconds for o in observations])
        found: dict[str, tuple[float, ...]] = {}
        for phase in PHASES:
            used = [FEATURES.index(name) for name in _USED[phase]]
            scale = np.maximum(x[:, used].max(0), 1e-12)
            y, trust = np.array([getattr(o, phase) for o in observations]) * weight, np.ones(len(weight))
            solved = np.zeros(len(used))
            for _ in range(10):
                solved, _ = nnls(x[:, used] / scale * (weight * trust)[:, None], y * trust)
                missed = np.abs(x[:, used] / scale * weight[:, None] @ solved - y)
                trust = np.sqrt(np.minimum(1.0, 2 * max(float(np.median(missed)), 1e-3) / np.maximum(missed, 1e-12)))
            whole = np.zeros(len(FEATURES))
            whole[used] = solved / scale
            if not any(
                o.depth or not o.width for o in observations
            ):  # there was nothing to copy: as far as is known, drafts cost nothing
                whole[[FEATURES.index(name) for name in ("once", "batch", "context")]] = whole[10:]
            found[phase] = tuple(whole.tolist())
        return cls(found, tuple(observations))

    @classmethod
    def assumed(cls) -> "RoundCosts":
        """Costs in passes of one row, for a machine that was not measured: 0.05 for a drafting depth, 0.04 for a node."""
        zero = [0.0] * len(FEATURES)
        drafting, scoring = list(zero), list(zero)
        drafting[FEATURES.index("depths")], drafting[FEATURES.index("once")] = 0.05, 0.1
        for once, row in (("once", "rows"), ("without drafts: once", "without drafts: batch")):
            scoring[FEATURES.index(once)], scoring[FEATURES.index(row)] = 0.96, 0.04
        return cls({"drafting": tuple(drafting), "scoring": tuple(scoring), "other": tuple(zero)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "features": list(FEATURES),
            "coefficients": {phase: list(self.coefficients[phase]) for phase in PHASES},
            "observations": [o._asdict() for o in self.observations],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RoundCosts":
        """From `to_dict`, of the schema that `schema.PROFILE` has for costs.

        Raises:
            InvalidInputError: other features than this version knows, or a pass that costs nothing.
        """
        if data["features"] != list(FEATURES):
            raise InvalidInputError("the costs are of another version of polydraft; measure them again with `polydraft tune`.")
        rounds = tuple(Observation(**o) for o in data["observations"])
        return cls({phase: tuple(map(float, values)) for phase, values in data["coefficients"].items()}, rounds)
