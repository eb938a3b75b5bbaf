"""From a verifier for one context to trees, in torch on any device: all contexts of a depth at once, from the root down.

    per node       the weight of a context is the probability to get there, of the root 1; a verifier hands it on to the children, and
                   what it does not hand on is the context's
    leaf to root   a context of weight w accepts itself or something below it with probability w, on average over what was drawn below

Copies of a context are one: they pool their draws in draw order.
Trap: a list of children made from paths, which counts a draw once for each path through it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.residual import normalise, normalise_or


class Contexts(NamedTuple):
    """M contexts of one depth that have draws; float64.

    weight: see the module.  p: target distributions.  q: distributions of the draws; [M, n, V] where each draw has its own; None where there is none.
    tokens: of the draws in their order, padded with -1.  heights: how deep the tree goes on below each draw, where that was fixed before the
    first draw, else 0.
    """

    weight: Float[Tensor, " M"]
    p: Float[Tensor, "M V"]
    q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None
    tokens: Int[Tensor, "M n"]
    sampling: DraftSampling
    heights: Int[Tensor, "M n"]


class Decision(NamedTuple):
    """What a verifier decides at M contexts.

    weights: of each draw; 0 at a repeated token.  stops: what is left for the context itself.
    rest: what the extra token is drawn from; p where it is all zero.  turns: of each draw, when it is visited; -1: never.
    """

    weights: Float[Tensor, "M n"]
    stops: Float[Tensor, " M"]
    rest: Float[Tensor, "M V"]
    turns: Int[Tensor, "M n"]


class Lifted(NamedTuple):
    """Tables of a batch.

    weights: of contexts without draws; of others what their children leave of it.  rest: as in `Decision`.  p: target distributions.  visits: children of each context in the order of their visits,
    padded with -1.
    """

    weights: Float[Tensor, "B N"]
    rest: Float[Tensor, "B N V"]
    p: Float[Tensor, "B N V"]
    visits: Int[Tensor, "B N W"]

    def after(self, node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Distributions of the extra tokens behind these nodes."""
        batch = torch.arange(len(node), device=self.p.device)
        return normalise_or(self.rest[batch, node], otherwise=self.p[batch, node])


def _draft_probs(draft: Draft, b: Int[Tensor, "M 1"], nodes: Int[Tensor, "M n"]) -> Tensor | None:
    if draft.probs is None or draft.sampling is DraftSampling.POINT_MASS:
        return None
    rows = draft.rows[b, nodes.clamp(min=0)]
    if draft.sampling is not DraftSampling.INDEPENDENT:
        return normalise(draft.probs[b[:, 0], rows[:, 0].clamp(min=0)].double())
    return normalise(draft.probs[b, torch.where(nodes >= 0, rows, rows[:, :1])].double())


def heights(draft: Draft) -> Int[Tensor, "B N"]:
    """How deep the tree goes on below each node, where that was fixed before the first draw, else 0."""
    fixed = draft.shape in (TreeShape.RAGGED, TreeShape.BY_POSITION)
    return tree.heights(draft.tree) if fixed else torch.zeros_like(draft.tree.parents)


def lifted(
    draft: Draft, target_probs: Float[Tensor, "B N V"], rule: Callable[[Contexts], Decision], merged: bool
) -> Lifted:
    """The tables of a verifier. merged: equal siblings are one draw, of draws without replacement; see `lift.draws`."""
    p = normalise(target_probs.double())
    nodes = draws_at(draft.tree, merged)
    depths = tree.depths(draft.tree)
    sampling = DraftSampling.WITHOUT_REPLACEMENT if merged else draft.sampling
    below = heights(draft)
    weights = torch.zeros_like(p[..., 0])
    rest = p.clone()
    visits = torch.full_like(nodes, -1)
    weights[:, 0] = 1.0
    for depth in range(int(depths.max()) + 1 if nodes.shape[-1] else 0):
        at = ((nodes[..., 0] >= 0) & (depths.to(nodes.device) == depth)).nonzero(as_tuple=True)
        if not len(at[0]):
            continue
        draws = nodes[at]
        b = at[0][:, None]
        drawn = draws >= 0
        nodes_drawn = draws.clamp(min=0)
        tokens = torch.where(drawn, draft.tree.tokens[b, nodes_drawn], -1)
        decided = rule(
            Contexts(
                weights[at], p[at], _draft_probs(draft, b, draws), tokens, sampling, below[b, nodes_drawn]
            )
        )
        weights[b.expand_as(draws)[drawn], draws[drawn]] = decided.weights[drawn]
        weights[at] = decided.stops
        rest[at] = decided.rest
        turns = torch.where(decided.turns >= 0, decided.turns, draws.shape[1])
        visits[at] = torch.where(decided.turns >= 0, draws, -1).gather(1, turns.argsort(dim=1, stable=True))
    return Lifted(weights, rest, p, visits)
