"""Block diffusion: masks behind the last token are denoised together, in one forward pass or in a few.

Christopher et al. 2024, SpecDiff (arXiv 2408.05636); Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036). In each of T forward passes every
masked place has a distribution; some places are revealed with a token, by an order, and are read by those after it.

    order            a place is revealed                                        distribution of the draft
    (none)           all at once, each from its own row: distributions by depth          IID, all kinds of draws
    left_to_right    in T groups from the left, each token drawn from its row   IID: a row depends on tokens to its left alone
    random           at step s with chance 1 / (T - s), drawn from its row      POINT_MASS
    confidence       those whose most probable token is the most probable       POINT_MASS

The distribution is a matter of the order and is known before anything is drawn. Trap: a row that was made with a token to its right in sight is not the distribution
of its own token given what is accepted before it: the ratio test with such rows is biased (total variation 0.116 in a case of two tokens; 0 with a match).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from polydraft.core import Budget, Draft, DraftSampling, Method, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.drafts import FIXED
from polydraft.drafters.model.by_depth import ModelState
from polydraft.errors import InvalidInputError
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.depth_drafter import CachingDrafter
from polydraft.heads.markov import confidence_logits
from polydraft.methods.papers import method
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import Stream, uniform_at

__all__ = ["BlockDrafter", "revealed"]

STEPS = 2
"""Forward passes of a draft in an order, where nobody says."""
_CHAIN = {TreeShape.CHAIN}
_PAPERS = "2408.05636 2602.06036"
_METHODS = (
    method("block", "Block diffusion, one pass", "2602.06036 2408.05636", {DraftSampling.IID}, FIXED),
    method("block:left_to_right", "Block diffusion, from the left", _PAPERS, {DraftSampling.IID}, _CHAIN),
    method("block:random", "Block diffusion, in any order", _PAPERS, {DraftSampling.POINT_MASS}, _CHAIN),
    method(
        "block:confidence", "Block diffusion, the surest first", _PAPERS, {DraftSampling.POINT_MASS}, _CHAIN
    ),
)
ORDERS = {info.name.partition(":")[2]: info for info in _METHODS[1:]}


def revealed(
    order: str, step: int, steps: int, masked: Sequence[int], tops: Sequence[float], coins: Sequence[float]
) -> list[int]:
    """Places that a step reveals of those that are masked; the last step reveals all.

    tops: the largest probability at each place.  coins: uniform numbers, one a place.

    Example:
        >>> revealed("left_to_right", 0, 2, [0, 1, 2], [], []), revealed("confidence", 0, 2, [0, 1, 2], [0.5, 0.3, 0.9], [])
        ([0, 1], [0, 2])
    """
    remaining_steps = steps - step
    if order == "random":
        return [j for j in masked if coins[j] * remaining_steps < 1]
    ranked = list(masked) if order == "left_to_right" else sorted(masked, key=lambda j: -tops[j])
    return sorted(ranked[: -(-len(masked) // remaining_steps)])


class BlockDrafter(CachingDrafter):
    """A block drafter of the target; kinds are those of `ModelDrafter`, of one forward pass, and the orders of the module. steps: forward passes in an order.
    min_confidence: a path ends before the first token of which a head with a confidence part is less sure.

    Raises:
        InvalidInputError: no steps.

    Example:
        >>> [info.name for info in BlockDrafter.methods][2:]
        ['block:random', 'block:confidence']
    """

    methods = _METHODS
    checkpoint = BlockCheckpoint
    forms = "polydraft.heads.block.compiled:CompiledBlock", "polydraft.heads.block.network:BlockModel"

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        kind: str = "paths",
        *,
        steps: int = STEPS,
        min_confidence: float = 0.0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if steps < 1:
            raise InvalidInputError(f"steps={steps} was given to the drafter 'block'; expected 1 or more.")
        if not 0 <= min_confidence < 1:
            raise InvalidInputError(
                f"min_confidence={min_confidence} was given to the drafter 'block'; expected 0 (nothing ends early) or more, below 1."
            )
        self.min_confidence = min_confidence
        super().__init__(model, layers, "chain" if kind in ORDERS else kind, stop_ids=stop_ids)
        self.order = kind if kind in ORDERS else None
        self.steps = steps
        self.info = self.of_kind(kind)

    @classmethod
    def of_kind(cls, kind: str = "paths") -> Method:
        """See `HeadDrafter.of_kind`; orders draw as the module says."""
        return ORDERS[kind] if kind in ORDERS else super().of_kind(kind)

    @classmethod
    def check_kind(cls, kind: str, head: BlockCheckpoint) -> None:
        """See `HeadDrafter.check_kind`.

        Raises:
            InvalidInputError: an order, of a head that no revealed token was shown to.
        """
        if kind in ORDERS and "mask" not in head.tensors:
            raise InvalidInputError(
                f"drafter='block:{kind}' was given with a head that was never shown the tokens that an order reveals. "
                "Use drafter='block', or train a head: polydraft train block."
            )

    @property
    def options(self) -> dict[str, Any]:
        """See `HeadDrafter.options`."""
        return {"steps": self.steps, "min_confidence": self.min_confidence}

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        if self.order is None:
            draft = super().propose(states, budgets)
            return self._confident(draft, [s.slot for s in states]) if self.min_confidence else draft
        states = self.prepared(states)
        self._check_room(states, budgets)
        depths = [g.chain_length for g in budgets]
        chains, probs = self._denoised(states, depths)
        drafted = tree.chains([[s.context[-1], *ids] for s, ids in zip(states, chains, strict=True)])
        (draft_sampling,) = self.info.draft_sampling
        if draft_sampling is DraftSampling.POINT_MASS:
            return Draft.point_mass(drafted)
        if drafted.num_nodes == 1:
            return self._empty(states)
        return Draft(
            drafted,
            draft_sampling,
            TreeShape.CHAIN,
            torch.from_numpy(probs[:, : drafted.num_nodes - 1]),
            drafted.parents,
        )

    def _confident(self, draft: Draft, slots: list[int]) -> Draft:
        """Without the nodes before which the head's confidence is too low, and all below them. It looks at the tokens before a node alone, so that all
        siblings stay or go, whatever was drawn.
        """
        tokens, parents = draft.tree.host
        logits = confidence_logits(self.model.arrays.markov, slots, tokens, parents)
        if logits is None:
            return draft
        stays = logits >= np.log(self.min_confidence / (1 - self.min_confidence))
        stays[:, 0] = True
        rows = np.arange(len(stays))
        for n in range(1, stays.shape[1]):
            stays[:, n] &= (parents[:, n] >= 0) & stays[rows, np.maximum(parents[:, n], 0)]
        smaller, places = tree.packed(draft.tree, stays)
        rows = torch.where(smaller.parents >= 0, draft.rows.gather(1, places), -1)
        confidence = None if draft.confidence is None else draft.confidence.gather(1, places)
        return replace(draft, tree=smaller, rows=rows, confidence=confidence)

    def _denoised(self, states: Sequence[Any], depths: Sequence[int]) -> tuple[list[list[int]], np.ndarray]:
        """The chains of so many tokens, and the rows [B, X, V] that they were drawn from, by as many forward passes as there are steps."""
        X = self.model.depths
        drafting = [b for b, depth in enumerate(depths) if depth]
        blocks = np.full((len(states), X), self.model.mask)
        probs = np.zeros((len(states), X, self.model.vocab_size), np.float32)
        for step in range(min(self.steps, max(depths, default=0))):
            some = [b for b in drafting if step < depths[b]]
            logits = self.model.denoise([states[b].slot for b in some], blocks[some])
            draft_probs = self.model.rows(logits, [states[b].request.params for b in some])
            for b, rows in zip(some, draft_probs, strict=True):
                self._reveal(
                    states[b], step, min(self.steps, depths[b]), depths[b], rows, blocks[b], probs[b]
                )
        return [self._cut(blocks[b, :depth].tolist()) for b, depth in enumerate(depths)], probs

    def _reveal(
        self,
        state: ModelState,
        step: int,
        steps: int,
        depth: int,
        draft_probs: np.ndarray,
        block: np.ndarray,
        probs: np.ndarray,
    ) -> None:
        """Put tokens into a block, and the rows that they are from into `probs`."""
        request = state.request
        at = len(state.context)
        X = len(block)
        uniform = [
            uniform_at(request.seed, request.sample, at, int(Stream.DRAFT), i) for i in range(1, X + 1)
        ]
        coins = [
            uniform_at(request.seed, request.sample, at, int(Stream.DRAFT), (step + 1) * X + i)
            for i in range(1, X + 1)
        ]
        masked = [j for j in range(depth) if block[j] == self.model.mask]
        for j in revealed(self.order or "", step, steps, masked, draft_probs.max(-1).tolist(), coins):
            block[j] = (
                draft_probs[j].argmax()
                if self.order == "confidence"
                else choose_row(draft_probs[j], uniform[j])
            )
            probs[j] = draft_probs[j]

    def _cut(self, ids: list[int]) -> list[int]:
        """Up to an end of text, where no verifier asks with which chance a token was drawn."""
        if DraftSampling.POINT_MASS not in self.info.draft_sampling:
            return ids
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in self._stop_ids), ids)
