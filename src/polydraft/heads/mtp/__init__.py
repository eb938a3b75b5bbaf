"""Multi-token prediction: a module that reads the target's last state and the next token, and then its own output, drafts.

DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437); Cai et al. 2025, FastMTP (arXiv 2509.18362): the same module at every depth. It is run as
an EAGLE-3 head is: `heads.eagle.compiled` computes, and what was accepted is read again with the target's states.
"""

from typing import Any

from polydraft.drafters.base import Parts
from polydraft.heads.drafter import head_methods
from polydraft.heads.eagle import EagleDrafter
from polydraft.heads.mtp.checkpoint import MtpCheckpoint

__all__ = ["MtpDrafter"]


class MtpDrafter(EagleDrafter):
    """A module for multi-token prediction as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> MtpDrafter.methods[0].name
        'mtp'
    """

    methods = head_methods("mtp", "Multi-token prediction", "2412.19437 2509.18362")
    checkpoint = MtpCheckpoint
    forms = "polydraft.heads.eagle.compiled:CompiledEagle", "polydraft.heads.mtp.network:in_torch"

    @classmethod
    def head_of(cls, parts: Parts, weights: Any) -> Any:
        """See `HeadDrafter.head_of`; without weights the layer in the target's own files, where there is one."""
        own = MtpCheckpoint.of_target(parts.target) if weights is None else None
        return super().head_of(parts, weights) if own is None else own
