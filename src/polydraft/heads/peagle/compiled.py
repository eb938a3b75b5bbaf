"""A P-EAGLE head in compiled code: entries of committed tokens that the cache lacks and the masks behind them are one chain in one forward pass.

An EAGLE-3 head reads it as rows that are given states, see `heads.eagle.compiled`: those of the target, and of masks `mask_hidden`. The last entry is read with
every block; the entries before it stay in the cache.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from polydraft.heads.compiled import head_forward
from polydraft.heads.eagle.compiled import CompiledEagle
from polydraft.heads.foretold import DepthDistributions
from polydraft.heads.peagle.checkpoint import PeagleCheckpoint
from polydraft.models.growing.proposals import LONGEST_PENDING
from polydraft.numerics.floats import as_float32


class CompiledPeagle(DepthDistributions):
    """The head as a draft model; see `DepthDistributions`.

    quantization: of its matrices; it changes no distribution of the output.

    Raises:
        IncompatibleError: a head of another target.
    """

    def __init__(self, head: PeagleCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        self.entries = CompiledEagle(head, target, quantization=quantization)
        super().__init__(target, head.ids, head.depths, head.kind)
        self.cache_bytes += self.entries.cache_bytes
        self.weight_bytes = self.entries.weight_bytes
        state = as_float32(head.tensors["mask_hidden"]).reshape(1, -1)
        self._masks = (
            np.full(self.depths - 1, int(head.config.mask_token_id)),
            state.repeat(self.depths - 1, 0),
        )
        self._pending = dict[int, tuple[tuple[int, ...], Float[np.ndarray, "E F"]]]()
        """Entries that a slot's cache lacks: tokens, and the target's states before them."""
        self.roots = np.zeros(target.max_num_seqs, np.int64)
        """The last token of each slot."""

    def inject(
        self, slot: int, begin: int, states: Float[np.ndarray, "T F"], following: Sequence[int]
    ) -> None:
        """See `network.PeagleModel.inject`."""
        cached = int(self.entries.lengths[slot])
        tokens = tuple(following)
        new = states
        if begin < cached:
            self.entries.cut(slot, begin)
        elif begin > cached:
            pending, known_states = self._pending[slot]
            tokens = pending[: begin - cached] + tokens
            new = np.concatenate([known_states[: begin - cached], new])
        if len(tokens) > LONGEST_PENDING:
            self.entries.give(slot, new)
            self.entries.prefill([slot], [tokens[:-1]])
            tokens = tokens[-1:]
            new = new[-1:]
        self._pending[slot] = tokens, new

    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """One forward pass over what is pending and masks behind it. The states are injected already."""
        mask_ids, mask_states = self._masks
        pending = [self._pending[slot] for slot in slots]
        counts = np.array([len(entries) for entries, _ in pending])
        node_ends = counts + len(mask_ids)
        tokens = np.zeros((len(slots), node_ends.max()), np.int64)
        parents = np.full_like(tokens, -1)
        for b, (slot, (entries, states_before)) in enumerate(zip(slots, pending, strict=True)):
            chain = [*entries, *mask_ids]
            tokens[b, : len(chain)] = chain
            parents[b, : len(chain)] = np.arange(-1, len(chain) - 1)
            self.entries.give(slot, np.concatenate([states_before, mask_states]))
            self.entries.reads(slot, chain)
            self._pending[slot] = entries[-1:], states_before[-1:]
        slot_ids = np.array(slots)
        last = counts - 1
        logits = np.empty((len(slots) * self.depths, self.arrays.sizes.outputs), np.float32)
        with self.entries.pool:
            head_forward(
                self.entries.arrays, slot_ids, tokens, parents, np.zeros_like(counts), node_ends, last, logits
            )
        self.arrays.logits[slot_ids] = logits.reshape(len(slots), self.depths, -1)
        self.entries.appended(list(slots), last)
        self.passes += 1

    def trim(self, slot: int) -> None:
        """See `slots.SlotModel.trim`."""
        super().trim(slot)
        self.entries.trim(slot)
