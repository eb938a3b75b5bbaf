"""Training of hidden transfer, the target as it is (Wu et al. 2024, arXiv 2404.12022).

loss     sum over i of 0.8^(i-1) times -sum_v p(v) ln q_i(v), p the target's distribution there, q_i: of `network.TransferNet`
"""

from polydraft.heads.checkpoint import head_config
from polydraft.heads.hidden_transfer.checkpoint import TransferCheckpoint
from polydraft.heads.hidden_transfer.network import TransferNet
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled

__all__ = ["TransferRecipe"]


class TransferRecipe(Recipe):
    """See the module. `layers` of the options are t_1 .. t_k."""

    checkpoint, network = TransferCheckpoint, TransferNet

    def layers(self, last: int) -> tuple[int, ...]:
        """Three rows, each a layer behind the one before; the first one behind four fifths of all."""
        first = max(1, min(4 * last // 5, last - 3))
        return first, first + 1, first + 2

    def fresh(self, material: Material) -> TransferNet:
        """Maps that change nothing."""
        return TransferNet(head_config({"hidden_size": material.hidden_size}), material)

    def loss(self, network: TransferNet, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all rows."""
        return unrolled(network.depths(batch), tv_weight=tv_weight)
