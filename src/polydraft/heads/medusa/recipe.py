"""Medusa's training, the target as it is: Medusa-1 of Cai et al. 2024 (arXiv 2401.10774), against the target's distributions.

loss   = sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v)     p: the target's distribution there, q_k: of `network.MedusaHeads`
"""

from typing import ClassVar

from polydraft.errors import IncompatibleError
from polydraft.heads.checkpoint import head_config
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint
from polydraft.heads.medusa.network import MedusaHeads
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled

__all__ = ["MedusaRecipe"]


class MedusaRecipe(Recipe):
    """See the module. sizes: heads, and blocks of each."""

    checkpoint, network = MedusaCheckpoint, MedusaHeads
    sizes: ClassVar = {"heads": 4, "blocks": 1}
    settings = ("medusa_num_heads", "medusa_num_layers")

    def fresh(self, material: Material) -> MedusaHeads:
        """Heads that say what the target says of the next token."""
        sizes = {"medusa_num_heads": material.sizes["heads"], "medusa_num_layers": material.sizes["blocks"]}
        return MedusaHeads(head_config(sizes), material)

    def started(self, material: Material, first: MedusaCheckpoint) -> MedusaHeads:
        """Heads that were trained before.

        Raises:
            IncompatibleError: heads with output rows of their own.
        """
        if first.has_own_rows:
            raise IncompatibleError(
                "heads with output rows of their own were given to begin with; expected heads that use the target's. Begin with none."
            )
        return MedusaHeads.of(first, material)

    def loss(self, network: MedusaHeads, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of as many depths as there are heads."""
        return unrolled(network.depths(batch), tv_weight=tv_weight)
