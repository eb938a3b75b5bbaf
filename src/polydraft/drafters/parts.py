"""What an engine offers to a drafter that is made by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.core import Target

__all__ = ["Parts"]


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
