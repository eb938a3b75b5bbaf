"""P-EAGLE's head in torch: EAGLE-3's layers over entries of committed tokens and masks behind them.

    entry t    [embedding of x[t+1]; fc(g[t])], at position t: its keys and values stay in the cache; the last foretells the first draft
    mask d     [embedding of the mask; fc(mask_hidden)], d places behind the last entry: foretells draft d + 1

All see what is before them. What a mask leaves in the cache is gone with the forward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.eagle.network import EagleHead
from polydraft.heads.network import CachingModel, Material
from polydraft.heads.peagle.checkpoint import drafts_per_forward
from polydraft.models.torch.door import inward
from polydraft.models.torch.llama_layer import KeyValues


class PeagleHead(EagleHead):
    """The head. Of its configuration `norm_output` says nothing: nothing is chained."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))
        self.num_depths = drafts_per_forward(config)


class PeagleModel(CachingModel):
    """The head as a draft model; see `CachingModel`."""

    network_class = PeagleHead

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        self._mask = int(head.config.mask_token_id)
        self._last = torch.zeros(target.max_num_seqs, head.config.hidden_size, device=self.device)

    @torch.inference_mode()
    def inject(
        self, slot: int, begin: int, states: Float[np.ndarray, "T F"], following: Sequence[int]
    ) -> None:
        """Entries of the committed tokens from the one at `begin` on: the target's states there, and the token behind each."""
        end = begin + len(states)
        at = torch.arange(begin, end, device=self.device)
        rows = self.embedded(np.array([list(following)], np.int64))
        visible = torch.arange(end, device=self.device) <= at[:, None]

        def sources(layer: int, *new: Tensor) -> list[KeyValues]:
            for store, entries in zip(self._cache, new, strict=True):
                store[layer, slot, begin:end] = entries[0, 0].to(store.dtype)
            keys, values = (store[layer, slot, None, :end] for store in self._cache)
            return [KeyValues(keys, values, visible)]

        read = self.network.read(inward(states, self, torch.float32)[None]).float()
        self._last[slot] = self.network.through(rows[:, None], read[:, None], at, sources)[0, 0, -1].float()
        self._read[slot] = end

    @torch.inference_mode()
    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B K D"]:
        """One forward pass over masks. The states are injected already."""
        slot_ids = torch.tensor(list(slots), device=self.device)
        lengths = torch.from_numpy(self._read[list(slots)]).to(self.device)
        longest = int(lengths.max())
        count = self.depths - 1
        cached = torch.arange(longest, device=self.device) < lengths[:, None, None, None]
        causal = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()

        def sources(layer: int, *new: Tensor) -> list[KeyValues]:
            keys, values = (store[layer, slot_ids, :longest] for store in self._cache)
            return [KeyValues(keys, values, cached), KeyValues(*new, causal)]

        last = self._last[slot_ids][:, None]
        if not count:
            return self.network.logits(last)
        shape = len(slots), 1, count, last.shape[-1]
        word = self.embedded(np.array([self._mask])).expand(shape)
        state = self.network.read(self.network.mask_hidden).float()[:, None].expand(shape)
        positions = lengths[:, None, None] + torch.arange(count, device=self.device)
        masks = self.network.through(word, state, positions, sources)[:, 0]
        return self.network.logits(torch.cat([last, masks.float()], 1))
