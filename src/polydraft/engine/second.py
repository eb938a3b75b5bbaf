"""The second sequences that a decoding method reads: in slots of its own model, or in further slots of the target and its very forward pass."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from polydraft.core import Draft, Outcome, Request, Scores, SecondSequenceDecoding, Target, TokenTree
from polydraft.core.batch import concat
from polydraft.core.cursor import Cursor
from polydraft.core.geometry import Dedup, at_first_copies
from polydraft.engine.sequence import Sequence, slots_of
from polydraft.errors import InvalidInputError
from polydraft.models.slot_pool import Slots


class Second:
    """decoding: names the model and how each second sequence begins.  slots: the target's, of which some are taken where it is that model."""

    def __init__(self, decoding: SecondSequenceDecoding, target: Target, slots: Slots) -> None:
        self.decoding = decoding
        self.target = target
        self.model: Target = target if decoding.second_model is None else decoding.second_model
        self.slots = slots if self.model is target else Slots(self.model)

    @property
    def has_room(self) -> bool:
        """Whether a request that takes one more slot of the target finds one here, too."""
        return self.slots.num_free > (self.model is self.target)

    def begins(self, request: Request) -> tuple[int, ...]:
        """How the decoding method lets the sequence begin.

        Raises:
            InvalidInputError: no tokens, or ids outside the vocabulary.
        """
        ids = tuple(self.decoding.second_prompt(request))
        if not ids or not all(0 <= t < self.model.vocab_size for t in ids):
            raise InvalidInputError(
                f"the decoding method {type(self.decoding).__name__} begins the second sequence of {request.id!r} with {list(ids)[:8]}; "
                f"expected at least one token id, all in [0, {self.model.vocab_size})."
            )
        return ids

    def take(self, s: Sequence) -> None:
        """A slot for the second sequence."""
        s.second = Cursor(self.model, self.slots.take(), len(s.second_ids) - 1)

    def score(
        self, sequences: Seq[Sequence], draft: Draft, unique: Dedup, tree: TokenTree, *, hidden: Seq[int] = ()
    ) -> Scores:
        """The target's scores with the second sequences' beside them; one forward pass where the target runs both.

        tree: what the target scores, the scored tree and perhaps further nodes.
        What the draft's forward passes have scored in the slots of the second sequences is not scored again.
        """
        slots = slots_of(sequences)
        others = _others(sequences)
        B = len(sequences)
        beside = _behind_second_texts(sequences, unique.tree)
        if draft.logits is not None:
            second = Scores(beside, unique.compact(draft.logits))
            return replace(self.target.score(slots, tree, hidden=hidden), second=second)
        if self.model is not self.target:
            return replace(
                self.target.score(slots, tree, hidden=hidden),
                second=self.model.score(others, beside),
            )
        both = self.target.score([*slots, *others], concat([tree, beside]), hidden=hidden)
        N = beside.num_nodes
        second = Scores(beside, both.logits[B:, :N], {layer: x[B:, :N] for layer, x in both.hidden.items()})
        return Scores(
            tree, both.logits[:B], {layer: x[:B] for layer, x in both.hidden.items()}, second=second
        )

    def commit(self, sequences: Seq[Sequence], draft: Draft, unique: Dedup, outcome: Outcome) -> None:
        """Commit the path that the target commits."""
        committed = unique.outcome(outcome) if draft.logits is None else at_first_copies(draft.tree, outcome)
        self.model.commit(_others(sequences), committed)

    def leave(self, s: Sequence) -> None:
        """Give the slot of a sequence back."""
        if s.second is not None:
            slot = s.second.slot
            s.second = None
            self.slots.give_back(slot)


def _others(sequences: Seq[Sequence]) -> list[int]:
    return [s.second.slot for s in sequences if s.second is not None]


def _behind_second_texts(sequences: Seq[Sequence], tree: TokenTree) -> TokenTree:
    """The same drafted tokens behind the last ones of the second sequences."""
    tokens, parents = tree.host
    roots = np.array([s.second_text[-1:] for s in sequences])
    return TokenTree.of(np.concatenate([roots, tokens[:, 1:]], 1), parents)
