"""A target that says a given text: how well a drafter predicts that text, whatever a model would have written."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from polydraft.core import Needs, Outcome, Scores, Target, TokenTree

CERTAIN = 40.0


class ScriptedTarget(Target):
    """`core.Target` with one slot, whose distribution is certain of the next token of `text` on the text, and uniform elsewhere.

    It has nothing to say about nodes off the text, so drafters that learn from those learn nothing of them.

    Example:
        >>> target = ScriptedTarget(vocab_size=9)
        >>> target.text = [1, 2, 3]
        >>> scores = target.prefill([0], [[1]])
        >>> target.score([0], TokenTree.chain(np.array([[2, 3]]))).logits.argmax(-1).tolist()
        [[3, 0]]
    """

    max_num_seqs = 1

    def __init__(self, vocab_size: int, max_model_len: int = 1 << 20) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.text: Sequence[int] = ()
        self._lengths = [0]

    @property
    def lengths(self) -> Any:
        return self._lengths

    @property
    def offers(self) -> Needs:
        return Needs(logits=True, every_step=True)

    def prefill(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> Scores:
        self._lengths[0] += len(token_ids[0])
        root = TokenTree.roots(np.array([token_ids[0][-1]]))
        return Scores(root, np.zeros((1, 1, self.vocab_size), np.float32))

    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        since: int = 0,
    ) -> Scores:
        """One row for each node."""
        rows = np.zeros((1, tree.num_nodes, self.vocab_size), np.float32)
        first = self._lengths[0] + 1
        depth = [0] + [-1] * (tree.num_nodes - 1)  # of the nodes on the text
        parents = tree.parents[0].tolist()
        tokens = tree.tokens[0].tolist()
        for n in range(tree.num_nodes):
            at = first + depth[parents[n]] if n else first - 1
            if n == 0 or (parents[n] >= 0 and depth[parents[n]] >= 0 and self._says(at) == tokens[n]):
                depth[n] = at + 1 - first
                if (following := self._says(at + 1)) >= 0:
                    rows[0, n, following] = CERTAIN
        return Scores(tree, rows[:, since:])

    def _says(self, at: int) -> int:
        return self.text[at] if at < len(self.text) else -1

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        self._lengths[0] += 1 + int(outcome.num_accepted[0])

    def cut(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def copy(self, source: int, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def release(self, slots: Sequence[int]) -> None:
        self._lengths[0] = 0
