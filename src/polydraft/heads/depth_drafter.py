"""Heads that foretell several depths from one state, whatever is drafted on the way: their drafts are draws of distributions by depth.

The state is the one that the root was drawn from. Tokens of different depths are independent, and each is drawn from the very row that is
reported, so every verifier for independent draws is exact. A tree is at most as deep as there are distributions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Draft, Drawing, Offers, Outcome, Proposing, Request, Scores
from polydraft.drafters.model.paths import Filled, ModelState
from polydraft.heads.drafter import HeadDrafter
from polydraft.models.growing.proposals import LONGEST_PENDING
from polydraft.models.slot_pool import given_back_on_error


class DepthCursor(Filled):
    """One that needs the state before the root alone. states: that one, [1, F], or none."""

    model: Any

    def __init__(self, model: Any, slot: int, text: Sequence[int]) -> None:
        super().__init__(model, slot)
        self._length = max(len(text) - 2, 0)
        self.states = np.empty((0, 0), np.float32)

    @property
    def length(self) -> int:
        """Tokens whose states are not needed."""
        return self._length

    def num_unread(self, text: Sequence[int]) -> int:
        """None."""
        return 0


class CachingCursor(DepthCursor):
    """One whose model caches what the target's states of all tokens but the last become. states: of those that are not read, or of the last."""

    def __init__(self, model: Any, slot: int, text: Sequence[int]) -> None:
        super().__init__(model, slot, text)
        self._length = 0

    def num_unread(self, text: Sequence[int]) -> int:
        """See `Cursor.num_unread`."""
        return len(text) - 1 - self._length

    def inject(self, text: Sequence[int], start: int, states: Float[np.ndarray, "T F"]) -> None:
        """Cache the states of the tokens from `start` on."""
        end = start + len(states)
        self.model.inject(self.slot, start, states, text[start + 1 : end + 1])
        self._length = end

    def read(self, text: Sequence[int], count: int, hidden: Sequence[int] = ()) -> Any:
        """Of as many as there are, the state before the root is left."""
        self.inject(text, self._length, self.states[:count])
        self.states = self.states[min(count, len(self.states) - 1) :]


class DepthDrafter(HeadDrafter):
    """A head whose model is a `heads.foretold.DepthDistributions`."""

    cursor_class: ClassVar[type[DepthCursor]] = DepthCursor

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Take slots; the prompts are read when their states are known."""
        with given_back_on_error():
            return [self._started(r, self.slots.take()) for r in requests]

    def release(self, states: Sequence[ModelState]) -> None:
        """Give the slots back; what they hold is of these texts alone."""
        for s in states:
            self._proposed.pop(s.slot, None)
            self.slots.give_back(s.slot)

    def _started(self, request: Request, slot: int) -> ModelState:
        ids = request.prompt_token_ids
        return ModelState(request, self.cursor_class(self.model, slot, ids), ids)

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """The state before the last token, once it is among them."""
        joined = self._joined(scores)
        last = [min(len(s.context) - 2 - start, joined.shape[1] - 1) for s in states]
        for b, s in enumerate(states):
            s.cursor.states = joined[b, last[b], None]
        return list(states)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return replace(super().offers, read=self.read)

    @property
    def draws(self) -> Drawing:
        """See `core.Offers`."""
        draws = super().draws
        return draws._replace(foretells=draws.branches and isinstance(self.model, Proposing))

    def room(self, num_tokens: int) -> int:
        """As many depths as are foretold, behind a token whose state is known; see `core.Drawing`."""
        return min(super().room(num_tokens), self.model.depths) if num_tokens > 1 else 0

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        if drafting := [
            s for s, g in zip(states, budgets, strict=True) if g.max_depth and len(s.cursor.states)
        ]:
            self.model.know([s.slot for s in drafting], np.concatenate([s.cursor.states for s in drafting]))
        return super().propose(states, budgets)

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """The state that the extra token was drawn from is the next one."""
        joined = self._joined(scores)
        paths, _ = outcome.lists
        new = list[ModelState]()
        for b, (s, emitted) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            self._proposed.pop(s.slot, None)
            self._keep(s, joined[b], paths[b])
            new.append(replace(s, context=s.context + tuple(emitted)))
        return new

    def _keep(self, state: Any, joined: Float[np.ndarray, "N F"], path: Sequence[int]) -> None:
        """What the next draft reads of a step's states. joined: of its nodes.  path: those that were accepted."""
        state.cursor.states = joined[path[-1] if path else 0, None]


class CachingDrafter(DepthDrafter):
    """One whose model caches what the target's states of all committed tokens but the last became, by `inject`, and reads `roots`.

    What was emitted during a pause is cached in pieces where it is long.
    """

    cursor_class = CachingCursor

    def read(self, states: Sequence[Any], scores: Scores, start: int = 0) -> list[Any]:
        """Columns of all tokens but the last."""
        joined = self._joined(scores)
        for b, s in enumerate(states):
            known_states = joined[b, : len(s.context) - 1 - start]
            s.cursor.inject(s.context, start, known_states)
        return super().read(states, scores, start)

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """Columns of what was the root and of what was accepted, unless that is more than a draft should wait for."""
        new = super().observe(states, outcome, scores)
        for s in new:
            if s.cursor.num_unread(s.context) <= LONGEST_PENDING:
                _catch_up(s)
        return new

    def _keep(self, state: Any, joined: Float[np.ndarray, "N F"], path: Sequence[int]) -> None:
        """See `DepthDrafter._keep`; behind what is not read yet."""
        accepted = self._accepted(joined, path)
        cursor = state.cursor
        if cursor.num_unread(state.context):
            accepted = np.concatenate([cursor.states, accepted])
        cursor.states = accepted

    def prepared(self, states: Sequence[Any]) -> list[Any]:
        """States with nothing pending, whose roots the model knows."""
        self.model.roots[[s.slot for s in states]] = [s.context[-1] for s in states]
        for s in states:
            _catch_up(s)
        return list(states)

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        return super().propose(self.prepared(states), budgets)


def _catch_up(state: ModelState) -> None:
    if num_unread := state.cursor.num_unread(state.context):
        state.cursor.read(state.context, num_unread)
