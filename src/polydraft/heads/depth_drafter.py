"""Heads that foretell several depths from one state, whatever is drafted on the way: their drafts are draws of distributions by depth.

The state is the one that the root was drawn from. Tokens of different depths are independent, and each is drawn from the very row that is
reported, so every verifier for independent draws is exact. A tree is at most as deep as there are distributions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from polydraft.core import Budget, Draft, Offers, Outcome, Scores, TokenTree
from polydraft.core.geometry import chain
from polydraft.drafters.model.paths import ModelState, ProposePaths, shape_of
from polydraft.heads.drafter import HeadDrafter, HeadState
from polydraft.heads.one_pass import draw_trees
from polydraft.models.compiled.proposals import LONGEST_PENDING, Keys


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
        return replace(super().offers, read=self.read, held=self.held, foretells=self.spares)

    def _draws_paths(self, budget: Budget) -> bool:
        return bool(budget.parents) and super()._draws_paths(budget)

    def _by_position(self, budget: Budget) -> Budget:
        """A grown budget that ends by itself is drawn as it grows, see `one_pass`."""
        grows = self.spares and not budget.parents and budget.stop is not None
        return budget if grows else super()._by_position(budget)

    def _drawn(
        self,
        states: Sequence[ModelState],
        fixed: list[Budget],
        keys: Keys,
        propose_paths: ProposePaths | None,
    ) -> tuple[Draft, TokenTree]:
        """Trees that grow, and chains that end by themselves, from what the head foretold; where the form of an output is given chains alone."""
        if propose_paths is None:
            fixed = [g if g.parents else Budget.fixed(chain(g.chain_length)).ending(g.stop) for g in fixed]
        elif self.spares and all(g.width == 1 or not g.parents for g in fixed) and any(g.stop for g in fixed):
            slots = [s.slot for s in states]
            params = [s.request.params for s in states]
            roots = [s.context[-1] for s in states]
            drawn = draw_trees(self.model, slots, roots, keys, fixed, params)
            sampling = self._sampling(fixed)
            shape = shape_of(fixed)
            draft = Draft(drawn.tree, sampling, shape, drawn.probs, drawn.rows, confidence=drawn.confidence)
            return draft, drawn.tree
        return super()._drawn(states, fixed, keys, propose_paths)

    def _within(self, state: Any, budget: Budget) -> Budget:
        return super()._within(state, budget).within(self.model.depths if len(state.states) else 0)

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
