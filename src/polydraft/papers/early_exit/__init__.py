"""Early exit: the target's own first layers draft, in its own cache.

Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710); Zhang et al. 2023, Draft & Verify (arXiv 2309.08168).
    E          layers that draft: a node is run through them, then through the exit, see `papers.early_exit.compiled`
    committed  tokens are never run through them again: the target did, and its columns are read

A draft model in the target's slots: all kinds of `drafters.model.paths` and all verifiers for them serve unchanged. A forward pass of the target
runs the nodes through the first E layers once more, which is what it would do without this drafter: trees lie otherwise in the forward pass than in
the proposal, and the states of leaves are nobody's. Trap: E layers that are all of them draft what the target says, at its price.
"""

from typing import Any

from polydraft.core import DraftSampling
from polydraft.core.drafts import FIXED
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import Guest
from polydraft.errors import InvalidInputError
from polydraft.heads.drafter import HeadDrafter
from polydraft.methods.papers import method
from polydraft.papers.early_exit.network import ExitCheckpoint

__all__ = ["EarlyExitDrafter"]


class EarlyExitDrafter(Guest, HeadDrafter):
    """The target's first layers as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> EarlyExitDrafter.methods[0].name
        'early-exit'
    """

    methods = (method("early-exit", "Early exit", "2404.16710 2309.08168", {DraftSampling.IID}, FIXED),)

    checkpoint = ExitCheckpoint
    forms = (
        "polydraft.papers.early_exit.compiled:CompiledExit",
        "polydraft.papers.early_exit.network:ExitModel",
    )

    @classmethod
    def build(
        cls,
        parts: Parts,
        *,
        weights: str | None = None,
        layer: int | None = None,
        kind: str = "paths",
        quantization: str | None = None,
        **options: Any,
    ) -> "EarlyExitDrafter":
        """For the engine. weights: a folder as `polydraft train early-exit` writes it; layer: in its place, behind which the target's own norm
        and head serve, for targets that were trained so.  quantization: of a compiled exit's own matrices, default int8.

        Raises:
            InvalidInputError: neither or both, or a layer that is none of the target's or its last.
            ModelLoadError, IncompatibleError: a folder that is none, or a target of another kind.
        """
        if (weights is None) == (layer is None):
            raise InvalidInputError(
                f"the drafter 'early-exit' was asked for with weights={weights!r} and layer={layer}; expected one of them: a folder "
                "(polydraft train early-exit; --head FOLDER), or the layer to exit behind."
            )
        exit_ = (
            ExitCheckpoint.load(weights)
            if weights is not None
            else ExitCheckpoint.untrained(layer or 0, parts.target)
        )
        return cls(
            cls.model_of(exit_, parts.target, quantization), (), kind, stop_ids=parts.eos_token_ids, **options
        )
