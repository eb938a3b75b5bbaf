"""How much to draft in the next round, decided from past rounds only.

A plan may look at tables and at rounds that are over, never at the draft it is deciding about: depth and width are fixed
before the first token of a round is drawn, so every choice here keeps the output law (specification, section 12.2).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from polydraft import sampling, tree
from polydraft.core import Budget, Draft
from polydraft.engine.sequence import Sequence

__all__ = ["AcceptancePlan", "FixedPlan", "Plan", "root_overlap"]

DECAY = 0.8


def root_overlap(draft: Draft, target_probs: Float[Tensor, "B N V"]) -> list[float | None]:
    """Acceptance of one draft at the root: sum min(p, q), or P(children) where there is no q; None without a draft."""
    if target_probs.device.type != "cpu":
        return [None if x < 0 else x for x in _overlap_torch(draft, target_probs[:, 0]).tolist()]
    p = target_probs[:, 0].contiguous().numpy()
    q = p[:, None] if draft.probs is None else draft.probs.cpu().contiguous().numpy()
    tokens, parents, rows = (x.contiguous().numpy() for x in (draft.tree.tokens, draft.tree.parents, draft.rows))
    found = np.empty(len(p))
    _overlap(p, q, tokens, parents, rows, draft.probs is not None, found)
    return [None if x < 0 else x for x in found.tolist()]


@njit(cache=True, fastmath={"reassoc"})
def _overlap(p, q, tokens, parents, rows, has_law, found):  # pragma: no cover - compiled
    """found[b] = the overlap of row b, -1 without a draft."""
    for b in range(len(found)):
        total, children = 0.0, 0
        for n in range(1, parents.shape[1]):
            if parents[b, n] == 0:
                children += 1
                if has_law and children == 1:
                    law = q[b, rows[b, n]]
                    for t in range(law.size):
                        total += min(p[b, t], law[t])
                elif not has_law:
                    seen = False
                    for m in range(1, n):
                        seen |= parents[b, m] == 0 and tokens[b, m] == tokens[b, n]
                    total += 0.0 if seen else p[b, tokens[b, n]]
        found[b] = total if children else -1.0


def _overlap_torch(draft: Draft, p: Float[Tensor, "B V"]) -> Float[Tensor, "B"]:
    """The same where the laws are; the tree is on the host. -1 without a draft."""
    child = draft.tree.parents == 0
    has_draft, first = child.any(1), child.int().argmax(1)
    index = torch.arange(len(p))
    if draft.probs is not None:
        rows = torch.stack([index, draft.rows[index, first].clamp(min=0)]).to(draft.probs.device, non_blocking=True)
        total = torch.minimum(p, draft.probs[rows[0], rows[1]].to(p.device, non_blocking=True)).sum(1, dtype=torch.float64)
    else:
        distinct = child & (tree.first_copies(draft.tree) == torch.arange(draft.tree.num_nodes))
        total = (p.gather(1, draft.tree.tokens.to(p.device, non_blocking=True)) * distinct.to(p.device, non_blocking=True)).sum(
            1, dtype=torch.float64
        )
    return total.where(has_draft.to(p.device, non_blocking=True), -1.0)


class Plan(Protocol):
    """Budgets for the next round of each sequence."""

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]: ...

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"]) -> None:
        """Take note of a round that is over; processed: the target's processed logits at the drafted nodes."""
        ...


@dataclass(frozen=True)
class FixedPlan:
    """The same budget in every round, for reproducible comparisons.

    depth: drafted tokens on a path.  width: paths (or children of a node).  max_nodes: default depth x width.

    Example:
        >>> FixedPlan(depth=4, width=2).budget
        Budget(max_nodes=8, max_depth=4, width=2)
    """

    depth: int
    width: int = 1
    max_nodes: int | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.depth * self.width if self.max_nodes is None else self.max_nodes, self.depth, self.width)

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"]) -> None:
        """Nothing: the plan is fixed."""


@dataclass(frozen=True)
class AcceptancePlan:
    """One chain where drafts are mostly accepted, two paths where they are not; deeper, the better they fit.

    Specification, section 12.3: at equal numbers of scored nodes a chain wins where one draft is accepted more often than
    `chain_above`, two equal paths win below. The depth maximises expected tokens over the cost of a round,

        (1 - a^(L+1)) / (1 - a) / (1 + L (draft_cost + width node_cost)),

    with a the acceptance of one draft, estimated from the overlap sum min(p, q) at the roots of past rounds (for two
    paths raised to 1 - (1 - a)^1.5, a fit to measured block efficiencies).

    draft_cost, node_cost: cost of one drafting depth and of one more scored node, in passes of one row of the target.
    """

    max_depth: int = 12
    chain_above: float = 0.75
    draft_cost: float = 0.05
    node_cost: float = 0.04
    prior: float = 0.7

    def _speed(self, acceptance: float, depth: int, width: int) -> float:
        a = min(acceptance if width == 1 else 1 - (1 - acceptance) ** 1.5, 0.99)
        return (1 - a ** (depth + 1)) / (1 - a) / (1 + depth * (self.draft_cost + width * self.node_cost))

    def budget(self, acceptance: float, *, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of one draft; greedy drafts are one chain, as a second path would be a copy.

        Example:
            >>> AcceptancePlan().budget(0.9).width, AcceptancePlan().budget(0.6).width
            (1, 2)
        """
        width = 1 if greedy or acceptance > self.chain_above else 2
        depth = max(range(1, self.max_depth + 1), key=lambda d: self._speed(acceptance, d, width))
        return Budget(depth * width, depth, width)

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self.budget(self.prior if s.overlap is None else s.overlap, greedy=s.request.params.greedy) for s in sequences]

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"]) -> None:
        """Fold the round's overlaps into each sequence's running estimate."""
        probs = sampling.soften(processed[:, :1], [s.request.params for s in sequences])
        for s, overlap in zip(sequences, root_overlap(draft, probs), strict=True):
            if overlap is not None:
                s.overlap = overlap if s.overlap is None else DECAY * s.overlap + (1 - DECAY) * overlap
