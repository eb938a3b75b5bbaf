"""The most probable tree of a draft model, grown best first: a node is worth the product of the draft's probabilities along its path.

    frontier  the `width` most probable nodes chosen of the depth above: one forward pass of the model gives the distributions behind them
    chosen    the `max_nodes` most probable candidates of all depths; no node is more probable than its parent, so parents are among them
    stop      at `max_depth`, or where nothing of a depth is chosen: all of it is below `budget.min_path_prob`, or below the last one chosen; with `budget.Stop`
              path probabilities are calibrated, a depth is expanded where their sum is worth a forward pass, and a node is chosen that is worth its row

The sum of the chosen products, which estimates the accepted tokens, is the largest of all trees of so many nodes where `width` does not
bind (Wang et al. 2024, OPT-Tree, arXiv 2406.17276); a bounded frontier and a choice among the candidates of all depths are EAGLE-2's
(Li et al. 2024, arXiv 2406.16858). `theory.trees.grow_by_probability` is the reference.
A tree is a function of the past, whatever its distribution: its nodes are point masses. Traps: verifying them with the draft's distribution as if they had been
drawn from it biases the output (total variation .30 in an example of five tokens), and a distribution at temperature 0 leaves one chain (`COLD`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Draft, Proposing, SamplingParams, Scores, Target, TokenTree, TreeShape
from polydraft.drafters.model.by_depth import CachedNodes, ModelState
from polydraft.models.growing.ranked import NODE, advance, draft_of, join, retreat, worth_their_rows
from polydraft.models.growing.stops import stops_asked
from polydraft.sampling import processing as sampling

COLD = 0.4
"""Temperature of the distribution for a greedy request. At 0 it leaves a chain, and at 1 it does not know how much surer than the draft's second choice the first is to
be the target's: on the embedded pair trees of 12 nodes and depth 8 then yield 6.5 tokens per step instead of 7.4 (11 texts; 0.35 and 0.5 within 2%)."""


def grow(
    model: Target,
    states: Sequence[ModelState],
    budgets: Sequence[Budget],
    stop_ids: Sequence[int] = (),
    *,
    compiled: bool = True,
) -> tuple[Draft, list[CachedNodes]]:
    """The draft of a batch, and for each row what the model's cache now holds behind the committed tokens, no node where nothing was asked for.

    budgets: of which the contexts leave room for the depths.  stop_ids: what `min_tokens` masks.  One forward pass a depth for the whole batch.
    compiled: by the model's `propose_tree` where it offers one, which is one call: penalties are left out of the distribution, the tree fits a little less.
        Not for outputs whose form is given, nor where the model may have no token that is allowed.
    """
    if compiled and isinstance(model, Proposing):
        params = [_warm(s.request.params, g) for s, g in zip(states, budgets, strict=True)]
        tree, confidence, scored = model.propose_tree(
            [s.slot for s in states], [s.pending for s in states], budgets, params
        )
    else:
        tree, confidence, scored = _by_depth(model, states, budgets, stop_ids)
    draft = replace(Draft.point_mass(tree, TreeShape.GROWN), confidence=confidence)
    return draft, [CachedNodes(tokens, parents, leaves=True) for tokens, parents in scored]


class _Tree:
    """One sequence's tree. tokens, parents: the rows that the draft model has scored, or is to score next."""

    def __init__(self, root: int, budget: Budget) -> None:
        self.budget = budget
        self.tokens = [root]
        self.parents = [-1]
        self.nodes = np.empty(budget.max_nodes, NODE)
        self.size = 0
        self.depth = 0
        stops = stops_asked((budget.stop,), 1)
        self.min_reach = stops.min_reach[0]
        self.min_chances = stops.min_spare_chance[0]
        self.acceptance = stops.acceptance[0] if budget.stop else np.empty(0)
        self.begin = 0
        self.weights = np.ones(1)

    def deepen(self, draft_probs: Float[np.ndarray, "F V"]) -> None:
        """Take the children of the frontier, then choose the next one."""
        for f, weight in enumerate(self.weights.tolist()):
            row = self.begin + f
            min_value = self.budget.min_path_prob
            ids = np.empty(0, np.int64)  # of all tokens
            self.size = join(
                draft_probs[f], ids, weight, row, min_value, self.acceptance, self.nodes, self.size
            )
        self.size = worth_their_rows(self.nodes, self.size, self.min_chances)
        chosen = np.empty(self.budget.max_nodes, np.int64)
        begin = self.begin
        self.begin = len(self.tokens)
        chosen = chosen[: advance(self.nodes, self.size, begin, self.begin, self.budget.width, chosen)]
        self.depth += 1
        if (
            len(self.min_reach)
            and self.nodes[chosen]["value"].sum() < self.min_reach[min(self.depth, len(self.min_reach)) - 1]
        ):
            chosen = chosen[: retreat(self.nodes, self.size, self.begin)]
        frontier = self.nodes[chosen]
        self.weights = frontier["value"]
        self.tokens += frontier["token"].tolist()
        self.parents += frontier["parent"].tolist()

    def fill(self, count: int) -> None:
        """Copies of the last frontier node up to this many: rows of a batch are scored together, and nothing reads a copy."""
        missing = count - len(self.weights)
        self.tokens += self.tokens[-1:] * missing
        self.parents += self.parents[-1:] * missing


def _by_depth(
    model: Target, states: Sequence[ModelState], budgets: Sequence[Budget], stop_ids: Sequence[int]
) -> tuple[TokenTree, np.ndarray, list[tuple[list[int], list[int]]]]:
    grown = [_Tree(s.context[-1], g) for s, g in zip(states, budgets, strict=True)]
    live = [b for b, g in enumerate(budgets) if g.chain_length > 0]
    behind = [states[b] for b in live if len(states[b].pending) > 1]
    if behind:
        model.prefill([s.slot for s in behind], [s.pending[:-1] for s in behind])
    since = 0
    depth = 0
    while live:
        tree = _padded([grown[b] for b in live])
        scores = model.score([states[b].slot for b in live], tree, since=since)
        rows = _draft_probs(
            scores, tree, since, [states[b] for b in live], [budgets[b] for b in live], stop_ids
        )
        since = tree.num_nodes
        depth = depth + 1
        for b, draft_probs in zip(live, rows, strict=True):
            grown[b].deepen(draft_probs)
        live = [b for b in live if len(grown[b].weights) and depth < budgets[b].max_depth]
    scored = [(g.tokens[: g.begin], g.parents[: g.begin]) for g in grown]
    return *_drafts(grown), scored


def _padded(grown: Sequence[_Tree]) -> TokenTree:
    """What a model is to score, of equal sizes."""
    widest = max(len(g.weights) for g in grown)
    for g in grown:
        g.fill(widest)
    return TokenTree.of(np.array([g.tokens for g in grown]), np.array([g.parents for g in grown]))


def _drafts(grown: Sequence[_Tree]) -> tuple[TokenTree, np.ndarray]:
    """The chosen nodes of each, and the confidence in them."""
    tokens = np.zeros((len(grown), 1 + max(g.size for g in grown)), np.int64)
    parents = np.full_like(tokens, -1)
    confidence = np.ones(tokens.shape)
    for b, g in enumerate(grown):
        tokens[b, 0] = g.tokens[0]
        draft_of(g.nodes, g.size, len(g.tokens), tokens[b], parents[b], confidence[b])
    return TokenTree.of(tokens, parents), confidence


def _draft_probs(
    scores: Scores,
    tree: TokenTree,
    since: int,
    states: Sequence[ModelState],
    budgets: Sequence[Budget],
    stop_ids: Sequence[int],
) -> Float[np.ndarray, "B F V"]:
    """The distributions at the new nodes, processed with each request's parameters; of a greedy request see `_warm`."""
    params = [_warm(s.request.params, g) for s, g in zip(states, budgets, strict=True)]
    contexts = [s.context for s in states]
    prompts = [len(s.request.prompt_token_ids) for s in states]
    return sampling.draft_probs(scores.logits, tree, contexts, prompts, params, stop_ids, since=since)


def _warm(params: SamplingParams, budget: Budget) -> SamplingParams:
    """A greedy request's distribution is that at temperature 1 where it is calibrated, else that at COLD."""
    return params.with_(temperature=1.0 if budget.stop else COLD) if params.greedy else params
