"""Hidden transfer: the target's state at the newest token is mapped to states of the next positions, which its remaining layers run to the end.

Wu et al. 2024 (arXiv 2404.12022). The authors attach k pseudo rows to every node of the tree that is scored; here they are a forward pass of their own
behind the accepted node: k rows through the remaining layers instead of k more for every node, see `papers.hidden_transfer.compiled`.
The rows know the text up to the target's last read token and nothing of what is drafted: `heads.depth_drafter` drafts.
Trap: a map of the last state alone is a Medusa head; what is gained is the layers behind it.
"""

from collections.abc import Sequence
from typing import Any

from polydraft.core import DraftSampling, Request
from polydraft.core.drafts import FIXED
from polydraft.drafters.model.by_depth import ModelState
from polydraft.drafters.model.paths import slots_of
from polydraft.heads.depth_drafter import DepthDrafter
from polydraft.methods.papers import method
from polydraft.papers.hidden_transfer.network import TransferCheckpoint

__all__ = ["TransferDrafter"]


class TransferDrafter(DepthDrafter):
    """Hidden transfer as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> TransferDrafter.methods[0].name
        'hidden-transfer'
    """

    methods = (method("hidden-transfer", "Hidden transfer", "2404.12022", {DraftSampling.IID}, FIXED),)
    checkpoint = TransferCheckpoint
    forms = (
        "polydraft.papers.hidden_transfer.compiled:CompiledTransfer",
        "polydraft.papers.hidden_transfer.network:TransferModel",
    )

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """In the target's slots.

        Raises:
            IncompatibleError: requests of which nobody says where the target holds them.
        """
        return [
            self._started(r, slot)
            for r, slot in zip(requests, slots_of(self.info.name, requests), strict=True)
        ]

    def release(self, states: Sequence[ModelState]) -> None:
        """The slots are the target's."""
