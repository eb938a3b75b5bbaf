"""A block diffusion drafter in torch: layers over [last token, masks] that read the target's states as keys and values.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636). At position n, with g[n] the target's states of
some layers there, and the block x[n+1], MASK, ..., MASK at positions n+1 .. n+1+X:

    KV cache   in every layer keys and values of norm(fc(g[0 .. n]))
    block      x[n+1] sees these; places behind it see these, x[n+1] and each other
    place k    distribution of x[n+1+k]
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.heads.diffusion.checkpoint import DiffusionCheckpoint
from polydraft.heads.network import DepthModel, HeadNetwork, Material
from polydraft.models.llama_layer import KeyValues, LlamaLayer, Norm
from polydraft.models.slots import TREE_ROOM

__all__ = ["DiffusionModel", "DiffusionNet"]


class DiffusionNet(HeadNetwork):
    """The drafter as it is trained and drafts; embeddings and output rows are the target's and stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h, epsilon, self.num_depths = config.hidden_size, config.rms_norm_eps, int(config.block_size)
        self.fc = nn.Linear(len(material.layers) * h, h, bias=False)
        self.hidden_norm, self.norm = Norm(h, epsilon), Norm(h, epsilon)
        spread = material.embeddings.float().std() if material.embeddings.numel() else 1.0
        self.mask = nn.Parameter(spread * torch.randn(h))
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_hidden_layers))
        for layer in self.layers:
            layer.silence()  # pyright: ignore[reportCallIssue] - at first a layer adds nothing

    def injected(
        self, states: Float[Tensor, "B T F"], positions: Int[Tensor, "..."]
    ) -> list[tuple[Float[Tensor, "B T G D"], Float[Tensor, "B T G D"]]]:
        """Keys and values of the target's states in every layer."""
        rows = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        return [layer.self_attn.keys_values(rows, positions) for layer in self.layers]  # pyright: ignore

    def denoised(
        self,
        x: Float[Tensor, "B A N h"],
        positions: Int[Tensor, "..."],
        text: Sequence[tuple[Tensor, Tensor]],
        seen: Bool[Tensor, "..."],
    ) -> Float[Tensor, "B A X D"]:
        """Logits at the places behind the last known tokens. text: keys and values in every layer.  seen: which of them a block sees."""
        mask = torch.ones(2 * [x.shape[2]], dtype=torch.bool, device=x.device)
        mask[0, 1:] = False
        for layer, entries in zip(self.layers, text, strict=True):
            x, _ = layer(x, positions, [KeyValues(*entries, seen)], mask)
        return self.vocabulary(self.norm(x[:, :, 1:]))

    def shown(self, embedded: Float[Tensor, "B A N h"], masked: Bool[Tensor, "B A N"]) -> Float[Tensor, "B A N h"]:
        """Embeddings of a block, with the mask's where it is masked."""
        return torch.where(masked[..., None], self.mask, embedded.float())

    def logits(
        self, states: Float[Tensor, "B T F"], blocks: Int[Tensor, "B A N"], masked: Bool[Tensor, "B A N"], at: Int[Tensor, " A"]
    ) -> Float[Tensor, "B A X D"]:
        """At the places of blocks whose first token is the last known one; those that are masked show the mask."""
        every = torch.arange(states.shape[1], device=states.device)
        positions = at[:, None] + 1 + torch.arange(blocks.shape[2], device=at.device)
        x = self.shown(self.embeddings[blocks], masked)
        return self.denoised(x, positions, self.injected(states, every), every <= at[:, None, None])


class DiffusionModel(DepthModel):
    """A block drafter as a draft model with a KV cache of its own; see `DepthModel` and `compiled.CompiledDiffusion`."""

    network_class = DiffusionNet

    def __init__(self, head: DiffusionCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        attention, slots, self.mask = self.network.layers[0].self_attn, target.max_num_seqs, target.vocab_size
        self._device, dtype = self.network.mask.device, attention.k_proj.weight.dtype
        room = len(self.network.layers), slots, target.max_model_len + TREE_ROOM, attention.num_groups, attention.width
        self._cache = tuple(torch.zeros(room, dtype=dtype, device=self._device) for _ in range(2))
        self._read, self.roots = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        """Tokens whose states each slot holds, and the last token of each."""

    @torch.inference_mode()
    def inject(self, slot: int, begin: int, states: Float[Tensor, "T F"]) -> None:
        """The target's states at the committed tokens from the one at `begin` on, the root left out."""
        end = begin + len(states)
        text = self.network.injected(states[None].float().to(self._device), torch.arange(begin, end, device=self._device))
        for l, entries in enumerate(text):
            for store, rows in zip(self._cache, entries, strict=True):
                store[l, slot, begin:end] = rows[0].to(store.dtype)
        self._read[slot] = end

    @torch.inference_mode()
    def _block_logits(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[Tensor, "B X D"]:
        tokens = torch.from_numpy(np.concatenate([self.roots[list(slots)][:, None], blocks], 1)).to(self._device)[:, None]
        lengths, rows = (torch.as_tensor(x).to(self._device) for x in (self._read[list(slots)], list(slots)))
        masked, longest = tokens == self.mask, int(lengths.max())
        embedded = self.target.embed(torch.where(masked, 0, tokens)).to(self._device)
        positions = lengths[:, None, None] + torch.arange(tokens.shape[2], device=self._device)
        text = list(zip(*(store[:, rows, :longest] for store in self._cache), strict=True))
        visible = (torch.arange(longest, device=self._device) < lengths[:, None])[:, None, None]
        return self.network.denoised(self.network.shown(embedded, masked), positions, text, visible)[:, 0]

    def denoise(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[np.ndarray, "B X D"]:
        """Logits at every place of blocks of masks and revealed tokens: one pass."""
        self.passes += 1
        return self._block_logits(slots, blocks).float().cpu().numpy()

    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B X D"]:
        """One pass over a block of masks. The states are injected already."""
        return self._block_logits(slots, np.full((len(slots), self.depths), self.mask))
