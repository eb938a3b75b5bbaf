"""Heads that foretell several depths from one state, whatever is drafted on the way: their drafts are draws of distributions by depth.

The state is the one that the root was drawn from. Tokens of different depths are independent, and each is drawn from the very row that is
reported, so every verifier for independent draws is exact. A tree is at most as deep as there are distributions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from polydraft.core import Budget, Draft, Offers, Outcome, Proposing, Scores
from polydraft.heads.drafter import HeadDrafter, HeadState
from polydraft.models.growing.proposals import LONGEST_PENDING

__all__ = ["CachingDrafter", "DepthDrafter"]


class DepthDrafter(HeadDrafter):
    """A head whose model is a `heads.depth_compiled.DepthDistributions`. A state's `states` are the one before the root, [1, F], or none."""

    def held(self, state: Any) -> int:
        """All tokens but the last two; see `core.Offers`."""
        return max(len(state.context) - 2, 0)

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """The state before the last token, once it is among them."""
        joined = self._joined(scores)
        last = [min(len(s.context) - 2 - start, joined.shape[1] - 1) for s in states]
        return [replace(s, states=joined[b, last[b], None]) for b, s in enumerate(states)]

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        foretells = self.spares and isinstance(self.model, Proposing)
        return replace(super().offers, read=self.read, held=self.held, foretells=foretells)

    def room(self, num_tokens: int) -> int:
        """As many depths as are foretold, behind a token whose state is known; see `core.Offers`."""
        return min(super().room(num_tokens), self.model.depths) if num_tokens > 1 else 0

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        if drafting := [s for s, g in zip(states, budgets, strict=True) if g.max_depth and len(s.states)]:
            self.model.know([s.slot for s in drafting], torch.cat([s.states for s in drafting]))
        return super().propose([replace(s, pending=s.context[-1:]) for s in states], budgets)

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """The state that the extra token was drawn from is the next one."""
        joined = self._joined(scores)
        paths, _ = outcome.lists
        new = list[HeadState]()
        for b, (s, emitted) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            self._proposed.pop(s.slot, None)
            last = paths[b][-1] if paths[b] else 0
            new.append(replace(s, context=s.context + tuple(emitted), states=joined[b, last, None]))
        return new


class CachingDrafter(DepthDrafter):
    """One whose model caches what the target's states of all committed tokens but the last became, by `inject`, and reads `roots`.

    What was emitted during a pause is `pending` in a state, with the target's states before each token, and is cached in pieces where it is long.
    """

    def held(self, state: Any) -> int:
        """None: its columns are of this text alone."""
        return 0

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """Columns of all tokens but the last."""
        joined = self._joined(scores)
        for b, s in enumerate(states):
            known_states = joined[b, : len(s.context) - 1 - start]
            self.model.inject(
                s.slot, start, known_states, s.context[start + 1 : start + 1 + len(known_states)]
            )
        return super().read(states, scores, start)

    def catch_up(self, state: Any, count: int) -> Any:
        """See `core.Offers`; of as many as are pending, the state before the root is left."""
        begin = len(state.context) - 1 - len(state.pending)
        self.model.inject(state.slot, begin, state.states[:count], state.pending[:count])
        return replace(
            state, pending=state.pending[count:], states=state.states[min(count, len(state.pending) - 1) :]
        )

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """Columns of what was the root and of what was accepted, unless that is more than a draft should wait for."""
        joined = self._joined(scores)
        paths, _ = outcome.lists
        new = list[HeadState]()
        for b, (s, emitted) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            self._proposed.pop(s.slot, None)
            accepted = self._accepted(joined[b], paths[b])
            unread = torch.cat([s.states, accepted]) if s.pending else accepted
            state = replace(
                s, context=s.context + tuple(emitted), pending=s.pending + tuple(emitted), states=unread
            )
            new.append(
                state if len(state.pending) > LONGEST_PENDING else self.catch_up(state, len(state.pending))
            )
        return new

    def prepared(self, states: Sequence[Any]) -> list[Any]:
        """States with nothing pending, whose roots the model knows."""
        self.model.roots[[s.slot for s in states]] = [s.context[-1] for s in states]
        return [self.catch_up(s, len(s.pending)) if s.pending else s for s in states]

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        return super().propose(self.prepared(states), budgets)
