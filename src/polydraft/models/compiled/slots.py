"""Slots of a compiled model: KV cache entries, and beside them the memory of recurrent layers, which follows what is committed; see `recurrent`."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polydraft.models.compiled.layers import STATES
from polydraft.models.growing.proposals import CompiledProposals
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.vectors import PANEL
from polydraft.models.memory import available_bytes
from polydraft.models.mixers.cache import (
    COLUMNS,
    SlotMemory,
    chosen_cache_dtype,
    forget,
    move_columns,
    new_memories,
)
from polydraft.models.mixers.recurrent import RecurrentMemory
from polydraft.models.mixers.workspace import CHUNK
from polydraft.models.networks import ModelSpec
from polydraft.models.supported import context_length


def snapshot_bytes() -> int:
    """Memory for the snapshots of a model: a sixteenth of what is free, at most 1 GiB.

    Example:
        >>> 0 < snapshot_bytes() <= 1 << 30
        True
    """
    return min(available_bytes() // 16, 1 << 30)


class CompiledSlots(CompiledProposals):
    """A model with slots and perhaps recurrent layers: without them, nothing is done beside what slots do."""

    checkpoint: Checkpoint | None
    cache_dtype: str
    _recurrent: RecurrentMemory | None = None
    memories: list[SlotMemory]
    """Keys and values, of each width of heads that layers have; tokens and lengths are the same of all."""

    def open_memories(
        self,
        spec: ModelSpec,
        max_model_len: int | None,
        max_num_seqs: int,
        cache_dtype: str | None,
        activations: str | None,
    ) -> dict[str, SlotMemory]:
        """Open slots, and give keys and values of each kind of attention their memory."""
        assert self.checkpoint is not None  # it is given back when slots are open
        config = self.checkpoint.config
        heads = spec.heads(config)
        for each in heads.values():
            cache_dtype = chosen_cache_dtype(cache_dtype, activations, each.width)
        assert cache_dtype is not None
        self.cache_dtype = cache_dtype
        num_layers = {kind: len(spec.layers_with_keys(kind)) for kind in heads}
        columns = self.open_slots(
            max_model_len,
            max_num_seqs,
            context=context_length(config) or 0,
            bytes_per_token=sum(num_layers[kind] * heads[kind].token_bytes(cache_dtype) for kind in heads),
            bytes_per_slot=sum(shape.slot_bytes for shape in spec.states.values()),
            multiple=COLUMNS,
        )
        memories = new_memories(heads, num_layers, max_num_seqs, columns, self._lengths, cache_dtype)
        self.memories = list(memories.values())
        return memories

    def new_states(self, spec: ModelSpec) -> dict[str, Any]:
        """The memory of recurrent layers, by their kind, for slots that were opened."""
        folded = np.zeros(self.max_num_seqs, np.int64)
        memories = {kind: STATES[kind](shape, folded) for kind, shape in spec.states.items()}
        self._begun = set[int]()
        if memories:
            self.chunk = CHUNK
            kinds = [kind for _, kind in memories.values()]
            self._recurrent = RecurrentMemory(
                kinds, self._lengths, folded, snapshot_bytes(), self._read_again
            )
            self.state_bytes = self._recurrent.state_bytes
        return {kind: memory for kind, (memory, _) in memories.items()}

    def _read_again(self, slot: int, begin: int, end: int) -> None:
        """Run committed tokens through the layers, for the states of recurrent ones; keys and values get the bits that they have."""
        length = int(self._lengths[slot])
        self._lengths[slot] = begin
        try:
            self.read_on(slot, self.arrays.memory.tokens[slot, begin:end].tolist())
        finally:
            self._lengths[slot] = length

    @abstractmethod
    def read_on(self, slot: int, token_ids: Sequence[int]) -> None:
        """Run tokens behind the committed ones of a slot, without logits."""

    def settle(self, slots: Sequence[int]) -> None:
        """See `CompiledProposals`."""
        if self._recurrent is not None:
            self._recurrent.settle(slots)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel`. What another slot gets of states is copied as a whole, see `copy`."""
        for memory in self.memories:
            move_columns(memory, source, target)
        within = source["slot"] == target["slot"]
        if self._recurrent is not None and within.any():
            self._recurrent.move(source[within], target[within])

    def cut(self, slot: int, length: int) -> None:
        """See `slots.SlotModel`."""
        super().cut(slot, length)
        if self._recurrent is not None:
            self._recurrent.cut(slot, length)

    def copy(self, source: int, slot: int, length: int) -> None:
        """See `slots.SlotModel`."""
        super().copy(source, slot, length)
        if self._recurrent is not None:
            self._recurrent.copy(source, slot, length)

    def release(self, slots: Sequence[int]) -> None:
        """See `slots.SlotModel`."""
        super().release(slots)
        if self._recurrent is not None:
            self._recurrent.release(slots)

    def trim(self, slot: int) -> None:
        """See `slots.SlotModel`."""
        super().trim(slot)
        for memory in self.memories:
            forget(memory, slot)
        if self._recurrent is not None:
            self._recurrent.trim(slot)

    def resumes(self, slot: int, length: int) -> int:
        """See `core.Target`."""
        return length if self._recurrent is None else self._recurrent.resumes(slot, length)

    def appending(self, slots: Iterable[int]) -> None:
        """Tokens are appended to slots: where they end, other texts may go on, too."""
        self._begun.update(slots)

    def goes_on(self, slots: Sequence[int]) -> None:
        """Texts go on behind tokens that were appended: states are copied there."""
        if self._recurrent is not None and (begun := self._begun.intersection(slots)):
            self._recurrent.settle([*begun])
            for slot in begun:
                self._recurrent.take_snapshot(slot)
        self._begun.difference_update(slots)

    block_tokens = PANEL

    def read_block(self, slot: int, start: int) -> tuple[np.ndarray, ...]:
        """See `core.BlockCopying`."""
        return tuple(entries.copy() for entries in self._block(slot, start))

    def write_block(self, slot: int, entries: tuple[np.ndarray, ...]) -> None:
        """See `core.BlockCopying`."""
        length = int(self._lengths[slot])
        for columns, block in zip(self._block(slot, length), entries, strict=True):
            columns[...] = block
        if self._recurrent is not None:
            self._recurrent.lacks(slot, length)
        self.appended([slot], PANEL)

    def _block(self, slot: int, start: int) -> tuple[np.ndarray, ...]:
        entries = list[np.ndarray]()
        for memory in self.memories:
            first = start // memory.together
            entries.append(memory.keys[:, slot, :, start // PANEL])
            entries.append(memory.values[:, slot, :, :, first : first + PANEL // memory.together])
            entries.append(memory.scales[:, slot, :, :, start : start + PANEL])
        return *entries, self.arrays.memory.tokens[slot, start : start + PANEL]

    def read_states(self, slot: int, length: int) -> tuple[np.ndarray, ...] | None:
        """See `core.BlockCopying`."""
        if self._recurrent is None:
            return ()
        self._recurrent.settle([slot])
        return self._recurrent.states_after(slot, length)

    def write_states(self, slot: int, states: tuple[np.ndarray, ...]) -> None:
        """See `core.BlockCopying`."""
        if self._recurrent is not None:
            self._recurrent.write(slot, int(self._lengths[slot]), states)
