"""From the root down, node by node: lift a rule for the children of one node to a whole tree.

Start at the root. At a node with children a token rule emits one token; if it is a child's token, descend to that child,
otherwise stop. At a node without children emit a token of the target distribution. Used by SpecInfer (arXiv 2305.09781), Sequoia
(2402.12374) and most tree methods.

    e_u(y)  distribution of the token emitted at context u for the drawn children, with the rule's own randomness integrated out
    T(v)    probability that the walk reaches v:  T(child x of u) = T(u) e_u(x)
    stop(u) = T(u) (1 - sum over distinct children e_u(x))

Lossless whenever the token rule is: e_u averaged over the draws at u is p_u. An emitted token that equals a drafted child
counts as that child, whether an acceptance or a residual emitted it.
Trap: copies of a context pool their children in draw order; a child list made from paths counts a shared draw twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, DraftSampling, Method
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise, normalise_or

TokenRule = Callable[[Tensor, Any, Tensor], Tensor]
"""(p [M, V], q [M, V], draws [M, n] token ids padded with -1) -> distribution of the emitted token [M, V].

Where the draft sampling is INDEPENDENT, q is [M, n, V]: row j is the distribution of draw j; where it is POINT_MASS, q is None."""


@njit(cache=True)
def _reach(parents: np.ndarray, branch: np.ndarray) -> np.ndarray:
    reach = np.zeros(branch.shape)
    for b in range(branch.shape[0]):
        reach[b, 0] = 1.0
        for n in range(1, branch.shape[1]):
            if parents[b, n] >= 0:
                reach[b, n] = reach[b, parents[b, n]] * branch[b, n]
    return reach


def _drawn_from(draft: Draft, probs: Tensor, b: Tensor, kids: Tensor) -> Tensor:
    """The distribution of the draws at each inner context, [M, V]; of each draw, [M, n, V], where every one has its own."""
    first = draft.rows[b[:, 0], kids[:, 0]]
    if draft.sampling is not DraftSampling.INDEPENDENT:
        return normalise(probs.double()[b[:, 0], first])
    drawn_rows = draft.rows[b, kids.clamp(min=0)]
    return normalise(probs.double()[b, torch.where(kids >= 0, drawn_rows, first[:, None])])


@dataclass(frozen=True)
class PerNode:
    """A verifier for trees, made of a rule for one node.

    emitted_probs: see `TokenRule`; float64 in and out; rows without draws (all -1) must return p.
    merged: equal siblings are one draw, of draws without replacement; see `lift.draws`.
    """

    info: Method
    emitted_probs: TokenRule
    merged: bool = False

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p = normalise(target_probs.double())
        nodes = draws_at(draft.tree, self.merged)
        inner = (nodes[..., 0] >= 0) if nodes.shape[-1] else torch.zeros_like(draft.tree.tokens, dtype=torch.bool)
        rest, stop = p.clone(), torch.ones_like(p[..., 0])
        branch = torch.zeros_like(stop)
        if inner.any():
            kids = nodes[inner]  # [M, W] node ids of the draws at each inner context
            b = inner.nonzero()[:, 0, None].expand_as(kids)
            drawn = kids >= 0
            tokens = draft.tree.tokens[b, kids.clamp(min=0)]
            q = None if draft.probs is None else _drawn_from(draft, draft.probs, b, kids)
            e = self.emitted_probs(p[inner], q, tokens.where(drawn, -1))
            branch[b[drawn], kids[drawn]] = e.gather(1, tokens)[drawn]
            extra_probs = e.scatter(1, tokens.where(drawn, tokens[:, :1]), 0.0)  # the first draw is always there: pad with it
            rest[inner], stop[inner] = extra_probs, extra_probs.sum(-1)
        first = tree.first_copies(draft.tree)
        copy = first != torch.arange(draft.tree.num_nodes, device=first.device)
        parents = torch.where(copy, -1, draft.tree.parents)
        parents = torch.where(parents >= 0, first.gather(1, parents.clamp(min=0)), -1)
        reach = torch.from_numpy(_reach(parents.cpu().numpy(), branch.cpu().numpy())).to(p.device)
        rows = torch.arange(len(p), device=p.device)
        return TreeVerdict(draft.tree, reach * stop, lambda node: normalise_or(rest[rows, node], otherwise=p[rows, node]))
