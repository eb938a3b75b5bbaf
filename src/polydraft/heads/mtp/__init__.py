"""Multi-token prediction: a module that reads the target's last state and the next token, and then its own output, drafts.

DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437); Cai et al. 2025, FastMTP (arXiv 2509.18362): the same module at every depth. It is run as
an EAGLE-3 head is: `heads.eagle.compiled` computes, and what was accepted is read again with the target's states.
"""

from typing import Any

from polydraft.drafters.base import Parts
from polydraft.heads.drafter import head_methods, say_torch
from polydraft.heads.eagle import EagleDrafter
from polydraft.heads.mtp.network import MtpCheckpoint, OwnPredictor
from polydraft.heads.mtp.published import MtpModule, PublishedMtp
from polydraft.models.compiled.model import CompiledModel

__all__ = ["MtpDrafter"]


class MtpDrafter(EagleDrafter):
    """A module for multi-token prediction as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> MtpDrafter.methods[0].name
        'mtp'
    """

    methods = head_methods("mtp", "Multi-token prediction", "2412.19437 2509.18362")
    checkpoint = MtpCheckpoint

    @classmethod
    def build(
        cls,
        parts: Parts,
        *,
        weights: str | None = None,
        kind: str = "paths",
        quantization: str | None = None,
        **options: Any,
    ) -> Any:
        """See `HeadDrafter.build`; without weights the layer in the target's own files, where there is one."""
        predictor = OwnPredictor.of_target(parts.target) if weights is None else None
        if predictor is None:
            return super().build(parts, weights=weights, kind=kind, quantization=quantization, **options)
        model = cls.model_of(predictor, parts.target, quantization)
        layers = predictor.layers_of(parts.target)
        return cls(model, layers, kind, stop_ids=parts.eos_token_ids, **options)

    forms = "polydraft.heads.eagle.compiled:CompiledEagle", "polydraft.heads.mtp.network:MtpModel"

    @classmethod
    def model_of(cls, head: Any, target: Any, quantization: str | None = None) -> Any:
        """The module as a draft model; those of others run in transformers."""
        if not isinstance(head, PublishedMtp):
            return super().model_of(head, target, quantization)
        if isinstance(target, CompiledModel):
            say_torch(cls.methods[0].name)
        return MtpModule(head, target)
