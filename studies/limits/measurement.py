"""`python -m studies.limits`: how much every rule keeps on real text, against what any rule could keep.

nodes    one context, n drafts: acceptance of each rule and the optimum for each distribution of the draws
paths    K paths of L tokens: expected tokens per step
trees    paths and branching trees of equal size

Contexts are places in texts that neither model was trained on. Every number is a function of models, texts and seed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from studies.limits.branching import branching
from studies.limits.contexts import LimitSettings, Pair
from studies.limits.nodes import nodes
from studies.limits.paths import Paths


@dataclass(frozen=True)
class LimitFindings:
    """Rows of plain data. nodes: one for each rule, number of drafts and temperature; paths: for each rule, K and L; trees: for each rule and draft tree."""

    settings: LimitSettings
    mean_overlap: float
    nodes: list[dict[str, Any]]
    paths: list[dict[str, Any]]
    trees: list[dict[str, Any]]


class Limits(Pair):
    """Two models and some texts, ready to be measured. paths: what the last run kept of each context."""

    paths: Paths

    @property
    def steps(self) -> int:
        """Calls of `progress` that `run` makes."""
        trees = self.settings.tree_contexts if self.draft is not None and self.settings.node_contexts else 0
        return self.settings.contexts + self.settings.node_contexts + trees

    def run(self, progress: Callable[[], object] = lambda: None) -> LimitFindings:
        """Measure it all."""
        at_nodes = nodes(self, progress)
        self.paths = Paths(self)
        self.paths.run(progress)
        on_trees = branching(self, self.paths, progress)
        return LimitFindings(self.settings, self.paths.mean_overlap, at_nodes, self.paths.rows(), on_trees)
