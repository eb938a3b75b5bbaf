"""Training of an early exit, the target as it is; LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains the target itself to exit early.

A draft's KV cache entries are the target's own, whatever its depth: one distribution is learnt for all depths.
"""

from polydraft.heads.early_exit.checkpoint import ExitCheckpoint
from polydraft.heads.early_exit.network import ExitHead
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, fresh_config, unrolled

__all__ = ["ExitRecipe"]


class ExitRecipe(Recipe):
    """See `recipe.Recipe`."""

    checkpoint, network = ExitCheckpoint, ExitHead
    settings = ("intermediate_size", "rms_norm_eps")

    def layers(self, last: int) -> tuple[int, ...]:
        """A sixth of the layers draft."""
        return (max(1, last // 6),)

    def fresh(self, material: Material) -> ExitHead:
        """An exit that does nothing yet to the state."""
        exit_ = ExitHead(fresh_config(material.hidden_size), material)
        checkpoint, norm = material.target.checkpoint, "model.norm.weight"
        if checkpoint is not None and norm in checkpoint.outlines:
            exit_.norm.weight.data.copy_(checkpoint.read(norm))
        return exit_

    def loss(self, network: ExitHead, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all depths, which are one."""
        counted = batch.counted[:, 1:]
        logits, laws = network(batch.states[:, :-1][counted].float()), batch.laws[:, :-1][counted]
        figures = unrolled([(logits, laws)], tv_weight=tv_weight)
        return Figures(figures.loss, figures.acceptance * steps, figures.agreement * steps)
