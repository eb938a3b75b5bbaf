"""What a round costs in seconds, by what it does: measured, then fitted.

    with drafts     once + sequences + rows + rows beyond 8 + context + rows x context + depth + nodes + asked and branching sequences
    without drafts  once + sequences + context + rows beyond 8

Each phase of a round (drafting, scoring, other) has its own non-negative prices, found by least squares on relative
errors (Huber's weights for outliers), so that a noisy clock can never make more work look cheaper. A round without drafts has
prices of its own, as all others are compared to it and the two run different code; chains, which are nearly always what is
chosen, count twice. After the throughput model of Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), where time is
measured by batch and rows and not assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import Budget
from polydraft.errors import InvalidInputError

__all__ = ["HINGE", "PHASES", "Charges", "Observation", "RoundCosts", "Work", "charges", "seconds"]

PHASES = ("drafting", "scoring", "other")
CHAINS = 2.0
"""What a round of chains, or without drafts, counts for in the fit; others 1."""
HINGE = 8
"""Rows of a pass from which on each further one may cost more: until there a processor waits for the weights."""
HUBER_ROUNDS = 10


class Charges(NamedTuple):
    """All that a round is charged for: so much of each, or the seconds that one of each takes. Numbers, or arrays of one shape."""

    once: Any = 0.0
    sequences: Any = 0.0
    rows: Any = 0.0
    rows_beyond: Any = 0.0
    context: Any = 0.0
    rows_context: Any = 0.0
    depth: Any = 0.0
    nodes: Any = 0.0
    asked: Any = 0.0
    branching: Any = 0.0
    plain_once: Any = 0.0
    plain_sequences: Any = 0.0
    plain_context: Any = 0.0


_PLAIN = ("plain_once", "plain_sequences", "plain_context")
_CHARGED = {
    "drafting": ("once", "asked", "depth", "nodes", "rows_context", *_PLAIN),
    "scoring": ("once", "sequences", "rows", "rows_beyond", "context", "rows_context", *_PLAIN),
    "other": ("once", "sequences", "rows", "branching", *_PLAIN),
}


class Work(NamedTuple):
    """What a round does. Numbers, or arrays of one shape.

    sequences: in the batch.  context: their cached tokens, together.  nodes: drafted tokens, together.  depth: of the deepest draft.
    asked, branching: sequences that were asked for a draft, and whose drafts part.  nodes_context: for each node, the cached tokens
    of its sequence, summed.
    """

    sequences: int
    context: float = 0.0
    nodes: Any = 0
    depth: Any = 0
    asked: Any = 0
    branching: Any = 0
    nodes_context: Any = 0.0

    @classmethod
    def of(cls, budgets: Sequence[Budget], contexts: Sequence[int]) -> "Work":
        """Of a round in which each sequence drafts all that its budget holds.

        Example:
            >>> Work.of([Budget.fixed((-1, 0, 0)), Budget.fixed((-1,))], [100, 50])
            Work(sequences=2, context=150, nodes=2, depth=1, asked=1, branching=1, nodes_context=200)
        """
        drafted = [(g.max_nodes, g.max_depth) for g in budgets]
        return cls(
            len(budgets),
            sum(contexts),
            sum(n for n, _ in drafted),
            max(d for _, d in drafted),
            sum(d > 0 for _, d in drafted),
            sum(n > d for n, d in drafted),
            sum(n * c for (n, _), c in zip(drafted, contexts, strict=True)),
        )


def charges(work: Work) -> Charges:
    """What a round is charged for.

    Example:
        >>> charges(Work(2, 150.0)).plain_sequences, charges(Work(2, 150.0, nodes=6, depth=3, asked=2)).rows
        (2, 8)
    """
    B, context, nodes, depth, asked, branching, nodes_context = work
    if np.ndim(asked) == 0 and not asked:
        return Charges(plain_once=1, plain_sequences=B, plain_context=context, rows_beyond=max(0, B - HINGE))
    rows = B + nodes
    beyond = np.maximum(rows - HINGE, 0)
    return Charges(1, B, rows, beyond, context, context + nodes_context, depth, nodes, asked, branching)


def seconds(prices: Charges, work: Work) -> Any:
    """Of a round, or of one for each entry of the work's arrays, all of which are asked for drafts."""
    return sum(price * amount for price, amount in zip(prices, charges(work), strict=True) if price)


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

    @property
    def work(self) -> Work:
        """What such a round does."""
        B, nodes = self.batch, self.width * self.depth * self.batch
        asked, branching = (self.depth > 0 or not self.width) * B, (self.width > 1 and self.depth > 0) * B
        return Work(B, B * self.context, nodes, self.depth, asked, branching, nodes * self.context)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round. by_phase: seconds of one of each thing charged for.  observations: what they were fitted to; empty where assumed.

    Raises:
        InvalidInputError: prices that are missing, negative, not finite or all zero.

    Example:
        >>> costs = RoundCosts.assumed()
        >>> round(costs.seconds(Work(1, nodes=4, depth=4, asked=1)) / costs.seconds(Work(1)), 2)
        1.46
    """

    by_phase: Mapping[str, Charges]
    observations: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        for phase in PHASES:
            given = self.by_phase.get(phase, ())
            if len(given) != len(Charges._fields) or not all(np.isfinite(x) and x >= 0 for x in given):
                raise InvalidInputError(
                    f"costs of {phase} were given as {list(given)}; expected {len(Charges._fields)} numbers >= 0, one each for "
                    f"{', '.join(Charges._fields)}. Measure them again with `polydraft tune`."
                )
        whole = self.prices
        if whole.once + whole.sequences + whole.rows <= 0 or whole.plain_once + whole.plain_sequences <= 0:
            raise InvalidInputError("a pass that costs nothing was given; expected seconds > 0. Measure again with a real clock.")

    @cached_property
    def prices(self) -> Charges:
        """Of all phases together."""
        return Charges(*(float(sum(each)) for each in zip(*(self.by_phase[phase] for phase in PHASES), strict=True)))

    def seconds(self, work: Work) -> float:
        """Of a round."""
        return float(seconds(self.prices, work))

    @cached_property
    def error(self) -> float:
        """Mean relative error of the fit over its observations; 0 where there are none."""
        return float(np.mean([abs(self.seconds(o.work) / o.seconds - 1) for o in self.observations] or [0.0]))

    @classmethod
    def whole(cls, prices: Charges) -> "RoundCosts":
        """Where the phases are not told apart."""
        return cls({"drafting": Charges(), "scoring": prices, "other": Charges()})

    @classmethod
    def fit(cls, observations: Sequence[Observation]) -> "RoundCosts":
        """Prices from measured rounds, least squares on relative errors, none negative; outliers count less (Huber weights).

        Raises:
            InvalidInputError: no round without drafts, or times that are not positive.
        """
        from scipy.optimize import nnls

        if not any(o.depth == 0 < o.width for o in observations) or any(o.seconds <= 0 for o in observations):
            raise InvalidInputError(
                f"{len(observations)} measured rounds were given; expected positive seconds and at least one round without "
                "drafts (depth 0). Measure plain rounds too."
            )
        x = np.array([charges(o.work) for o in observations], np.float64)
        weight = np.array([(CHAINS if o.width == 1 else 1.0) / o.seconds for o in observations])
        drafted = any(o.depth or not o.width for o in observations)
        found: dict[str, Charges] = {}
        for phase, names in _CHARGED.items():
            used = x[:, [Charges._fields.index(name) for name in names]]
            scale = np.maximum(used.max(0), 1e-12)
            y, trust, solved = np.array([getattr(o, phase) for o in observations]) * weight, np.ones(len(weight)), scale
            for _ in range(HUBER_ROUNDS):
                solved, _ = nnls(used / scale * (weight * trust)[:, None], y * trust)
                missed = np.abs(used / scale * weight[:, None] @ solved - y)
                trust = np.sqrt(np.minimum(1.0, 2 * max(float(np.median(missed)), 1e-3) / np.maximum(missed, 1e-12)))
            prices = Charges(**dict(zip(names, (solved / scale).tolist(), strict=True)))
            if not drafted:  # as far as is known, drafts cost nothing
                prices = prices._replace(once=prices.plain_once, sequences=prices.plain_sequences, context=prices.plain_context)
            found[phase] = prices
        return cls(found, tuple(observations))

    @classmethod
    def assumed(cls) -> "RoundCosts":
        """Costs in passes of one row, for a machine that was not measured: 0.05 for a drafting depth, 0.04 for a node."""
        return cls(
            {
                "drafting": Charges(once=0.1, depth=0.05),
                "scoring": Charges(once=0.96, rows=0.04, plain_once=0.96, plain_sequences=0.04),
                "other": Charges(),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "by_phase": {phase: self.by_phase[phase]._asdict() for phase in PHASES},
            "observations": [o._asdict() for o in self.observations],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RoundCosts":
        """From `to_dict`, of the schema that `schema.PROFILE` has for costs.

        Raises:
            InvalidInputError: a pass that costs nothing.
        """
        by_phase = {phase: Charges(**{k: float(v) for k, v in prices.items()}) for phase, prices in data["by_phase"].items()}
        return cls(by_phase, tuple(Observation(**o) for o in data["observations"]))
