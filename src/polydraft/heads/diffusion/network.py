"""A block diffusion drafter in torch: layers over [last token, masks] that read the target's states as keys and values.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636). At position n, with g[n] the target's states of
some layers there, and the block x[n+1], MASK, ..., MASK at positions n+1 .. n+1+X:

    KV cache   in every layer keys and values of norm(fc(g[0 .. n]))
    block      x[n+1] sees these; places behind it see these, x[n+1] and each other
    place k    distribution of x[n+1+k]

Training is with all places masked, and time-sampled:

    loss       sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v) with all places masked, p the target's distribution there; and, time-sampled:
               at t ~ U(0, 1) each place is masked with chance t, else it shows its token; the masked ones count 1/t

Blocks stand at every `EVERY`-th position, another set each time. Trap: trained with all places masked alone, it has never read a revealed token.

On disk, see `heads.checkpoint`, are a few layers of the Llama family that read blocks of masks, and what the target's states enter by:

    config.json          a Llama configuration, `block_size` (masks of a block), `diffusion_layers` (of the target, whose states are injected)
    model.safetensors    fc, hidden_norm: from states to what keys and values are made of; mask: its embedding; layers.*, norm
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.network import DepthModel, HeadNetwork, Material
from polydraft.heads.recipe import Batch, Figures, Recipe, fresh_config, unrolled
from polydraft.models.compiled.architectures import LLAMA
from polydraft.models.llama_layer import KeyValues, LlamaLayer, Norm
from polydraft.models.slots import TREE_ROOM

__all__ = ["DiffusionCheckpoint", "DiffusionModel", "DiffusionNet", "DiffusionRecipe"]


class DiffusionCheckpoint(HeadCheckpoint):
    """A block diffusion drafter."""

    kind = "diffusion"
    LAYERS = "diffusion_layers"
    FIELDS = frozenset({"block_size"})

    @property
    def block(self) -> int:
        """Masks of a block, the most that it was trained with."""
        return int(self.config.block_size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a drafter of this configuration has."""
        h, layer = self.config.hidden_size, LLAMA.layer_shapes(self.config)
        vectors = {"fc.weight": (h, len(self.layers) * h), "hidden_norm.weight": (h,), "norm.weight": (h,), "mask": (h,)}
        return vectors | {f"layers.{i}.{name}": s for i in range(self.config.num_hidden_layers) for name, s in layer.items()}


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


EVERY = 5
"""Positions of a text for one from which a block goes out."""
LEAST = 0.05
"""Of t: the weight 1/t is bounded."""


class DiffusionRecipe(Recipe):
    """See the module. sizes: layers, and places of a block."""

    checkpoint, network = DiffusionCheckpoint, DiffusionNet
    sizes: ClassVar = {"layers": 2, "block": 4}
    settings = ("block_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rope_theta", "rms_norm_eps")  # fmt: skip

    def layers(self, last: int) -> tuple[int, ...]:
        """A low, a middle and the last."""
        return max(1, last // 4), last // 2 + 1, last

    def fresh(self, material: Material) -> DiffusionNet:
        """A drafter of its target's width, whose layers add nothing yet."""
        sizes = {"block_size": material.sizes["block"], "num_hidden_layers": material.sizes["layers"]}
        config: Any = fresh_config(material.hidden_size, **sizes)
        if config.num_attention_heads % 3 == 0:
            config.num_key_value_heads = config.num_attention_heads // 3
        return DiffusionNet(config, material)

    def loss(self, network: DiffusionNet, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all places: those of blocks of masks, whose figures these are, and time-sampled."""
        X, T = network.num_depths, batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - X, EVERY, device=batch.tokens.device)
        places = at[:, None] + 1 + torch.arange(X + 1, device=at.device)
        blocks, distributions, counted = (
            batch.tokens[:, places],
            batch.distributions[:, places[:, :-1]],
            batch.counted[:, places[:, 1:]],
        )
        masked = torch.ones_like(blocks, dtype=torch.bool)
        masked[..., 0] = False
        logits = network.logits(batch.states, blocks, masked, at)
        whole = unrolled(
            ((logits[:, :, k][counted[:, :, k]], distributions[:, :, k][counted[:, :, k]]) for k in range(X)), tv_weight=tv_weight
        )
        if not torch.is_grad_enabled():
            return whole
        times = torch.rand(*blocks.shape[:2], 1, device=at.device).clamp(min=LEAST)
        masked = masked & (torch.rand(blocks.shape, device=at.device) < times)
        log_q = network.logits(batch.states, blocks, masked, at).float().log_softmax(-1)
        counted_masks = masked[..., 1:] & counted
        sampled = (-(distributions * log_q).sum(-1) * counted_masks / times).sum() / counted.sum().clamp(min=1)
        return whole._replace(loss=whole.loss + sampled)
