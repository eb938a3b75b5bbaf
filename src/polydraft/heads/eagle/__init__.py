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

import torch

from polydraft.core import Budget, Draft, Offers, Outcome, Request, Scores
from polydraft.drafters.model.paths import ModelState
from polydraft.heads.drafter import HeadDrafter, HeadState, head_methods
from polydraft.heads.eagle.network import EagleCheckpoint
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
        return replace(super().offers, read=self.read, held=self.held)

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Take slots, those that have cached most of the texts; they are read when their states are known."""
        states = list[HeadState]()
        none = torch.empty(0, 0)
        with given_back_on_error():
            for request in requests:
                pairs = _pairs(request.prompt_token_ids)
                slot = self.slots.take(pairs[:-1])
                self.slots.holds(slot, pairs)
                states.append(HeadState(request, slot, request.prompt_token_ids, (), none))
        return states

    def release(self, states: Sequence[Any]) -> None:
        """Give the slots back; what was read with the target's states stays cached."""
        self._rewind(states)
        for s in states:
            self._proposed.pop(s.slot, None)
            self.slots.give_back(s.slot, _pairs(s.context)[: self.held(s)])

    def held(self, state: Any) -> int:
        """As many as its slot has cached: see `core.Offers`."""
        return int(self.model.lengths[state.slot])

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """The states of all tokens but the last: those before all tokens but the first. Many are read into the cache at once."""
        joined = self._joined(scores)
        new = list[HeadState]()
        for b, s in enumerate(states):
            if self.model.lengths[s.slot] > start:
                self.model.cut(s.slot, start)
            behind = start - int(self.model.lengths[s.slot])  # as many are pending from before
            end = min(start + 1 + joined.shape[1], len(s.context))
            ids = s.pending[:behind] + s.context[start + 1 : end]
            known_states = joined[b, : end - start - 1]
            known_states = torch.cat([s.states[:behind], known_states]) if behind else known_states
            if len(ids) > LONGEST_PENDING:
                self.model.give(s.slot, known_states)
                self.model.prefill([s.slot], [ids[:-1]])
                ids = ids[-1:]
                known_states = known_states[-1:]
            new.append(replace(s, pending=ids, states=known_states))
        return new

    def catch_up(self, state: Any, count: int) -> Any:
        """See `core.Offers`."""
        return replace(super().catch_up(state, count), states=state.states[count:])

    def _cached(self, state: ModelState) -> int:
        return max(len(state.context) - 1 - len(state.pending), 0)

    def _rewind(self, states: Sequence[Any]) -> None:
        super()._rewind(states)
        for s in states:
            self.model.give(s.slot, s.states)

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        return super().propose(
            [s if s.pending else replace(s, pending=s.context[-1:]) for s in states], budgets
        )

    def room(self, num_tokens: int) -> int:
        """None behind a text of one token, which has no state before it; see `core.Offers`."""
        return super().room(num_tokens) if num_tokens > 1 else 0

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """The root of the proposal, which was read with the target's states, stays cached; what was emitted is pending with those of this step."""
        joined = self._joined(scores)
        new = list[HeadState]()
        paths, _ = outcome.lists
        for b, (s, emitted) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            fresh = self._accepted(joined[b], paths[b])
            pending = s.pending
            if self._proposed.pop(s.slot, None) is None:
                fresh = torch.cat([s.states, fresh]) if len(pending) else fresh
            else:
                self.model.commit([s.slot], Outcome.of_paths([()]))
                pending = ()
            new.append(
                replace(s, context=s.context + tuple(emitted), pending=pending + tuple(emitted), states=fresh)
            )
        return new


def _pairs(text: Sequence[int]) -> list[tuple[int, int]]:
    """What the columns of a slot belong to: each token with the one before it."""
    return list(pairwise(text))
