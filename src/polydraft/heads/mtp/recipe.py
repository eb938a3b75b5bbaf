"""Training of a module for multi-token prediction: EAGLE-3's, with weights 0.6^(k-1) of the steps (FastMTP, arXiv 2509.18362)."""

from typing import ClassVar

from polydraft.heads.eagle.recipe import EagleRecipe
from polydraft.heads.mtp.checkpoint import MtpCheckpoint
from polydraft.heads.mtp.network import MtpHead

__all__ = ["MtpRecipe"]


class MtpRecipe(EagleRecipe):
    """See the module."""

    checkpoint, network, decay = MtpCheckpoint, MtpHead, 0.6
    published: ClassVar = {}

    def layers(self, last: int) -> tuple[int, ...]:
        """The last."""
        return (last,)
