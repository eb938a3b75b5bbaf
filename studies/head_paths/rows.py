"""Rows of a head of the target behind one context: it reads the target's states of it, and then drafts as a draft model does."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polydraft.core import Request, SamplingParams, TokenTree
from polydraft.heads.depth_drafter import CachingDrafter, DepthDrafter
from polydraft.models.slots import TREE_ROOM
from studies.several_drafts.rows import Prefix, RowStore

__all__ = ["HeadRows"]

STATES_SLOT = 2
"""Of the target, in which it reads contexts for their states."""


class HeadRows(RowStore):
    """See `RowStore`. drafter: the head as the engine has it.  target: whose states it reads."""

    def __init__(self, drafter: Any, target: Any, vocab_size: int) -> None:
        super().__init__(drafter.model, vocab_size)
        self.drafter, self.target = drafter, target
        self.state: Any = None

    @property
    def foretells(self) -> bool:
        """Whether one pass of the head gives the rows of all depths."""
        return isinstance(self.drafter, DepthDrafter)

    def open(self, context: Sequence[int]) -> None:
        """Begin with another context."""
        if self.state is not None:
            self.drafter.release([self.state])
        (self.state,) = self.drafter.start([Request("context", tuple(context), SamplingParams(temperature=1.0), 0)])
        self.target.release([STATES_SLOT])
        scores = self.target.prefill([STATES_SLOT], [context[:-1]], hidden=self.drafter.needs.hidden)
        (self.state,) = self.drafter.read([self.state], scores)
        self.slot, self._logits = self.state.slot, {}
        if self.foretells:
            self.know()
        elif len(self.state.pending) > 1:
            self.model.give(self.slot, self.state.states)
            self.model.prefill([self.slot], [self.state.pending[:-1]])
        self._clear(context[-1])

    def fill(self, prefixes: Iterable[Prefix]) -> None:
        """See `RowStore.fill`. A head that reads its own output behind a token is asked for one depth after the other, prefixes that begin alike together."""
        if self.foretells:
            super().fill(prefixes)
            return
        missing = sorted(prefix for prefix in {*prefixes} if prefix not in self._logits)
        while missing:
            nodes: set[Prefix] = {()}
            while missing and len(more := nodes | {missing[-1][:d] for d in range(len(missing[-1]) + 1)}) < TREE_ROOM:
                nodes = more
                missing.pop()
            self._clear(self._tokens[0])
            self._nodes[()] = 0
            for depth in range(1 + max(map(len, nodes))):
                self._score(sorted(prefix for prefix in nodes if len(prefix) == depth))

    def _score(self, prefixes: Sequence[Prefix]) -> None:
        """Rows behind the nodes of one depth, all others above which are there."""
        places = [self._add(prefix) for prefix in prefixes]
        tree = TokenTree.of(np.array([self._tokens]), np.array([self._parents]))
        logits = self.model.score([self.slot], tree, since=places[0]).logits[0, :, : self.vocab_size]
        for prefix, row in zip(prefixes, logits, strict=True):
            self._logits.setdefault(prefix, row.clone())

    def know(self) -> None:
        """The pass of a head that foretells all depths."""
        if isinstance(self.drafter, CachingDrafter):
            (self.state,) = self.drafter.prepared([self.state])
        self.model.know([self.slot], self.state.states)

    def _clear(self, root: int) -> None:
        super()._clear(root)
        if not self.foretells:
            self.model.give(self.slot, self.state.states[-1:])  # of the root, which is read with every tree that begins anew
