"""What an engine offers to a drafter that is made by name, and what a drafter may offer beyond `core.Drafter`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from polydraft.core import AuxRows, Request, Target

__all__ = ["Auxiliary", "Parts", "Resumable", "Snapshot"]

Snapshot = dict[str, np.ndarray]
"""A request's drafter state as plain arrays, to be stored with safetensors or npz."""


@dataclass(frozen=True)
class Parts:
    """The engine's parts at the time a drafter is built; a drafter class takes what it needs in `build(parts, **options)`.

    target: the model that is accelerated.  draft_model: a smaller one, or None.  tokenizer: the target's, or None.
    draft_tokenizer: the draft model's where it is another one.
    """

    target: Target
    draft_model: Target | None
    tokenizer: Any
    eos_token_ids: Sequence[int]
    draft_tokenizer: Any = None


@runtime_checkable
class Auxiliary(Protocol):
    """A drafter whose `needs` name "aux": it puts rows of its own into the target's pass and reads them in `observe`."""

    def aux(self, states: Sequence[Any]) -> AuxRows | None: ...


@runtime_checkable
class Resumable(Protocol):
    """A drafter whose states can be saved: the restored state drafts exactly as the saved one would have."""

    def snapshot(self, state: Any) -> Snapshot: ...

    def restore(self, request: Request, snapshot: Snapshot) -> Any: ...
