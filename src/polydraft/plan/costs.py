"""What a round costs in seconds, by what it does.

    with drafts     once + sequences + rows + rows beyond 8 + context + rows x context + depth + nodes + asked and branching sequences
    without drafts  once + sequences + context + rows beyond 8

A round without drafts has prices of its own, as all others are compared to it and the two run different code. After the throughput model of
Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), where time is measured by batch and rows and not assumed.
Prices are measured and fitted (`tune/fit.py`), or assumed and learnt (`learner.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from polydraft.core import Budget
from polydraft.errors import InvalidInputError

__all__ = ["HINGE", "PHASES", "Charges", "RoundCosts", "Work", "charges", "seconds"]

PHASES = ("drafting", "scoring", "other")
HINGE = 8
"""Rows of a pass from which on each further one may cost more: until there a processor waits for the weights."""


class Charges(NamedTuple):
    """All that a round is charged for: so much of each, or the seconds that one of each takes."""

    once: float = 0.0
    sequences: float = 0.0
    rows: float = 0.0
    rows_beyond: float = 0.0
    context: float = 0.0
    rows_context: float = 0.0
    depth: float = 0.0
    nodes: float = 0.0
    asked: float = 0.0
    branching: float = 0.0
    plain_once: float = 0.0
    plain_sequences: float = 0.0
    plain_context: float = 0.0


class Work(NamedTuple):
    """What a round does.

    sequences: in the batch.  context: their cached tokens, together.  nodes: drafted tokens, together.  depth: of the deepest draft.
    asked, branching: sequences that were asked for a draft, and whose drafts part.  nodes_context: for each node, the cached tokens
    of its sequence, summed.
    """

    sequences: float
    context: float = 0.0
    nodes: float = 0.0
    depth: float = 0.0
    asked: float = 0.0
    branching: float = 0.0
    nodes_context: float = 0.0

    @classmethod
    def of(cls, budgets: Sequence[Budget], contexts: Sequence[int]) -> "Work":
        """Of a round in which each sequence drafts all that its budget holds.

        Example:
            >>> Work.of([Budget.fixed((-1, 0, 0)), Budget.fixed((-1,))], [100, 50])
            Work(sequences=2, context=150, nodes=2, depth=1, asked=1, branching=1, nodes_context=200)
        """
        return cls.drafted([(g.max_nodes, g.max_depth) for g in budgets], contexts, sum(g.max_depth > 0 for g in budgets))

    @classmethod
    def drafted(cls, drafts: Sequence[tuple[int, int]], contexts: Sequence[int], asked: int) -> "Work":
        """Of a round with drafts of so many nodes and such a depth, one for each sequence, of which `asked` were asked for some."""
        return cls(
            len(drafts),
            sum(contexts),
            sum(n for n, _ in drafts),
            max(d for _, d in drafts),
            asked,
            sum(n > d for n, d in drafts),
            sum(n * c for (n, _), c in zip(drafts, contexts, strict=True)),
        )


@register_jitable
def charges(work: Work) -> Charges:
    """What a round is charged for; in compiled code too.

    Example:
        >>> charges(Work(2, 150.0)).plain_sequences, charges(Work(2, 150.0, nodes=6, depth=3, asked=2)).rows
        (2, 8)
    """
    B, context, nodes, depth, asked, branching, nodes_context = work
    rows, beyond = B + nodes, max(B + nodes - HINGE, 0.0)
    if not asked:
        return Charges(0.0, 0.0, 0.0, beyond, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, B, context)
    return Charges(1.0, B, rows, beyond, context, context + nodes_context, depth, nodes, asked, branching, 0.0, 0.0, 0.0)


@register_jitable
def seconds(prices: Charges, work: Work) -> float:
    """Of a round; in compiled code too."""
    found, of = 0.0, charges(work)
    for i in range(len(of)):
        found += prices[i] * of[i]
    return found


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round. by_phase: seconds of one of each thing charged for.  error: mean relative error of the fit, where they were fitted.

    Raises:
        InvalidInputError: prices that are missing, negative, not finite or all zero.

    Example:
        >>> costs = RoundCosts.assumed()
        >>> round(costs.seconds(Work(1, nodes=4, depth=4, asked=1)) / costs.seconds(Work(1)), 2)
        1.46
    """

    by_phase: Mapping[str, Charges]
    error: float = field(default=0.0, compare=False)

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

    @classmethod
    def whole(cls, prices: Charges) -> "RoundCosts":
        """Where the phases are not told apart."""
        return cls({"drafting": Charges(), "scoring": prices, "other": Charges()})

    @classmethod
    def assumed(cls) -> "RoundCosts":
        """Costs in passes of one row, for a machine that was not measured: 0.05 for a drafting depth, 0.04 for a node."""
        once, row = 0.96, 0.04
        return cls.whole(Charges(0.1 + once, rows=row, depth=0.05, plain_once=once, plain_sequences=row))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {phase: self.by_phase[phase]._asdict() for phase in PHASES}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RoundCosts":
        """From `to_dict`."""
        return cls({phase: Charges(**{name: float(x) for name, x in data[phase].items()}) for phase in PHASES})
