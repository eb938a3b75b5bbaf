"""Medusa's heads in torch: each says what comes so many tokens behind the next one, whatever is drafted on the way.

Cai et al. 2024 (arXiv 2401.10774). At index t, with h[t] the target's last state:

    x_k[t] = h[t], then block by block x + silu(W x + b)         distribution of x[t+k+1]

All heads share the target's output rows, or each has its own, as the authors'. At first a block does nothing: every head says what the target
says of the next token.

Training is Medusa-1 of the paper, the target as it is, against the target's distributions:

    loss   = sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v)     p: the target's distribution there, q_k: of head k
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from polydraft.errors import IncompatibleError
from polydraft.heads.checkpoint import HeadCheckpoint, head_config
from polydraft.heads.losses import unrolled
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint
from polydraft.heads.network import DepthModel, HeadNetwork, Material
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe
from polydraft.models.torch.door import into


class MedusaHeads(HeadNetwork):
    """Heads of so many blocks each. own_rows: [K, D, h] output rows of each, where they are not the target's."""

    own_rows: Tensor | None = None

    def __init__(self, config: Any, material: Material) -> None:
        super().__init__(config, material)
        h = material.hidden_size
        self.num_depths = int(config.medusa_num_heads)
        num_blocks = int(config.medusa_num_layers)
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(h, h) for _ in range(num_blocks)) for _ in range(self.num_depths)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def of(cls, checkpoint: HeadCheckpoint, material: Material) -> Any:
        """See `HeadNetwork.of`."""
        network = super().of(checkpoint, material)
        last = int(checkpoint.config.medusa_num_layers)
        names = [f"{k}.{last}.weight" for k in range(network.num_depths)]
        if names[0] in checkpoint.tensors:
            rows = torch.stack([into(checkpoint.tensors[name]) for name in names])
            network.register_buffer("own_rows", rows.to(network.output.dtype), persistent=False)
        return network

    @staticmethod
    def stored(name: str) -> str:
        """heads.1.0.weight as the authors call it."""
        _, k, l, part = name.split(".")
        return f"{k}.{l}.linear.{part}"

    def logits(self, states: Float[Tensor, "... h"], k: int) -> Float[Tensor, "... D"]:
        """What head k, from 0 on, says."""
        for block in self.heads[k]:  # pyright: ignore[reportGeneralTypeIssues]
            states = states + silu(block(states.to(block.weight.dtype)))
        if self.own_rows is None:
            return self.vocabulary(states)
        return states.to(self.own_rows.dtype) @ self.own_rows[k, : len(self.output)].T

    def depths(self, batch: Batch) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's distributions of each head."""
        length = batch.tokens.shape[1] - 1 - self.num_depths
        for k in range(1, self.num_depths + 1):
            counted = batch.counted[:, k + 1 : k + 1 + length]
            yield (
                self.logits(batch.states[:, :length][counted].float(), k - 1),
                batch.distributions[:, k : k + length][counted].float(),
            )


class MedusaModel(DepthModel):
    """The heads as a draft model; see `DepthModel`."""

    network_class = MedusaHeads

    def foretold(self, slots: Sequence[int], states: Float[Tensor, "B h"]) -> Float[Tensor, "B K D"]:
        """What the heads say of these states."""
        return torch.stack([self.network.logits(states.float(), k) for k in range(self.depths)], 1)


class MedusaRecipe(Recipe):
    """See the module. sizes: heads, and blocks of each."""

    checkpoint = MedusaCheckpoint
    network = MedusaHeads
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

    def loss(self, network: MedusaHeads, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of as many depths as there are heads."""
        return unrolled(network.depths(batch), loss)
