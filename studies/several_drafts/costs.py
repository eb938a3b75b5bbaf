"""Seconds of forward passes by rows, and of a step of any shape: what tokens per step are weighed against."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polydraft.core import TokenTree
from polydraft.numerics.clock import clock
from studies.several_drafts.measure import LOOKUP
from studies.several_drafts.rows import SLOT

__all__ = ["NUM_ROWS", "TARGET", "StepCosts", "measured_passes"]

NUM_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
TARGET = "target"
CONTEXT = 192
"""Cached tokens."""


def measured_passes(models: Mapping[str, Any], repetitions: int = 9) -> dict[str, list[float]]:
    """The processor's seconds of a forward pass of as many rows as `NUM_ROWS`, by model: the fastest of some, all measured by turns.

    The fastest, as on a machine that others use, too, every further one says more about them.
    """
    taken = {name: np.full((repetitions, len(NUM_ROWS)), np.inf) for name in models}
    for model in models.values():
        model.release([SLOT])
        model.prefill([SLOT], [list(range(100, 100 + CONTEXT))])
    for repetition in range(repetitions):
        for i, rows in enumerate(NUM_ROWS):
            tree = TokenTree.chain(torch.arange(100, 100 + rows)[None])
            for name, model in models.items():
                time = clock(model)
                begin = time()
                model.score([SLOT], tree)
                taken[name][repetition, i] = time() - begin
    for model in models.values():
        model.release([SLOT])
    return {name: seconds.min(0).tolist() for name, seconds in taken.items()}


class StepCosts:
    """Seconds of a step: a draft pass for each depth, then the target's pass. passes: as `measured_passes` returns them.  free_rows: as if a pass of
    many rows took no longer than one of a single row, as on a GPU at small batches.

    Example:
        >>> costs = StepCosts({"target": [1.0] * 13, "small": [0.25] * 13})
        >>> costs.seconds("small", "chain", [1, 1, 1], 2), costs.plain
        (1.5, 1.0)
    """

    def __init__(self, passes: Mapping[str, Sequence[float]], free_rows: bool = False) -> None:
        self._passes = {name: np.maximum.accumulate(seconds) for name, seconds in passes.items()}
        self.free_rows = free_rows
        self.plain = self._pass(TARGET, 1)

    def _pass(self, model: str, rows: float) -> float:
        """Beyond the last number of rows that was measured, every row costs what those before it did."""
        seconds, most = self._passes[model], NUM_ROWS[-1]
        a_row = (seconds[-1] - seconds[-4]) / (most - NUM_ROWS[-4])
        rows = 1.0 if self.free_rows else rows
        return float(np.interp(rows, NUM_ROWS, seconds) + a_row * max(rows - most, 0.0))

    def seconds(self, draft: str, kind: str, nodes: Sequence[float], depth: int) -> float:
        """Of a step. draft: models' names, joined by plus signs.  nodes: distinct ones by depth, root first."""
        alone = "spare" in kind or kind == "independent"  # each model drafts a chain
        models = [name for name in draft.split(" + ") if name != LOOKUP]
        drafting = sum(self._pass(name, 1 if alone else rows) for name in models for rows in nodes[:depth])
        return drafting + self._pass(TARGET, sum(nodes[: depth + 1]))
