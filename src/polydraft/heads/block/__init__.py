"""Block diffusion in one forward pass: masks behind the last token are denoised together, each place from its own row.

Christopher et al. 2024, SpecDiff (arXiv 2408.05636); Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036). Drafts are distributions by depth: IID, and
all kinds of draws. `papers.block_orders` denoises in several forward passes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.core import Budget, Draft
from polydraft.core import geometry as tree
from polydraft.errors import InvalidInputError
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.depth_drafter import CachingDrafter
from polydraft.heads.drafter import head_methods
from polydraft.heads.markov import confidence_logits


class BlockDrafter(CachingDrafter):
    """A block drafter of the target; kinds are those of `ModelDrafter`.

    min_confidence: a path ends before the first token of which a head with a confidence part is less sure.

    Raises:
        InvalidInputError: a least confidence that is none.

    Example:
        >>> BlockDrafter.methods[0].year
        2026
    """

    methods = head_methods("block", "Block diffusion, one pass", "2602.06036 2408.05636")
    checkpoint = BlockCheckpoint
    forms = "polydraft.heads.block.compiled:CompiledBlock", "polydraft.heads.block.network:BlockModel"

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        kind: str = "paths",
        *,
        min_confidence: float = 0.0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if not 0 <= min_confidence < 1:
            raise InvalidInputError(
                f"min_confidence={min_confidence} was given to the drafter 'block'; expected 0 (nothing ends early) or more, below 1."
            )
        self.min_confidence = min_confidence
        super().__init__(model, layers, kind, stop_ids=stop_ids)

    @property
    def options(self) -> dict[str, Any]:
        """See `HeadDrafter.options`."""
        return {"min_confidence": self.min_confidence}

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        draft = super().propose(states, budgets)
        return self._confident(draft, [s.slot for s in states]) if self.min_confidence else draft

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
        rows = np.where(smaller.parents >= 0, np.take_along_axis(draft.rows, places, 1), -1)
        confidence = None if draft.confidence is None else np.take_along_axis(draft.confidence, places, 1)
        return replace(draft, tree=smaller, rows=rows, confidence=confidence)
