"""Draft models that lie in the slots of their target: they read its KV cache, and have none of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.compiled.layers import ModelArrays
from polydraft.models.matrices.products import Packed
from polydraft.models.mixers.cache import SlotMemory
from polydraft.models.mixers.workspace import Sizes, Workspace
from polydraft.models.slots import RowAndStates, SlotModel


class ExitArrays(NamedTuple):
    """What compiled code needs of the first layers of a target. It stands here as stored code names its types: who reads that imports this module, and no torch.

    target: whose first `layer` layers draft.  sizes: of the exit.  memory: the target's.  mlp_norm: [h], or [0] where there is no feed-forward.
    """

    target: ModelArrays
    layer: int
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    mlp_norm: np.ndarray
    gate_up: Packed
    down: Packed
    norm: np.ndarray
    head: Packed
    normed: np.ndarray  # [CHUNK, h]
    inner: np.ndarray  # [CHUNK, 2 I]
    act: np.ndarray  # [CHUNK, I]
    update: np.ndarray  # [CHUNK, h]
    rounded: np.ndarray  # as of `Workspace`


class TargetSlots(SlotModel):
    """A head in the slots of its target: it reads the target's KV cache entries and leaves none that the target's next forward pass does not write anew."""

    def share(self, target: Any) -> None:
        """Use the target's slots."""
        self.target = target
        self.vocab_size = target.vocab_size
        self.max_model_len = target.max_model_len
        self.max_num_seqs = target.max_num_seqs
        self.cache_bytes = 0
        self._read_only = target.lengths
        self._lengths = target._lengths
        self.passes = 0
        self._scored = np.zeros(self.max_num_seqs, np.int64)

    def set_prompt_length(self, slot: int, length: int) -> None:
        """The target knows it: there is one cache."""

    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """The target's: there is one cache."""
        return self.target.append(token_ids, hidden)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """The target's: there is one cache."""
        self.target.move(source, target)

    def settle(self, slots: Sequence[int]) -> None:
        """The target's: there is one cache."""
        self.target.settle(slots)
