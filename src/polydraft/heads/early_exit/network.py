"""An early exit of a target in torch: a feed-forward between one of its first layers and its own output rows.

    q(x[t+1]) = softmax(H norm(h^E[t] + feed_forward(h^E[t])))        h^E[t]: the target's state at t behind layer E

As a draft model it runs the target's first layers over drafted nodes, which attend to the target's own KV cache and to each other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.core import Scores, TokenTree
from polydraft.heads.early_exit.checkpoint import ExitCheckpoint
from polydraft.heads.network import HeadModel, HeadNetwork, Material, TargetSlots, llama_checkpoint
from polydraft.models.llama_layer import FeedForward, KeyValues, Norm, rms_norm, target_layer
from polydraft.models.slots import TREE_ROOM
from polydraft.models.tree_attention import node_mask

__all__ = ["ExitHead", "ExitModel"]


class ExitHead(HeadNetwork):
    """The exit; the output rows are the target's and stay as they are."""

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h, epsilon = material.hidden_size, config.rms_norm_eps
        self.mlp_norm, self.norm = Norm(h, epsilon), Norm(h, epsilon)
        self.mlp = FeedForward(h, config.intermediate_size)
        nn.init.zeros_(self.mlp.down_proj.weight)  # it begins as the state itself

    def forward(self, states: Float[Tensor, "*N h"]) -> Float[Tensor, "*N D"]:
        """Logits over the draft vocabulary."""
        return self.vocabulary(self.norm(states + self.mlp(self.mlp_norm(states))))


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
            norm = checkpoint.read("model.norm.weight").float().to(target.device)
            self.name = head.kind
            self.network: Any = lambda x: target.head(rms_norm(x, norm, checkpoint.config.rms_norm_eps))
        self.share(target)
        self._layers = [target_layer(checkpoint, l) for l in range(head.layers[0])]
        attention = self._layers[0].self_attn
        room = len(self._layers), target.max_num_seqs, TREE_ROOM, attention.num_groups, attention.width
        self._entries = torch.zeros(room, device=self.device), torch.zeros(room, device=self.device)
        """Keys and values of the nodes of the proposal that is being drawn."""

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), aux: Any = None, since: int = 0
    ) -> Scores:
        """One pass over the nodes `since` .. N-1; see `core.Target.score`."""
        self.check_tree(tree.num_nodes)
        self.check_slots(slots, [tree.num_nodes] * len(slots), TREE_ROOM)
        lengths, rows = self.lengths[slots], torch.tensor(list(slots)).to(self.device)
        mask, depths = node_mask(np.zeros(len(slots), np.int64), tree.host[1], since)
        visible = torch.from_numpy(mask == 0).to(self.device)[:, None]
        positions = torch.from_numpy(depths + lengths[:, None]).to(self.device)[:, None]
        committed = torch.arange(int(lengths.max()), device=self.device) < torch.from_numpy(lengths).to(self.device)[:, None]
        x = self.target.embed(tree.tokens[:, since:])[:, None].float()
        for l, layer in enumerate(self._layers):
            keys, values = (entries[l, rows, :since] for entries in self._entries)
            text = KeyValues(*self.target.cached(l, slots), committed[:, None, None])
            earlier = KeyValues(keys, values, visible[..., :since])
            x, new = layer(x, positions, [text, earlier], visible[..., since:])
            for entries, states in zip(self._entries, new, strict=False):
                entries[l, rows, since : tree.num_nodes] = states[:, 0].to(entries.dtype)
        return self._scores(slots, tree, since, self.network(x[:, 0].float()))
