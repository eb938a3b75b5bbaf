"""Block diffusion in several forward passes: masks are revealed by an order, and revealed tokens are read by the places after them.

Christopher et al. 2024, SpecDiff (arXiv 2408.05636); Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036). In each of T forward passes every
masked place has a distribution; some places are revealed with a token, by an order. One pass (`heads.block`) was faster in all that we measured.

    order            a place is revealed                                        distribution of the draft
    left_to_right    in T groups from the left, each token drawn from its row   IID: a row depends on tokens to its left alone
    random           at step s with chance 1 / (T - s), drawn from its row      POINT_MASS
    confidence       those whose most probable token is the most probable       POINT_MASS

The distribution is a matter of the order and is known before anything is drawn. Trap: a row that was made with a token to its right in sight is not the distribution
of its own token given what is accepted before it: the ratio test with such rows is biased (total variation 0.116 in a case of two tokens; 0 with a match).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from polydraft.core import Budget, Draft, DraftSampling, Method, TreeShape
from polydraft.core import geometry as tree
from polydraft.drafters.model.by_depth import ModelState
from polydraft.errors import InvalidInputError
from polydraft.heads.block import BlockDrafter
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.methods.papers import method
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import Stream, uniform_at

STEPS = 2
"""Forward passes of a draft, where nobody says."""


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


def _method(order: str, title: str, draft_sampling: DraftSampling) -> tuple[Method]:
    return (method(f"block:{order}", title, "2408.05636 2602.06036", {draft_sampling}, {TreeShape.CHAIN}),)


class OrderedDrafter(BlockDrafter):
    """A block drafter that reveals its places in an order, by chains. steps: forward passes of a draft.

    Raises:
        InvalidInputError: no steps.
    """

    order: ClassVar[str]

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        kind: str = "chain",
        *,
        steps: int = STEPS,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if steps < 1:
            raise InvalidInputError(f"steps={steps} was given to the drafter 'block'; expected 1 or more.")
        super().__init__(model, layers, "chain", stop_ids=stop_ids)
        self.steps = steps
        self.info = self.methods[0]

    @classmethod
    def of_kind(cls, kind: str = "chain") -> Method:
        """The one that it makes."""
        return cls.methods[0]

    @classmethod
    def check_kind(cls, kind: str, head: BlockCheckpoint) -> None:
        """See `HeadDrafter.check_kind`.

        Raises:
            InvalidInputError: a head that no revealed token was shown to.
        """
        if "mask" not in head.tensors:
            raise InvalidInputError(
                f"drafter='block:{cls.order}' was given with a head that was never shown the tokens that an order reveals. "
                "Use drafter='block', or train a head: polydraft train block."
            )

    @property
    def options(self) -> dict[str, Any]:
        """See `HeadDrafter.options`."""
        return {"steps": self.steps}

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
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
            probs[:, : drafted.num_nodes - 1],
            drafted.parents,
        )

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
        for j in revealed(self.order, step, steps, masked, draft_probs.max(-1).tolist(), coins):
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


class LeftToRight(OrderedDrafter):
    """In groups from the left."""

    order = "left_to_right"
    methods = _method(order, "Block diffusion, from the left", DraftSampling.IID)


class RandomOrder(OrderedDrafter):
    """By coins."""

    order = "random"
    methods = _method(order, "Block diffusion, in any order", DraftSampling.POINT_MASS)


class ByConfidence(OrderedDrafter):
    """The most probable first."""

    order = "confidence"
    methods = _method(order, "Block diffusion, the surest first", DraftSampling.POINT_MASS)


ORDERS = {drafter.order: drafter for drafter in (LeftToRight, RandomOrder, ByConfidence)}
