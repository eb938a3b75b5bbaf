"""A target that says a given text: how well a drafter predicts that text, whatever a model would have written."""

from collections.abc import Sequence
from typing import Any

import torch

from polydraft.core import AuxRows, Outcome, Scores, TokenTree

__all__ = ["ReplayTarget"]

CERTAIN = 40.0


class ReplayTarget:
    """`core.Target` with one slot, whose law after the prompt is certain of the next token of `text`; uniform behind its end.

    Auxiliary rows are certain too: an idealised target, which knows its text from any position.

    Example:
        >>> target = ReplayTarget(vocab_size=9)
        >>> target.text = [1, 2, 3]
        >>> scores = target.prefill([0], [[1]])
        >>> target.score([0], TokenTree.chain(torch.tensor([[2, 3]]))).logits.argmax(-1).tolist()
        [[3, 0]]
    """

    max_num_seqs = 1

    def __init__(self, vocab_size: int, max_model_len: int = 1 << 20) -> None:
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.text: Sequence[int] = ()
        self.lengths: Any = [0]

    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Scores:
        self.lengths[0] += len(token_ids[0])
        return Scores(TokenTree.roots(torch.tensor([token_ids[0][-1]])), self._rows([-1])[None])

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), aux: AuxRows | None = None, since: int = 0
    ) -> Scores:
        """Each node's row is certain of the token that follows its depth; off the text nothing is asked."""
        depth = [0]
        for parent in tree.parents[0, 1:].tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        extra = None if aux is None else self._rows(aux.positions[0].tolist())[None]
        return Scores(tree, self._rows(depth)[None, since:], aux_logits=extra)

    def _rows(self, offsets: Sequence[int]) -> torch.Tensor:
        rows = torch.zeros(len(offsets), self.vocab_size)
        for row, offset in enumerate(offsets):
            at = self.lengths[0] + 1 + offset
            if at < len(self.text):
                rows[row, self.text[at]] = CERTAIN
        return rows

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        self.lengths[0] += 1 + int(outcome.num_accepted[0])

    def release(self, slots: Sequence[int]) -> None:
        self.lengths[0] = 0
