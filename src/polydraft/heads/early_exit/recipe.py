"""An early exit of the target: a feed-forward between one of its first layers and its own output rows.

Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710) train the target itself to exit early; here it stays as it is, and the exit learns.

    q(x[t+1]) = softmax(H norm(h^E[t] + feed_forward(h^E[t])))        h^E[t]: the target's state at t behind layer E

A draft's columns are the target's own, whatever its depth: one law is learnt for all depths.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from polydraft.heads.checkpoint import save_head
from polydraft.heads.eagle.recipe import FeedForward, Norm
from polydraft.heads.early_exit.checkpoint import ExitCheckpoint
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled

__all__ = ["ExitHead", "ExitRecipe"]


class ExitHead(nn.Module):
    """The exit as it is trained; the output rows are the target's and stay as they are. output: [D, h]."""

    output: Tensor

    def __init__(self, output: Float[Tensor, "D h"], intermediate_size: int, rms_norm_eps: float) -> None:
        super().__init__()
        h = output.shape[1]
        self.mlp_norm, self.norm = Norm(h, rms_norm_eps), Norm(h, rms_norm_eps)
        self.mlp = FeedForward(h, intermediate_size)
        self.register_buffer("output", output, persistent=False)
        nn.init.zeros_(self.mlp.down_proj.weight)  # it begins as the state itself

    def forward(self, states: Float[Tensor, "n h"]) -> Float[Tensor, "n D"]:
        """Logits over the draft vocabulary."""
        return linear(self.norm(states + self.mlp(self.mlp_norm(states))), self.output)


class ExitRecipe(Recipe):
    """See `recipe.Recipe`."""

    checkpoint = ExitCheckpoint

    def layers(self, last: int) -> tuple[int, ...]:
        """A sixth of the layers draft."""
        return (max(1, last // 6),)

    def fresh(self, material: Material) -> ExitHead:
        """An exit that does nothing yet to the state."""
        made = ExitHead(material.output, -(-8 * material.hidden_size // 24) * 8, 1e-5)
        arrays = getattr(material.target, "arrays", None)
        if arrays is not None:
            made.norm.weight.data.copy_(torch.from_numpy(arrays.weights.norm))
        return made

    def started(self, material: Material, first: ExitCheckpoint) -> ExitHead:
        """An exit that was trained before."""
        made = ExitHead(material.output, first.config.intermediate_size, first.config.rms_norm_eps)
        made.load_state_dict({name: tensor.float() for name, tensor in first.tensors.items() if name in made.state_dict()})
        return made

    def loss(self, network: ExitHead, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all depths, which are one."""
        wanted = batch.counted[:, 1:]
        found = unrolled([(network(batch.states[:, :-1][wanted].float()), batch.laws[:, :-1][wanted])], tv_weight=tv_weight)
        return Figures(found.loss, found.acceptance * steps, found.agreement * steps)

    def export(self, network: ExitHead, material: Material, folder: Path) -> None:
        """Write the folder that `ExitCheckpoint` reads."""
        widths = {"intermediate_size": network.mlp.up_proj.out_features, "rms_norm_eps": network.norm.epsilon}
        save_head(folder, ExitCheckpoint, network.state_dict(), material.target, material.layers, material.ids, **widths)
