"""The most probable tree of a draft model, grown best first: a node is worth the product of the draft's probabilities along its path.

    frontier  the `width` most probable nodes kept of the depth above: one pass of the model gives the laws behind them
    kept      the `max_nodes` most probable candidates of all depths; no node is more probable than its parent, so parents are kept too
    stop      at `max_depth`, or where nothing of a depth is kept: all of it is below `least`, or below the last one kept

The sum of the kept products, which estimates the accepted tokens, is the largest of all trees of so many nodes where `width` does not
bind (Wang et al. 2024, OPT-Tree, arXiv 2406.17276); a bounded frontier and a choice among the candidates of all depths are EAGLE-2's
(Li et al. 2024, arXiv 2406.16858). `theory.tree_plan.grow_by_probability` is the reference.
A tree is a function of the past: its nodes are point masses. Traps: verifying them with the draft's law as if they had been drawn from it
biases the output (total variation .30 in the specification's example), and at temperature 0 the law must not be taken at temperature 0, where it leaves one chain.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft import sampling
from polydraft import tree as trees
from polydraft.core import Budget, Draft, SamplingParams, Scores, SiblingLaw, Target, TokenTree, TreeShape
from polydraft.drafters.model_growth import ModelState
from polydraft.verifiers._rows import compiled

__all__ = ["grow"]

TOKEN, PARENT, ROW = range(3)
"""Rows of the kept nodes' cells: the token, the scored row of the parent, and the own scored row, -1 while there is none."""


@compiled
def _offer(laws, weights, begin, least, values, cells, size):
    """Candidates behind a frontier join the kept nodes, which stay in the order of falling value, the earlier first among equals; returns how many these are.

    laws: [F, V] behind the nodes of path probability `weights`, which are the scored rows from `begin` on.
    values: [max_nodes] path probabilities.  cells: [3, max_nodes].
    """
    for f in range(weights.size):
        for t in range(laws.shape[1]):
            value = weights[f] * laws[f, t]
            if value <= 0.0 or value < least or (size == values.size and value <= values[size - 1]):
                continue
            size = min(size + 1, values.size)
            at = size - 1
            while at > 0 and values[at - 1] < value:
                values[at] = values[at - 1]
                for row in range(3):
                    cells[row, at] = cells[row, at - 1]
                at -= 1
            values[at] = value
            cells[TOKEN, at], cells[PARENT, at], cells[ROW, at] = t, begin + f, -1
    return size


class _Tree:
    """One sequence's tree. tokens, parents: the rows that the draft model has scored, or is to score next."""

    def __init__(self, root: int, budget: Budget) -> None:
        self.budget, self.tokens, self.parents = budget, [root], [-1]
        self.values, self.cells, self.size = np.empty(budget.max_nodes), np.empty((3, budget.max_nodes), np.int64), 0
        self.begin, self.weights = 0, np.ones(1)

    def deepen(self, laws: np.ndarray) -> None:
        """Take the children of the frontier, then choose the next one."""
        self.size = _offer(laws, self.weights, self.begin, self.budget.least, self.values, self.cells, self.size)
        below = np.flatnonzero(self.cells[PARENT, : self.size] >= self.begin)[: self.budget.width]
        self.begin, self.weights = len(self.tokens), self.values[below]
        self.cells[ROW, below] = np.arange(self.begin, self.begin + len(below))
        self.tokens += self.cells[TOKEN, below].tolist()
        self.parents += self.cells[PARENT, below].tolist()

    def fill(self, count: int) -> None:
        """Copies of the last frontier node up to this many: rows of a batch are scored together, and nothing reads a copy."""
        missing = count - len(self.weights)
        self.tokens += self.tokens[-1:] * missing
        self.parents += self.parents[-1:] * missing

    def kept(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the draft, the root first, by falling path probability."""
        node = np.zeros(len(self.tokens) + 1, np.int64)  # the last place takes what was not scored
        node[self.cells[ROW, : self.size]] = np.arange(1, self.size + 1)
        return [self.tokens[0], *self.cells[TOKEN, : self.size].tolist()], [-1, *node[self.cells[PARENT, : self.size]].tolist()]

    def scored(self) -> TokenTree:
        """The scored rows as a tree of inner nodes: each has a child without a token, which tells that its row is in the cache."""
        tokens, parents = [*self.tokens[: self.begin], *[-1] * self.begin], [*self.parents[: self.begin], *range(self.begin)]
        return TokenTree.of(np.array([tokens], np.int64), np.array([parents], np.int64))


def grow(
    model: Target, states: Sequence[ModelState], budgets: Sequence[Budget], stop_ids: Sequence[int] = ()
) -> tuple[Draft, list[TokenTree]]:
    """The draft of a batch, and for each row the tree of the rows that the model's cache now holds behind the committed tokens.

    Slots hold all committed tokens but the root.  stop_ids: what `min_tokens` masks.  One pass a depth for the whole batch.
    """
    grown = [_Tree(s.context[-1], g) for s, g in zip(states, budgets, strict=True)]
    live = [b for b, g in enumerate(budgets) if min(g.max_depth, g.max_nodes) > 0]
    since, depth = 0, 0
    while live:
        widest = max(len(grown[b].weights) for b in live)
        for b in live:
            grown[b].fill(widest)
        tree = TokenTree.of(np.array([grown[b].tokens for b in live]), np.array([grown[b].parents for b in live]))
        scores = model.score([states[b].slot for b in live], tree, since=since)
        laws = _laws(scores, tree, since, [states[b] for b in live], stop_ids)
        since, depth = tree.num_nodes, depth + 1
        for b, rows in zip(live, laws, strict=True):
            grown[b].deepen(rows)
        live = [b for b in live if len(grown[b].weights) and depth < budgets[b].max_depth]
    drafted = trees.pad([g.kept() for g in grown])
    draft = Draft(drafted, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full_like(drafted.parents, -1))
    return draft, [g.scored() for g in grown]


def _laws(
    scores: Scores, tree: TokenTree, since: int, states: Sequence[ModelState], stop_ids: Sequence[int]
) -> Float[np.ndarray, "B F V"]:
    """The laws at the new nodes, processed with each request's parameters; a greedy request's at temperature 1."""
    params = [_warm(s.request.params) for s in states]
    logits, contexts = scores.logits.cpu(), [s.context for s in states]
    if not all(map(sampling.is_plain, params)):  # a path begins at the root: rows for all nodes
        whole: Tensor = torch.zeros(len(states), tree.num_nodes, logits.shape[-1], dtype=logits.dtype)
        whole[:, since:] = logits
        logits = whole
    prompts = [len(s.request.prompt_token_ids) for s in states]
    return sampling.laws(logits, tree, contexts, prompts, params, stop_ids)[:, since - tree.num_nodes :].numpy()


_PLAIN = SamplingParams()


def _warm(params: SamplingParams) -> SamplingParams:
    if not params.greedy:
        return params
    return _PLAIN if sampling.is_plain(params) else params.with_(temperature=1.0)
