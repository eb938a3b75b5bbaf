"""P-EAGLE's head on disk: that of vLLM's speculators, with EAGLE-3's tensors and what masks have for states."""

from collections.abc import Mapping
from typing import Any

from polydraft.heads.eagle.checkpoint import EagleCheckpoint

DEPTHS = 7
"""Drafts of a forward pass where the folder does not say how many it was trained for."""


def drafts_per_forward(config: Any) -> int:
    """As many as the head was trained for."""
    proposals = (getattr(config, "speculators_config", None) or {}).get("proposal_methods") or [{}]
    return int(proposals[0].get("speculative_tokens") or DEPTHS)


class PeagleCheckpoint(EagleCheckpoint):
    """A P-EAGLE head of vLLM's speculators."""

    kind = "peagle"
    FIELDS = EagleCheckpoint.FIELDS | {"mask_token_id"}

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """By its name."""
        return settings.get("speculators_model_type") == "peagle"

    def parts(self) -> dict[str, tuple[int, ...]]:
        """See `EagleCheckpoint.parts`; with what masks have for states."""
        return super().parts() | {"mask_hidden": (1, 1, self.states_width)}

    @property
    def depths(self) -> int:
        """Drafts of a forward pass."""
        return drafts_per_forward(self.config)
