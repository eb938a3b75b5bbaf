"""A block head in torch: layers over [last token, masks] that read the target's states as keys and values.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636). At position n, with g[n] the target's states of
some layers there, and the block x[n+1], MASK, ..., MASK at positions n+1 .. n+X:

    KV cache   in every layer keys and values of norm(fc(g[0 .. n]))
    block      its places see these, or the last of them, and one another: all, those before them, or all but that x[n+1] sees no mask
    place k    distribution of x[n+1+k], which is its own place, or of x[n+2+k]; see `checkpoint`

Training, of the form with a mask of its own, is with all places masked, and time-sampled:

    loss       sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v) with all places masked, p the target's distribution there; and, time-sampled:
               at t ~ U(0, 1) each place is masked with chance t, else it shows its token; the masked ones count 1/t

Blocks stand at every `EVERY`-th position, another set each time. Trap: trained with all places masked alone, it has never read a revealed token.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.errors import IncompatibleError
from polydraft.heads.block.checkpoint import GEMMA, BlockCheckpoint
from polydraft.heads.block.gemma import GemmaLayer
from polydraft.heads.checkpoint import has_head_norms
from polydraft.heads.losses import unrolled
from polydraft.heads.markov import place
from polydraft.heads.network import CachingModel, HeadNetwork, Material
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe, fresh_config
from polydraft.models.torch.llama_layer import KeyValues, LlamaLayer, Norm


class BlockNet(HeadNetwork):
    """The head as it is trained and drafts; embeddings and output rows that are the target's stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.num_depths = int(config.slots) - bool(config.in_place)
        self.gemma = config.model_type == GEMMA
        width = getattr(config, "target_hidden_size", None) or h
        self.fc = nn.Linear(len(material.layers) * width, h, bias=False)
        self.hidden_norm = Norm(h, epsilon)
        self.norm = Norm(h, epsilon)
        if getattr(config, "mask_token_id", None) is None:
            spread = material.embeddings.float().std() if material.embeddings.numel() else 1.0
            self.mask = nn.Parameter(spread * torch.randn(h))
        options = {"head_norms": True} if has_head_norms(config) else {}
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            GemmaLayer(config) if self.gemma else LlamaLayer(config, **options) for _ in layers
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
        cap = getattr(self.config, "final_logit_softcapping", None)
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

    def __init__(self, head: BlockCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        self.mask = target.vocab_size
        self._shown = getattr(head.config, "mask_token_id", None) or 0

    @torch.inference_mode()
    def inject(
        self, slot: int, begin: int, states: Float[Tensor, "T F"], following: Sequence[int] = ()
    ) -> None:
        """The target's states at the committed tokens from the one at `begin` on, the root left out. following: the token behind each."""
        end = begin + len(states)
        text = self.network.injected(
            states[None].float().to(self._device), torch.arange(begin, end, device=self._device)
        )
        for l, entries in enumerate(text):
            for store, rows in zip(self._cache, entries, strict=True):
                store[l, slot, begin:end] = rows[0].to(store.dtype)
        self._read[slot] = end

    def _outputs(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[Tensor, "B N h"]:
        tokens = torch.from_numpy(np.concatenate([self.roots[list(slots)][:, None], blocks], 1)).to(
            self._device
        )[:, None]
        lengths, rows = (torch.as_tensor(x).to(self._device) for x in (self._read[list(slots)], list(slots)))
        masked = tokens == self.mask
        longest = int(lengths.max())
        rows_of = self.embedded(torch.where(masked, self._shown, tokens))
        positions = lengths[:, None, None] + torch.arange(tokens.shape[2], device=self._device)
        text = list(zip(*(store[:, rows, :longest] for store in self._cache), strict=True))
        return self.network.outputs(
            self.network.shown(rows_of, masked), positions, text, lengths[:, None, None]
        )[:, 0]

    @torch.inference_mode()
    def denoise(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[np.ndarray, "B X D"]:
        """Logits at the places that draft of blocks of masks and revealed tokens behind the last token: one forward pass."""
        self.passes += 1
        return self.network.drafting(self._outputs(slots, blocks)[:, None])[:, 0].float().cpu().numpy()

    @torch.inference_mode()
    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> Float[Tensor, "B X D"]:
        """One forward pass over a block of masks. The states are injected already."""
        num_masks = int(self.network.config.slots) - 1
        outputs = self._outputs(slots, np.full((len(slots), num_masks), self.mask))
        place(self.arrays.markov, list(slots), outputs.float().cpu().numpy(), self.roots[list(slots)])
        return self.network.drafting(outputs[:, None])[:, 0]


EVERY = 5
"""Positions of a text for one from which a block goes out."""
MIN_TIME = 0.05
"""Of t: the weight 1/t is bounded."""


class BlockRecipe(Recipe):
    """See the module. sizes: layers, and places of a block."""

    checkpoint = BlockCheckpoint
    network = BlockNet
    reads_three = True
    sizes: ClassVar = {"layers": 2, "block": 4}
    settings = ("block_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rope_theta", "rms_norm_eps")  # fmt: skip

    def fresh(self, material: Material) -> BlockNet:
        """A drafter of its target's width, whose layers add nothing yet."""
        layers = material.sizes["layers"]
        block = material.sizes["block"]
        form = {"slots": block + 1, "in_place": True, "sees": ["apart"] * layers, "windows": [None] * layers}
        sizes = {"block_size": block, "num_hidden_layers": layers, "model_type": "llama", **form}
        config: Any = fresh_config(material.hidden_size, **sizes)
        if config.num_attention_heads % 3 == 0:
            config.num_key_value_heads = config.num_attention_heads // 3
        return BlockNet(config, material)

    def started(self, material: Material, first: Any) -> nn.Module:
        """A head as an older checkpoint has it.

        Raises:
            IncompatibleError: one of another form, whose places learn something else.
        """
        if not first.config.in_place or first.bias_kind != "none" or set(first.config.sees) != {"apart"}:
            raise IncompatibleError(
                f"the head to start with has in_place={first.config.in_place}, sees={first.config.sees[0]!r} and the Markov part "
                f"{first.bias_kind!r}; expected one that `polydraft train block` wrote. Start with such a head, or train another kind: dspark."
            )
        return super().started(material, first)

    def loss(self, network: BlockNet, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of all places: those of blocks of masks, whose figures these are, and time-sampled."""
        X = network.num_depths
        T = batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - X, EVERY, device=batch.tokens.device)
        places = at[:, None] + 1 + torch.arange(X + 1, device=at.device)
        blocks = batch.tokens[:, places]
        distributions = batch.distributions[:, places[:, :-1]]
        counted = batch.counted[:, places[:, 1:]]
        masked = torch.ones_like(blocks, dtype=torch.bool)
        masked[..., 0] = False
        logits = network.logits(batch.states, blocks, masked, at)
        whole = unrolled(
            ((logits[:, :, k][counted[:, :, k]], distributions[:, :, k][counted[:, :, k]]) for k in range(X)),
            loss,
        )
        if not torch.is_grad_enabled():
            return whole
        times = torch.rand(*blocks.shape[:2], 1, device=at.device).clamp(min=MIN_TIME)
        masked = masked & (torch.rand(blocks.shape, device=at.device) < times)
        log_q = network.logits(batch.states, blocks, masked, at).float().log_softmax(-1)
        counted_masks = masked[..., 1:] & counted
        sampled = (-(distributions * log_q).sum(-1) * counted_masks / times).sum() / counted.sum().clamp(
            min=1
        )
        return whole._replace(loss=whole.loss + sampled)
