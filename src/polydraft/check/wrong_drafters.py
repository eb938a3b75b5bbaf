"""Drafters with known mistakes, for `check.mutants`: what they report is not how they drew; and a draft model that gives every verifier work."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.core import Budget, Draft, Outcome, Scores, Target, TokenTree
from polydraft.drafters.model.paths import ModelDrafter, ModelState
from polydraft.sampling.softmax import top

FEW = 5
"""Tokens that the distributions of a self-test are cut to: mistakes show where draws repeat."""


class Reversed:
    """A draft model whose few most probable tokens swap their places: wrong enough for every verifier to have work.

    A pair that agrees hides mistakes: where p = q there is nothing to reject.
    """

    def __init__(self, inner: Target) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(self, *given: Any, **options: Any) -> Scores:
        scores = self._inner.score(*given, **options)
        rows = scores.logits.reshape(-1, scores.logits.shape[-1])
        values, ids = top(rows, FEW)
        swapped = np.full_like(rows, -np.inf)
        np.put_along_axis(swapped, ids, values[:, ::-1], -1)
        return replace(scores, logits=swapped.reshape(scores.logits.shape))


class TopWithRow(ModelDrafter):
    """The most probable children, passed off as draws from the row."""

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        draft = super().propose(states, budgets)
        tokens = draft.tree.tokens.copy()
        for b in range(len(tokens)):
            heads = [n for n in range(1, tokens.shape[1]) if draft.tree.parents[b, n] == 0]
            if heads and draft.probs is not None:
                _, best = top(draft.probs[b, draft.rows[b, heads[0]], None], len(heads))
                tokens[b, heads] = best[0]
        return replace(draft, tree=replace(draft.tree, tokens=tokens))


class DropsUnlikely(ModelDrafter):
    """Draws a token and drops it where the draft finds it unlikely."""

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        draft = super().propose(states, budgets)
        if draft.tree.num_nodes == 1 or draft.probs is None:
            return draft
        x = draft.tree.tokens[:, 1]
        row = np.maximum(draft.rows[:, 1], 0)
        q = draft.probs[np.arange(len(x)), row, x]
        drop = (q < 0.25) | (draft.tree.parents[:, 1] < 0)
        tokens = draft.tree.tokens.copy()
        parents = draft.tree.parents.copy()
        rows = draft.rows.copy()
        tokens[drop, 1] = 0
        parents[drop, 1] = -1
        rows[drop, 1] = -1
        return replace(draft, tree=TokenTree(tokens, parents), rows=rows)


class OwnPositions(ModelDrafter):
    """Chains whose noise is keyed by each token's own position: a position drafted again meets the same noise.

    Tokens are drawn one depth at a time from steps that begin at each token's position.
    """

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        draft = super().propose(states, [g.within(1) for g in budgets])
        deeper = [replace(s, context=(*s.context, int(draft.tree.tokens[b, 1])))
                  if draft.tree.num_nodes > 1 and draft.tree.parents[b, 1] == 0 else s for b, s in enumerate(states)]  # fmt: skip
        live = [
            b
            for b, (s, d) in enumerate(zip(states, deeper, strict=True))
            if d is not s and budgets[b].max_depth > 1
        ]
        if not live or draft.probs is None:
            return draft
        rest = self.propose(
            [deeper[b] for b in live], [budgets[b].within(budgets[b].max_depth - 1) for b in live]
        )
        return self._joined(draft, rest, live)

    def _joined(self, head: Draft, rest: Draft, live: list[int]) -> Draft:
        """The head's token, then the rest of the chain, in the rows that go on."""
        assert head.probs is not None and rest.probs is not None
        B = len(head.tree.tokens)
        depth = rest.tree.num_nodes
        V = head.probs.shape[-1]
        tokens = np.zeros((B, depth + 1), np.int64)
        parents = np.full((B, depth + 1), -1)
        rows = np.full((B, depth + 1), -1)
        probs = np.full((B, depth, V), 1 / V, head.probs.dtype)
        tokens[:, :2] = head.tree.tokens
        parents[:, :2] = head.tree.parents
        rows[:, :2] = np.minimum(head.rows, 0)
        probs[:, 0] = head.probs[:, 0]
        tokens[live, 2:] = rest.tree.tokens[:, 1:]
        rows[live, 2:] = np.where(rest.rows >= 0, rest.rows + 1, -1)[:, 1:]
        parents[live, 2:] = np.where(rest.tree.parents >= 0, rest.tree.parents + 1, -1)[:, 1:]
        probs[live, 1 : 1 + rest.probs.shape[1]] = rest.probs
        return replace(head, tree=TokenTree(tokens, parents), rows=rows, probs=probs, confidence=None)

    def observe(self, states: Sequence[ModelState], outcome: Outcome, scores: Any) -> list[ModelState]:
        """The cache is read again from the committed tokens: a chain made of many steps cannot stay."""
        new: list[ModelState] = []
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            s.cursor.cut(len(s.context) - 1)
            new.append(replace(s, context=s.context + tuple(emitted)))
        return new
