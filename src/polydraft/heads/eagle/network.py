"""EAGLE-3's head in torch, unrolled over its own outputs in training, and as a draft model on any device.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840). At index t, with g[t] the target's states of a low, a middle and a high layer there:

    a_1[t] = layer([embedding of x[t+1]; fc(g[t])])             distribution of x[t+2]
    a_k[t] = layer([embedding of x[t+k]; a_(k-1)[t]])           of x[t+k+1]: from the second step the head reads its own output

In step k index t attends to the first step's keys up to t and, of its own line, to those of steps 2 .. k: what it will see when it drafts.
Tensors are named as the authors name them, so that what is exported is what published checkpoints look like.

Training unrolls the loss over the head's own outputs:

    loss   = sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v), over the draft vocabulary, p the target's distribution

Trap: a head trained with k = 1 alone has never read its own output, and its second draft is poor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.core import Scores, TokenTree
from polydraft.heads.checkpoint import HeadCheckpoint, has_head_norms
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.losses import unrolled
from polydraft.heads.network import HeadModel, HeadNetwork, Material, ReadsStates, new_cache
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe, fresh_config
from polydraft.models.rotary import head_width, rope_parameters
from polydraft.models.slots import TREE_ROOM, RowAndStates
from polydraft.models.torch.door import inward
from polydraft.models.torch.llama_layer import KeyValues, LlamaLayer, RMSNorm, attend
from polydraft.models.torch.tree_attention import node_mask


class EagleHead(HeadNetwork):
    """The head; embeddings and the rows of the output matrix are the target's and stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h = config.hidden_size
        epsilon = config.rms_norm_eps
        self.midlayer = self.open(len(material.layers))
        self.midlayer.hidden_norm = RMSNorm(h, epsilon)
        further = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict(
            {str(i): LlamaLayer(config, head_norms=has_head_norms(config)) for i in further}
        )
        self.norm = RMSNorm(h, epsilon)
        if (
            not self.norm.weight.is_meta
        ):  # an outline has no numbers, and drawing some imports torch's compiler, .8 s
            self._begin(h)

    def _begin(self, h: int) -> None:
        """What it puts out at first is the state that the target's own head has read."""
        for matrix in self.parameters():
            if matrix.ndim == 2:
                nn.init.normal_(matrix, std=0.02)
        with torch.no_grad():
            self.first.weight[:, -h:] += torch.eye(h)
            self.midlayer.silence()

    def open(self, num_states: int) -> LlamaLayer:
        """Make what comes before the layer, and the layer."""
        config = self.config
        h = self.config.hidden_size
        width = config.target_hidden_size or h
        epsilon = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_states * width, epsilon)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, epsilon) for _ in range(num_states))
        self.fc = nn.Linear(num_states * width, h, bias=False)
        return LlamaLayer(config, 2 * h, head_norms=has_head_norms(config))

    @property
    def first(self) -> nn.Linear:
        """The matrix that the last state goes through."""
        return self.fc

    def read(self, features: Float[Tensor, "B T F"]) -> Float[Tensor, "B T h"]:
        """The target's states as one of the head's own."""
        if hasattr(self, "fc_norm"):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if hasattr(self, "input_norm"):
            features = self.input_norm(features)
        return self.fc(features.to(self.fc.weight.dtype))

    def join(
        self, pairs: Float[Tensor, "*N h2"], states: Float[Tensor, "*N h"]
    ) -> tuple[Float[Tensor, "*N h"], Float[Tensor, "*N i"]]:
        """The rows that the layer adds to, and what its attention reads. pairs: normed embeddings and states, side by side."""
        normed_states = pairs[..., self.config.hidden_size :]
        return normed_states if self.config.norm_before_residual else states, pairs

    def chained(self, outputs: Float[Tensor, "*N h"]) -> Float[Tensor, "*N h"]:
        """What the next step reads of what the layers put out."""
        return self.norm(outputs) if self.config.norm_output else outputs

    @property
    def attentions(self) -> list[Any]:
        """Of all layers."""
        return [layer.self_attn for layer in (self.midlayer, *self.layers.values())]

    def through(
        self,
        embedded: Float[Tensor, "B A N h"],
        states: Float[Tensor, "B A N h"],
        positions: Int[Tensor, "..."],
        sources: Callable[[int, Tensor, Tensor], Sequence[KeyValues]],
    ) -> Float[Tensor, "B A N h"]:
        """Rows of a token and the state before it through the layers. sources: what they attend to in a layer, once their own keys and values are there."""
        layer = self.midlayer
        x, y = self.join(torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], -1), states)  # pyright: ignore[reportCallIssue]
        key_values = sources(0, *layer.self_attn.keys_values(y, positions))
        x = layer.leave(x, attend(layer.self_attn.queries(y, positions), key_values))
        for i, layer in enumerate(self.layers.values(), 1):
            y = layer.input_layernorm(x)  # pyright: ignore[reportCallIssue]
            key_values = sources(i, *layer.self_attn.keys_values(y, positions))  # pyright: ignore
            x = layer.leave(x, attend(layer.self_attn.queries(y, positions), key_values))  # pyright: ignore
        return x

    def step(
        self, tokens: Int[Tensor, "B T"], states: Float[Tensor, "B T h"], lines: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "B T h"]:
        """One step of all lines. tokens: x[t+k].  states: what the head reads at t.  lines: keys and values of the steps before, to
        which this one's are appended.
        """
        at = torch.arange(tokens.shape[1], device=tokens.device)

        def sources(_layer: int, keys: Tensor, values: Tensor) -> list[KeyValues]:
            lines.append((keys, values))
            (first, first_values), *others = [(k[:, :, 0], v[:, :, 0]) for k, v in lines]
            text = KeyValues(first, first_values, (at <= at[:, None])[:, None])
            if not others:
                return [text]
            line_keys, line_values = (torch.stack(parts, 2) for parts in zip(*others, strict=True))
            return [
                text,
                KeyValues(line_keys, line_values, torch.ones(1, dtype=torch.bool, device=at.device)),
            ]

        embedded = self.embeddings[tokens][:, :, None]
        positions = at[:, None] + len(lines)
        return self.through(embedded, states[:, :, None], positions, sources)[:, :, 0]

    def logits(self, states: Tensor) -> Float[Tensor, "... D"]:
        """Over the draft vocabulary."""
        return self.vocabulary(self.norm(states))

    def depths(self, batch: Batch, steps: int) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's distributions of each step."""
        length = batch.tokens.shape[1] - 1 - steps
        states = self.read(batch.states[:, :length])
        lines = list[tuple[Tensor, Tensor]]()
        for k in range(1, steps + 1):
            states = self.step(batch.tokens[:, k : k + length], states, lines)
            counted = batch.counted[:, k + 1 : k + 1 + length]
            yield self.logits(states[counted]), batch.distributions[:, k : k + length][counted].float()


class EagleModel(ReadsStates, HeadModel):
    """The head as a draft model with a KV cache of its own; it reads tokens with the target's states before them, given by `give`.

    A committed token's KV cache entry belongs to the pair of it and the target's state before it; nodes behind the root read their parents' outputs.
    """

    network_class = EagleHead

    def __init__(self, head: HeadCheckpoint, target: Any) -> None:
        super().__init__(head, target)
        attentions = self.network.attentions
        slots = target.max_num_seqs
        bytes_per_token = sum(store.nbytes for store in new_cache(attentions, 1, 1, self.device))
        columns = self.open_slots(
            target.max_model_len, slots, context=0, bytes_per_token=bytes_per_token, device=self.device
        )
        self._cache = new_cache(attentions, slots, columns, self.device)
        self._outputs = torch.zeros(slots, TREE_ROOM, head.config.hidden_size, device=self.device)

    def states_read(self, slot: int, count: int) -> Float[Tensor, "T h"]:
        """See `ReadsStates.states_read`."""
        return self.network.read(inward(self.take(slot, count), self, torch.float32)[None])[0].float()

    @torch.inference_mode()
    def _forward(
        self,
        slots: Sequence[int],
        tokens: Int[np.ndarray, "B M"],
        states: Float[Tensor, "B M h"],
        parents: np.ndarray,
        since: int,
    ) -> Float[Tensor, "B M h"]:
        """Nodes of trees from `since` on through the layer."""
        lengths = self.lengths[slots]
        mask, at = node_mask(lengths, parents, since)
        visible = torch.from_numpy(mask == 0).to(self.device)[:, None]
        positions = torch.from_numpy(at).to(self.device)[:, None]
        slot_ids = torch.tensor(list(slots)).to(self.device)
        columns = torch.from_numpy(lengths[:, None] + np.arange(since, parents.shape[1])).to(self.device)

        def sources(layer: int, *new: Tensor) -> list[KeyValues]:
            for store, entries in zip(self._cache, new, strict=True):
                store[layer, slot_ids[:, None], columns] = entries[:, 0].to(store.dtype)
            keys, values = (store[layer, slot_ids, : visible.shape[-1]] for store in self._cache)
            return [KeyValues(keys, values, visible)]

        embedded = self.embedded(tokens)[:, None]
        outputs = self.network.through(embedded, states[:, None], positions, sources)
        return outputs[:, 0].float()

    @torch.inference_mode()
    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`; there are no hidden states to be had."""
        logits = list[RowAndStates]()
        for slot, ids in token_ids.items():
            states = self.states_read(slot, len(ids))
            chain = np.arange(-1, len(ids) - 1)
            outputs = self._forward([slot], np.array([ids], np.int64), states[None], chain[None], 0)
            logits.append((self.wide(self.network.logits(outputs[0, -1])), []))
        return logits

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1, whose parents were scored before; see `core.Target.score`."""
        self.check_tree(tree.num_nodes)
        self.check_slots(slots, [tree.num_nodes] * len(slots), TREE_ROOM)
        states = self.states_of(slots, tree, since)
        tokens, parents = tree.host
        outputs = self._forward(slots, tokens[:, since:], states, parents, since)
        self.put_out(slots, since, self.network.chained(outputs))
        return self._scores(slots, tree, since, self.network.logits(outputs))

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        here, there = (
            [torch.from_numpy(x[name].copy()).to(self.device) for name in ("slot", "column")]
            for x in (source, target)
        )
        for store in self._cache:
            store[(slice(None), *there)] = store[(slice(None), *here)]


class EagleRecipe(Recipe):
    """See the module."""

    checkpoint = EagleCheckpoint
    network = EagleHead
    reads_three = True
    settings = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    published: ClassVar[dict[str, Any]] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    """What other engines ask for in a configuration."""

    def fresh(self, material: Material) -> EagleHead:
        """A head of its target's widths."""
        return self.network(fresh_config(material.hidden_size), material)

    def loss(self, network: EagleHead, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of as many steps over the head's own output."""
        return unrolled(network.depths(batch, steps), loss)

    def more(self, network: Any) -> dict[str, Any]:
        """The rotation, and what other engines ask for."""
        config = network.config
        rope = rope_parameters(network.config)
        rotation = {"rope_parameters": dict(rope)} if rope else {"rope_theta": config.rope_theta}
        return {
            **self.published,
            **rotation,
            "head_dim": head_width(config),
            "norm_before_residual": bool(config.norm_before_residual),
        } | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
        }
