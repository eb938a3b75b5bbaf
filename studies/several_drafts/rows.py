"""Rows of logits behind one context, each computed once, and the few columns of a vocabulary that verification depends on."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from polydraft.core import TokenTree
from polydraft.models.slot_pool import common_length
from polydraft.models.slots import TREE_ROOM

__all__ = ["KEPT_TOKENS", "RowStore", "joined"]

KEPT_TOKENS = 240
"""Most probable tokens of a row that stay columns of their own."""
SLOT = 1
"""Of the models; slot 0 belongs to the engine that writes the answers."""

Prefix = tuple[int, ...]
"""Drafted tokens behind the context."""


class RowStore:
    """A model's logits after drafted tokens: all trees of a context are parts of one tree, which grows in the KV cache.

    vocab_size: of the pair; further columns are no tokens.  slot: of the model, which is this store's alone.
    """

    def __init__(self, model: Any, vocab_size: int, slot: int = SLOT) -> None:
        self.model, self.vocab_size, self.slot = model, vocab_size, slot
        self._logits: dict[Prefix, torch.Tensor] = {}
        self._committed: Prefix = ()
        self._tokens, self._parents, self._nodes = [0], [-1], dict[Prefix, int]()

    def open(self, context: Sequence[int]) -> None:
        """Begin with another context; what it shares with the one before stays in the KV cache."""
        shared = common_length(self._committed, context[:-2])
        self.model.cut(self.slot, shared)
        self.model.prefill([self.slot], [context[shared:-1]])
        self._committed = tuple(context[:-1])
        self._logits = {}
        self._clear(context[-1])

    def _clear(self, root: int) -> None:
        self._tokens, self._parents, self._nodes = [root], [-1], {}

    def fill(self, prefixes: Iterable[Prefix]) -> None:
        """Compute the rows after these prefixes that are not there yet, in as few forward passes as fit."""
        missing = sorted({p for p in prefixes if p not in self._logits}, key=len)
        while missing:
            begin = len(self._tokens) if self._nodes else 0
            if not self._nodes:
                self._nodes[()] = 0
            if len(self._tokens) + sum(map(len, missing[:1])) >= TREE_ROOM:  # the tree begins anew
                self._clear(self._tokens[0])
                continue
            part = list[Prefix]()
            while missing and len(self._tokens) + len(missing[0]) < TREE_ROOM:
                part.append(missing.pop(0))
                self._add(part[-1])
            tree = TokenTree.of(np.array([self._tokens]), np.array([self._parents]))
            if begin < len(self._tokens):
                logits = self.model.score([self.slot], tree, since=begin).logits[0, :, : self.vocab_size]
                by_node = {node: prefix for prefix, node in self._nodes.items()}
                for i in range(len(logits)):
                    self._logits.setdefault(by_node[begin + i], logits[i].clone())

    def _add(self, prefix: Prefix) -> int:
        """Its node, with all that it hangs on."""
        if prefix not in self._nodes:
            parent = self._add(prefix[:-1])
            self._nodes[prefix] = len(self._tokens)
            self._tokens.append(prefix[-1])
            self._parents.append(parent)
        return self._nodes[prefix]

    def probs(self, prefix: Prefix, temperature: float) -> Float[np.ndarray, " V"]:
        """The distribution after a prefix that was filled."""
        return (self._logits[prefix] / temperature).softmax(-1).numpy()


def joined(
    rows: Sequence[Float[np.ndarray, " V"]], tokens: Iterable[int], kept: int = KEPT_TOKENS
) -> tuple[Float[np.ndarray, "R W"], dict[int, int], float]:
    """Rows over fewer columns: the most probable tokens and `tokens` stay, those between two of them, by id, become one column.

    Verification looks at probabilities of drafted tokens and at sums over the others; a sum of minima changes by the third value at most, that of the
    first two rows. The order of ids is kept, which systematic draws depend on. The second value is the column of each of `tokens`.

    Example:
        >>> p, q = np.array([0.5, 0.1, 0.1, 0.3]), np.array([0.6, 0.2, 0.0, 0.2])
        >>> joined([p, q], [3], kept=1)[:2]
        (array([[0.5, 0.2, 0.3],
               [0.6, 0.2, 0.2]]), {3: 2})
    """
    largest = np.maximum.reduce(list(rows))
    top = np.argpartition(largest, -kept)[-kept:] if kept < len(largest) else np.arange(len(largest))
    drafted = np.array(sorted(set(tokens)), np.int64)
    stay = np.union1d(top, drafted)
    starts = np.unique(np.concatenate([[0], stay, stay + 1]))
    starts = starts[starts < len(largest)]
    few = np.stack([np.add.reduceat(row.astype(np.float64), starts) for row in rows])
    moved = np.minimum(few[0], few[1]).sum() - np.minimum(rows[0], rows[1]).sum(dtype=np.float64)
    return few, dict(zip(drafted.tolist(), np.searchsorted(starts, drafted).tolist(), strict=True)), max(float(moved), 0.0)
