"""What compiled heads have in common: forward passes over trees, CHUNK rows at a time, and distributions over a draft vocabulary.

A kind of head is a tuple of arrays with `work`, `memory` and `sizes`; `HEADS` has the compiled function that runs its rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.extending import overload

from polydraft.core import Needs, Scores, TokenTree
from polydraft.models.compiled.forward import describe
from polydraft.models.growing.proposals import CompiledProposals
from polydraft.models.growing.rows import draft_forward
from polydraft.models.mixers.workspace import CHUNK
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compiled_code import njit

HEADS: dict[type, Any] = {}
"""Arrays of a kind -> its `run_rows`."""


def run_rows(model, rows, logits, done) -> int:
    """Run the rows in work; their logits go to logits[done:]. Returns how many logits there are now."""
    raise NotImplementedError


@overload(run_rows)
def _(model, rows, logits, done):
    run = HEADS.get(model.instance_class)
    return run and (lambda model, rows, logits, done: run(model, rows, logits, done))


@njit(cache=True, nogil=True)
def head_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    """One forward pass over nodes first_nodes[b] .. node_ends[b]-1 of every tree, see `forward.compiled_forward`."""
    work = model.work
    lengths = model.memory.lengths
    rows = np.int64(0)
    done = np.int64(0)
    for b in range(len(slots)):
        for n in range(first_nodes[b], node_ends[b]):
            if rows == CHUNK:
                done = run_rows(model, rows, logits, done)
                rows = np.int64(0)
            if n == 0 or parents[b, n] >= 0:
                row = work.rows[rows]
                seen_columns = work.seen_columns[rows]
                slot = slots[b]
                describe(
                    row, seen_columns, tokens[b, n], slot, lengths[slot], parents[b], n, n >= logits_from[b]
                )
                rows += 1
    if rows > 0:
        run_rows(model, rows, logits, done)


@overload(draft_forward)
def _(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    if model.instance_class in HEADS:
        return lambda model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits: (
            head_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits)
        )
    return None


class CompiledHead(CompiledProposals):
    """A head as a draft model with slots; see `core.Target`."""

    def _run(self, slots: Sequence[int], tree: TokenTree, since: int, logits_from: int) -> np.ndarray:
        B, N = tree.tokens.shape
        logits = np.empty((B * (N - logits_from), self.arrays.sizes.outputs), np.float32)
        first_nodes, node_ends, first_logits = (np.full(B, n) for n in (since, N, logits_from))
        with self.pool:
            head_forward(
                self.arrays, np.array(slots), *tree.host, first_nodes, node_ends, first_logits, logits
            )
        self.passes += 1
        return logits

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1; see `core.Target.score`."""
        self.check_tree(tree.num_nodes)
        self.check_slots(slots, [tree.num_nodes] * len(slots), TREE_ROOM)
        if since == 0:
            for slot, root in zip(slots, tree.host.tokens[:, :1].tolist(), strict=True):
                self.reads(slot, root)
        logits = self._run(slots, tree, since, since)
        self.scored(slots, tree.num_nodes)
        scored = tree.nodes_from(since)
        real = scored.host.parents >= 0
        real[:, 0] |= since == 0
        rows = np.zeros((*real.shape, self.vocab_size), np.float32)
        rows[real] = self.wide(logits)[: int(real.sum())]
        return Scores(scored, rows)

    @property
    def offers(self) -> Needs:
        """Nothing beyond its distributions."""
        return Needs()
