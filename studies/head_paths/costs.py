"""Seconds of a step with drafts of a head, from its passes and the target's by their rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.core import TokenTree
from polydraft.numerics.clock import clock
from studies.head_paths.rows import HeadRows
from studies.several_drafts.costs import NUM_ROWS, TARGET, StepCosts, measured_passes

__all__ = ["HeadCosts", "head_passes"]

HEAD, START = "head", "start"


def head_passes(target: Any, head: HeadRows, context: Sequence[int], repetitions: int = 9) -> dict[str, list[float]]:
    """The processor's seconds of passes of as many rows as `NUM_ROWS`, the fastest of some; start: of the pass of a head that foretells all depths."""
    taken = np.full((repetitions, len(NUM_ROWS)), np.inf)
    first, time = np.zeros(repetitions), clock(head.model)
    head.open(context)
    for repetition in range(repetitions):
        if head.foretells:
            begin = time()
            head.know()
            first[repetition] = time() - begin
        for i, rows in enumerate(NUM_ROWS):
            head._clear(context[-1])
            star = TokenTree.of(np.array([[context[-1], *context[: rows - 1]]]), np.array([[-1, *[0] * (rows - 1)]]))
            begin = time()
            head.model.score([head.slot], star)
            taken[repetition, i] = time() - begin
    return measured_passes({TARGET: target}, repetitions) | {HEAD: taken.min(0).tolist(), START: [float(first.min())]}


class HeadCosts(StepCosts):
    """See `StepCosts`. passes: of `head_passes`.

    Example:
        >>> costs = HeadCosts({"target": [1.0] * 13, "head": [0.25] * 13, "start": [0.1]})
        >>> costs.step("chain", [1, 1, 1], 2)
        1.6
    """

    def __init__(self, passes: Mapping[str, Sequence[float]], free_rows: bool = False) -> None:
        super().__init__({name: seconds for name, seconds in passes.items() if name != START}, free_rows)
        (self._start,) = passes[START]

    def step(self, kind: str, nodes: Sequence[float], depth: int) -> float:
        """Of a step. nodes: distinct ones by depth, root first."""
        return self._start + self.seconds(HEAD, kind, nodes, depth)
