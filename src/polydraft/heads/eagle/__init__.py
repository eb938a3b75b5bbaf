"""EAGLE-3: one layer behind the target drafts from the target's states, and from its own where those are not known yet.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840).
    states     of a low, a middle and a high layer at each committed position but the last, from the forward passes that run anyway
    proposal   the head reads what was committed since the last one, each token with the states before it; behind that it reads its own output

The head is a draft model that reads more than tokens, see `heads.eagle.compiled`: all kinds of `drafters.model.paths` and all verifiers for
them serve unchanged. Trap: what was drafted was read with the head's own states; of a proposal only the root stays in its cache, and what was accepted
is read again with the target's. A tree is fixed before its first draw, or its most probable nodes (as the authors draft): point masses.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from polydraft.core import Offers, Outcome, Request, Scores
from polydraft.drafters.model.paths import ModelState
from polydraft.heads.drafter import HeadCursor, HeadDrafter, head_methods
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.models.growing.proposals import LONGEST_PENDING
from polydraft.models.slot_pool import given_back_on_error

__all__ = ["EagleDrafter"]


class EagleDrafter(HeadDrafter):
    """A head of the target as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> EagleDrafter.methods[0].name
        'eagle'
    """

    methods = head_methods("eagle", "EAGLE-3 head", "2503.01840")
    checkpoint = EagleCheckpoint
    forms = "polydraft.heads.eagle.compiled:CompiledEagle", "polydraft.heads.eagle.network:EagleModel"

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return replace(super().offers, read=self.read)

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Take slots, those that have cached most of the texts; they are read when their states are known."""
        states = list[ModelState]()
        with given_back_on_error():
            for request in requests:
                pairs = _pairs(request.prompt_token_ids)
                slot = self.slots.take(pairs[:-1])
                self.slots.holds(slot, pairs)
                states.append(ModelState(request, HeadCursor(self.model, slot), request.prompt_token_ids))
        return states

    def release(self, states: Sequence[Any]) -> None:
        """Give the slots back; what was read with the target's states stays cached."""
        for s in states:
            self._proposed.pop(s.slot, None)
            self.slots.give_back(s.slot, _pairs(s.context)[: s.cursor.length])

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """The states of all tokens but the last: those before all tokens but the first. Many are read into the cache at once."""
        joined = self._joined(scores)
        for b, s in enumerate(states):
            s.cursor.tell(start, joined[b, : len(s.context) - 1 - start])
            if (num_unread := s.cursor.num_unread(s.context)) >= LONGEST_PENDING:
                s.cursor.read(s.context, num_unread)
        return list(states)

    def _begin(self, states: Sequence[Any]) -> None:
        super()._begin(states)
        for s in states:
            self.model.give(s.slot, s.cursor.pending_states)

    def room(self, num_tokens: int) -> int:
        """None behind a text of one token, which has no state before it; see `core.Offers`."""
        return super().room(num_tokens) if num_tokens > 1 else 0

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """The root of the proposal, which was read with the target's states, stays cached; what was emitted is pending with those of this step."""
        joined = self._joined(scores)
        paths, _ = outcome.lists
        new = list[ModelState]()
        for b, (s, emitted) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            if self._proposed.pop(s.slot, None) is not None:
                self.model.commit([s.slot], Outcome.of_paths([()]))
            s.cursor.tell(s.cursor.known, self._accepted(joined[b], paths[b]))
            new.append(replace(s, context=s.context + tuple(emitted)))
        return new


def _pairs(text: Sequence[int]) -> list[tuple[int, int]]:
    """What the columns of a slot belong to: each token with the one before it."""
    return list(pairwise(text))
