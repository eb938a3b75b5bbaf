"""Samplers that run here as they are shipped, behind the signature of `polydraft.conformance`."""

from collections.abc import Callable
from typing import Any

import torch


def transformers(*, weight: float | None = None) -> Callable[[Any, Any, Any], tuple[int, int]]:
    """`_speculative_sampling` of transformers: assisted generation. weight: `assistant_ensemble_weight`."""
    from transformers.generation.utils import (  # pyright: ignore[reportMissingTypeStubs]
        _speculative_sampling,  # pyright: ignore[reportPrivateUsage]
    )

    def sampler(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> tuple[int, int]:
        emitted, accepted = _speculative_sampling(
            tokens[None], q.log()[None], len(tokens), p.log()[None], weight
        )
        return int(accepted), int(emitted[0, -1])

    return sampler
