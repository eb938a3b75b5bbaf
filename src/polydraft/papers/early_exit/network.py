"""An early exit of a target in torch: a feed-forward between one of its first layers and its own output rows.

    q(x[t+1]) = softmax(H norm(h^E[t] + feed_forward(h^E[t])))        h^E[t]: the target's state at t behind layer E

As a draft model it runs the target's first layers over drafted nodes, which attend to the target's own KV cache and to each other.

Training leaves the target as it is; LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains the target itself to exit early. A draft's KV
cache entries are the target's own, whatever its depth: one distribution is learnt for all depths.

On disk, see `heads.checkpoint`, is what stands between a layer of a target and the target's own output rows:

    config.json          `exit_layers`: the layer behind which it exits
    model.safetensors    mlp_norm, mlp.*: a feed-forward beside the state; norm

A target that was trained to exit early (LayerSkip) needs none of it: its own norm and head serve behind any layer.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.core import Scores, Target, TokenTree
from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.losses import unrolled
from polydraft.heads.network import HeadModel, HeadNetwork, Material, device_of
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe, fresh_config
from polydraft.heads.target_slots import TargetSlots
from polydraft.models.slots import TREE_ROOM
from polydraft.models.torch.door import into, inward, outward
from polydraft.models.torch.llama_layer import FeedForward, KeyValues, RMSNorm, rms_norm, target_layer
from polydraft.models.torch.tree_attention import node_mask
from polydraft.numerics.floats import as_float32
from polydraft.papers.target_layers import llama_checkpoint


class ExitHead(HeadNetwork):
    """The exit; the output rows are the target's and stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h = material.hidden_size
        epsilon = config.rms_norm_eps
        self.mlp_norm = RMSNorm(h, epsilon)
        self.norm = RMSNorm(h, epsilon)
        self.mlp = FeedForward(h, config.intermediate_size)
        nn.init.zeros_(self.mlp.down_proj.weight)  # it begins as the state itself

    def forward(self, states: Float[Tensor, "*N h"]) -> Float[Tensor, "*N D"]:
        """Logits over the draft vocabulary."""
        return self.vocabulary(self.norm(states + self.mlp(self.mlp_norm(states))))


class ExitCheckpoint(HeadCheckpoint):
    """An early exit; without tensors it is the target's own norm and head."""

    kind = "early-exit"
    LAYERS = "exit_layers"

    @classmethod
    def untrained(cls, layer: int, target: Target) -> "ExitCheckpoint":
        """The target's own norm and head behind a layer."""
        return cls(SimpleNamespace(), (layer,), {}, np.arange(target.vocab_size))

    def parts(self) -> dict[str, tuple[int, ...]]:
        """See `HeadCheckpoint.parts`."""
        h = self.config.hidden_size
        inner = self.config.intermediate_size
        return {
            "mlp_norm.weight": (h,),
            "norm.weight": (h,),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
        }

    def check(self, target: Target) -> None:
        """Refuse another target than the exit was trained for, and layers that are not there or are all of them.

        Raises:
            IncompatibleError: another width, vocabulary or model.
            InvalidInputError: a layer out of range.
        """
        last = max(target.offers.hidden, default=0)
        if len(self.layers) != 1 or not 1 <= self.layers[0] < last:
            raise InvalidInputError(
                f"an exit behind layer {', '.join(map(str, self.layers))} was given; expected one of 1 to {last - 1}: the target has {last} layers."
            )
        if self.tensors:
            super().check(target)


class ExitModel(TargetSlots, HeadModel):
    """The first layers of a target and an exit behind them, as a draft model in the target's own slots.

    Raises:
        IncompatibleError: a target of another family, an exit of another target, or behind no layer of it.
    """

    network_class = ExitHead

    def __init__(self, head: ExitCheckpoint, target: Any) -> None:
        checkpoint = llama_checkpoint(target, "early-exit")
        if head.tensors:
            super().__init__(head, target)
        else:
            head.check(target)
            norm = into(as_float32(checkpoint.read("model.norm.weight")), device_of(target))
            self.name = head.kind
            self.network: Any = lambda x: inward(
                target.head(outward(rms_norm(x, norm, checkpoint.config.rms_norm_eps))), norm
            )
        self.take_place(device_of(target), torch.float32)
        self.share(target)
        self._layers = [target_layer(checkpoint, l) for l in range(head.layers[0])]
        attention = self._layers[0].self_attn
        room = len(self._layers), target.max_num_seqs, TREE_ROOM, attention.num_groups, attention.width
        self._entries = torch.zeros(room, device=self.device), torch.zeros(room, device=self.device)
        """Keys and values of the nodes of the proposal that is being drawn."""

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1; see `core.Target.score`."""
        self.check_tree(tree.num_nodes)
        self.check_slots(slots, [tree.num_nodes] * len(slots), TREE_ROOM)
        lengths = self.lengths[slots]
        rows = torch.tensor(list(slots)).to(self.device)
        mask, depths = node_mask(np.zeros(len(slots), np.int64), tree.host.parents, since)
        visible = torch.from_numpy(mask == 0).to(self.device)[:, None]
        positions = torch.from_numpy(depths + lengths[:, None]).to(self.device)[:, None]
        committed = (
            torch.arange(int(lengths.max()), device=self.device)
            < torch.from_numpy(lengths).to(self.device)[:, None]
        )
        x = inward(self.target.embed(tree.host.tokens[:, since:]), self, torch.float32)[:, None]
        for l, layer in enumerate(self._layers):
            keys, values = (entries[l, rows, :since] for entries in self._entries)
            text = KeyValues(*self.target.cached(l, slots), committed[:, None, None])
            earlier = KeyValues(keys, values, visible[..., :since])
            x, new = layer(x, positions, [text, earlier], visible[..., since:])
            for entries, states in zip(self._entries, new, strict=False):
                entries[l, rows, since : tree.num_nodes] = states[:, 0].to(entries.dtype)
        return self._scores(slots, tree, since, self.network(x[:, 0].float()))


class ExitRecipe(Recipe):
    """See the module."""

    checkpoint = ExitCheckpoint
    network = ExitHead
    settings = ("intermediate_size", "rms_norm_eps")

    def layers(self, last: int) -> tuple[int, ...]:
        """A sixth of the layers draft."""
        return (max(1, last // 6),)

    def fresh(self, material: Material) -> ExitHead:
        """An exit that does nothing yet to the state."""
        exit_ = ExitHead(fresh_config(material.hidden_size), material)
        checkpoint = material.target.checkpoint
        norm = "model.norm.weight"
        if checkpoint is not None and norm in checkpoint.outlines:
            exit_.norm.weight.data.copy_(into(checkpoint.read(norm)))
        return exit_

    def loss(self, network: ExitHead, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of all depths, which are one."""
        counted = batch.counted[:, 1:]
        logits = network(batch.states[:, :-1][counted].float())
        distributions = batch.distributions[:, :-1][counted]
        figures = unrolled([(logits, distributions)], loss)
        return Figures(figures.loss, figures.acceptance * steps, figures.agreement * steps)
