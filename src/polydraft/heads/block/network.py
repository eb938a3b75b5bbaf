"""A block head in torch: layers over [last token, masks] that read the target's states as keys and values.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636). At position n, with g[n] the target's states of
some layers there, and the block x[n+1], MASK, ..., MASK at positions n+1 .. n+X:

    KV cache   in every layer keys and values of norm(fc(g[0 .. n]))
    block      its places see these, or the last of them, and one another: all, those before them, or all but that x[n+1] sees no mask
    place k    distribution of x[n+1+k], which is its own place, or of x[n+2+k]; see `checkpoint`

A layer of Gemma 4, as block heads for it have: norms behind attention and feed-forward, keys as values, a rotation of part of a head. Attention is not
scaled, values are normed without a weight, and what a layer puts out is multiplied by `layer_scalar`. The rest is the Llama family's, see
`models.torch.llama_layer`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from polydraft.heads.block.checkpoint import GEMMA
from polydraft.heads.checkpoint import HeadCheckpoint, has_head_norms
from polydraft.heads.markov import place
from polydraft.heads.network import CachingModel, HeadNetwork, Material
from polydraft.models.torch.door import inward, outward
from polydraft.models.torch.llama_layer import (
    FeedForward,
    KeyValues,
    LlamaAttention,
    LlamaLayer,
    RMSNorm,
    rms_norm,
)


class GemmaAttention(LlamaAttention):
    """Projections of a full layer of Gemma 4."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.hidden_size, head_norms=True)
        self.epsilon = config.rms_norm_eps
        half = self.width // 2
        turning = int(config.rope_part * half)
        self.rates = torch.cat([self.rates[:turning], self.rates.new_zeros(half - turning)])
        if config.attention_k_eq_v:
            del self.v_proj

    def queries(self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]) -> Float[Tensor, "*N H D"]:
        """Rotated queries, times what attention divides by."""
        return super().queries(x, positions) * self.width**0.5

    def keys_values(self, x: Float[Tensor, "*N i"], positions: Int[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and normed values."""
        keys = self._heads(self.k_proj, x)
        values = self._heads(self.v_proj, x) if hasattr(self, "v_proj") else keys
        ones = torch.ones(self.width, device=values.device)
        return self._rotated(self.k_norm(keys), positions), rms_norm(values, ones, self.epsilon)


class GemmaFeedForward(FeedForward):
    """Gated by GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up_proj.weight.dtype)
        return self.down_proj(gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaLayer(LlamaLayer):
    """A full layer of Gemma 4."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.self_attn = GemmaAttention(config)
        self.mlp = GemmaFeedForward(h, config.intermediate_size)
        self.pre_feedforward_layernorm = RMSNorm(h, epsilon)
        self.post_feedforward_layernorm = RMSNorm(h, epsilon)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def leave(self, x: Float[Tensor, "*N h"], mixed: Float[Tensor, "*N q"]) -> Float[Tensor, "*N h"]:
        """See `LlamaLayer.leave`."""
        x = x + self.post_attention_layernorm(
            self.self_attn.o_proj(mixed.to(self.self_attn.o_proj.weight.dtype))
        )
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class BlockNet(HeadNetwork):
    """The head as it is trained and drafts; embeddings and output rows that are the target's stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.num_depths = int(config.slots) - bool(config.in_place)
        self.gemma = config.model_type == GEMMA
        width = config.target_hidden_size or h
        self.fc = nn.Linear(len(material.layers) * width, h, bias=False)
        self.hidden_norm = RMSNorm(h, epsilon)
        self.norm = RMSNorm(h, epsilon)
        if config.mask_token_id is None:
            spread = material.embeddings.float().std() if material.embeddings.numel() else 1.0
            self.mask = nn.Parameter(spread * torch.randn(h))
        head_norms = has_head_norms(config)
        self.layers = nn.ModuleList(
            GemmaLayer(config) if self.gemma else LlamaLayer(config, head_norms=head_norms)
            for _ in range(config.num_hidden_layers)
        )
        for layer in self.layers:
            layer.silence()  # pyright: ignore[reportCallIssue] - at first a layer adds nothing

    @property
    def attentions(self) -> list[Any]:
        """Of all layers."""
        return [layer.self_attn for layer in self.layers]

    def injected(
        self, states: Float[Tensor, "B T F"], positions: Int[Tensor, "..."]
    ) -> list[tuple[Float[Tensor, "B T G D"], Float[Tensor, "B T G D"]]]:
        """Keys and values of the target's states in every layer."""
        rows = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        return [attention.keys_values(rows, positions) for attention in self.attentions]

    def outputs(
        self,
        x: Float[Tensor, "B A N h"],
        positions: Int[Tensor, "..."],
        text: Sequence[tuple[Tensor, Tensor]],
        before: Int[Tensor, "..."],
    ) -> Float[Tensor, "B A N h"]:
        """States behind the norm at the places of blocks. text: keys and values in every layer.  before: tokens before each block, which see no more than them."""
        N = x.shape[2]
        device = x.device
        keys, _ = text[0]
        every = torch.arange(keys.shape[1], device=device)
        together = {"all": torch.ones(N, N, dtype=torch.bool, device=device)}
        together["causal"] = together["all"].tril()
        together["apart"] = together["all"].clone()
        together["apart"][0, 1:] = False
        if self.gemma:
            x = x * self.config.hidden_size**0.5
        for layer, entries, sees, window in zip(
            self.layers, text, self.config.sees, self.config.windows, strict=True
        ):
            visible = every < before[..., None]
            if window is not None:
                visible = visible & (every >= before[..., None] - window)
            x, _ = layer(x, positions, [KeyValues(*entries, visible)], together[sees])
        return self.norm(x)

    def drafting(self, outputs: Float[Tensor, "B A N h"]) -> Float[Tensor, "B A X D"]:
        """Logits at the places that draft, of states behind the norm."""
        logits = self.vocabulary(outputs[..., -self.num_depths :, :])
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits

    def shown(
        self, rows: Float[Tensor, "B A N h"], masked: Bool[Tensor, "B A N"]
    ) -> Float[Tensor, "B A N h"]:
        """Embeddings of a block, with the mask's where it is masked and the mask is no token."""
        return (
            torch.where(masked[..., None], self.mask, rows.float()) if hasattr(self, "mask") else rows.float()
        )

    def logits(
        self,
        states: Float[Tensor, "B T F"],
        blocks: Int[Tensor, "B A N"],
        masked: Bool[Tensor, "B A N"],
        at: Int[Tensor, " A"],
    ) -> Float[Tensor, "B A X D"]:
        """At the places of blocks whose first token is the last known one; those that are masked show the mask."""
        every = torch.arange(states.shape[1], device=states.device)
        positions = at[:, None] + 1 + torch.arange(blocks.shape[2], device=at.device)
        x = self.shown(self.embeddings[blocks], masked)
        return self.drafting(self.outputs(x, positions, self.injected(states, every), at[:, None] + 1))


class BlockModel(CachingModel):
    """A block head as a draft model; see `CachingModel` and `compiled.CompiledBlock`.

    Trap: behind a block only what the target's states became stays in the cache.
    """

    network_class = BlockNet

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        self.mask = target.vocab_size
        self._shown = head.config.mask_token_id or 0

    @torch.inference_mode()
    def inject(
        self, slot: int, begin: int, states: Float[np.ndarray, "T F"], following: Sequence[int] = ()
    ) -> None:
        """The target's states at the committed tokens from the one at `begin` on, the root left out. following: the token behind each."""
        end = begin + len(states)
        text = self.network.injected(
            inward(states, self, torch.float32)[None], torch.arange(begin, end, device=self.device)
        )
        for l, entries in enumerate(text):
            for store, rows in zip(self._cache, entries, strict=True):
                store[l, slot, begin:end] = rows[0].to(store.dtype)
        self._read[slot] = end

    def _outputs(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[Tensor, "B N h"]:
        ids = np.concatenate([self.roots[list(slots)][:, None], blocks], 1)[:, None]
        tokens = inward(ids, self)
        lengths, rows = (torch.as_tensor(x).to(self.device) for x in (self._read[list(slots)], list(slots)))
        masked = tokens == self.mask
        longest = int(lengths.max())
        rows_of = self.embedded(np.where(ids == self.mask, self._shown, ids))
        positions = lengths[:, None, None] + torch.arange(tokens.shape[2], device=self.device)
        text = list(zip(*(store[:, rows, :longest] for store in self._cache), strict=True))
        return self.network.outputs(
            self.network.shown(rows_of, masked), positions, text, lengths[:, None, None]
        )[:, 0]

    @torch.inference_mode()
    def denoise(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[np.ndarray, "B X D"]:
        """Logits at the places that draft of blocks of masks and revealed tokens behind the last token: one forward pass."""
        self.passes += 1
        return outward(self.network.drafting(self._outputs(slots, blocks)[:, None])[:, 0])

    @torch.inference_mode()
    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B X D"]:
        """One forward pass over a block of masks. The states are injected already."""
        num_masks = int(self.network.config.slots) - 1
        outputs = self._outputs(slots, np.full((len(slots), num_masks), self.mask))
        place(self.arrays.markov, list(slots), outward(outputs), self.roots[list(slots)])
        return self.network.drafting(outputs[:, None])[:, 0]
