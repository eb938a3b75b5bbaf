"""`polydraft limits`: how much every rule keeps on real text, against what any rule could keep.

nodes    one context, n drafts: acceptance of each rule and the optimum for each law of the draws
paths    K paths of L tokens: expected tokens per call
relaxed  one draft: how far the output of each rule that is not lossless is from the target's law

Contexts are places in texts that neither model was trained on. Every number is a function of models, texts and seed.
"""

from collections.abc import Callable

from polydraft.bench.limits.contexts import Findings, Places
from polydraft.bench.limits.nodes import Nodes
from polydraft.bench.limits.paths import Paths
from polydraft.bench.limits.relaxed import Relaxed

__all__ = ["Limits"]


class Limits(Places):
    """Two models and some texts, ready to be measured."""

    @property
    def steps(self) -> int:
        """Calls of `progress` that `run` makes."""
        return self.settings.contexts + 2 * self.settings.node_contexts

    def run(self, progress: Callable[[], object] = lambda: None) -> Findings:
        """Measure it all."""
        found = Findings(self.settings)
        Nodes(self, found).run(progress)
        Relaxed(self, found).run(progress)
        Paths(self, found).run(progress)
        return found
