"""Laws by depth: a head that says once what each of the next tokens may be, whatever comes before it in the draft.

All nodes of a depth have one row, so a draft of these laws is a product of them. Whoever makes the rows puts them where proposals find them.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from polydraft.models.compiled.forward import CHUNK, Sizes
from polydraft.models.compiled.heads import HEADS, CompiledHead, run_rows
from polydraft.models.slots import TREE_ROOM

__all__ = ["ByDepth", "CompiledByDepth"]


class Lengths(NamedTuple):
    """lengths: [slots] committed tokens."""

    lengths: np.ndarray


class Described(NamedTuple):
    """What the rows of a pass are, see `forward.Workspace`."""

    rows: np.ndarray
    seen: np.ndarray


class ByDepth(NamedTuple):
    """laws: [slots, K, D] logits of the tokens at depths 1 .. K."""

    sizes: Sizes
    memory: Lengths
    work: Described
    laws: np.ndarray


@overload(run_rows)
def _(model, rows, logits, done):
    if getattr(model, "instance_class", None) is not ByDepth:
        return None

    def run(model, rows, logits, done):
        for t in range(rows):
            slot, position, base, wanted = model.work.rows[t, 1], model.work.rows[t, 2], model.work.rows[t, 4], model.work.rows[t, 6]
            if wanted:
                logits[done] = model.laws[slot, position - base]
                done += 1
        return done

    return run


HEADS.add(ByDepth)


class CompiledByDepth(CompiledHead):
    """A head with laws by depth as a draft model; those who have one put them into `arrays.laws` before a proposal.

    depth: K, the longest draft.
    """

    def open_laws(self, depth: int, outputs: int, lengths: np.ndarray) -> None:
        """Room for the laws of every slot. lengths: [slots] committed tokens."""
        sizes = Sizes(0, 0, 0, 0, outputs, np.float32(0))
        described = Described(np.zeros((CHUNK, 7), np.int64), np.zeros((CHUNK, TREE_ROOM), np.int64))
        self.depth, laws = depth, np.zeros((len(lengths), depth, outputs), np.float32)
        self.arrays: Any = ByDepth(sizes, Lengths(lengths), described, laws)
