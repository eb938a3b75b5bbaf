"""Medusa's heads in torch: the target stays as it is, each head learns what comes so many tokens behind the next one.

Cai et al. 2024 (arXiv 2401.10774), Medusa-1. At index t, with h[t] the target's last state:

    x_k[t] = h[t], then block by block x + silu(W x + b)         law of x[t+k+1], whatever x[t+1] .. x[t+k] are
    loss   = sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v)     p: the target's law there

The authors give each head its own output rows; here all heads share the target's, which are as many weights as twenty blocks.
At first a block does nothing: every head says what the target says of the next token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from polydraft.errors import IncompatibleError
from polydraft.heads.checkpoint import save_head
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled

__all__ = ["MedusaHeads", "MedusaRecipe"]


class MedusaHeads(nn.Module):
    """heads: of so many blocks each.  output: [D, h] the target's rows, which stay as they are."""

    output: Tensor

    def __init__(self, num_heads: int, num_blocks: int, output: Float[Tensor, "D h"]) -> None:
        super().__init__()
        h = output.shape[1]
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(h, h) for _ in range(num_blocks)) for _ in range(num_heads))
        self.register_buffer("output", output, persistent=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def logits(self, states: Float[Tensor, "... h"], k: int) -> Float[Tensor, "... D"]:
        """What head k, from 0 on, says."""
        for block in self.heads[k]:  # pyright: ignore[reportGeneralTypeIssues]
            states = states + silu(block(states))
        return linear(states.to(self.output.dtype), self.output)

    def depths(self, batch: Batch, steps: int) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's laws of each head."""
        length = batch.tokens.shape[1] - 1 - steps
        for k in range(1, steps + 1):
            wanted = batch.counted[:, k + 1 : k + 1 + length]
            yield self.logits(batch.states[:, :length][wanted].float(), k - 1), batch.laws[:, k : k + length][wanted].float()


class MedusaRecipe(Recipe):
    """See the module. sizes: heads, and blocks of each."""

    checkpoint = MedusaCheckpoint
    sizes: ClassVar = {"heads": 4, "blocks": 1}

    def fresh(self, material: Material) -> MedusaHeads:
        """Heads that say what the target says of the next token."""
        return MedusaHeads(material.sizes["heads"], material.sizes["blocks"], material.output)

    def started(self, material: Material, first: MedusaCheckpoint) -> MedusaHeads:
        """Heads that were trained before.

        Raises:
            IncompatibleError: heads with output rows of their own.
        """
        if first.has_own_rows:
            raise IncompatibleError(
                "heads with output rows of their own were given to begin with; expected heads that use the target's. Begin with none."
            )
        heads = MedusaHeads(first.num_heads, first.num_blocks, first.output(material.target).bfloat16())
        names = {_stored(name): name for name in heads.state_dict()}
        heads.load_state_dict({names[name]: tensor.float() for name, tensor in first.tensors.items() if name in names})
        return heads

    def loss(self, network: MedusaHeads, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of as many heads."""
        return unrolled(network.depths(batch, len(network.heads)), tv_weight=tv_weight)

    def export(self, network: MedusaHeads, material: Material, folder: Path) -> None:
        """Write what `heads.medusa.checkpoint` reads."""
        tensors = {_stored(name): tensor for name, tensor in network.state_dict().items()}
        sizes = {"medusa_num_heads": len(network.heads), "medusa_num_layers": len(network.heads[0])}  # pyright: ignore
        save_head(folder, MedusaCheckpoint, tensors, material.target, material.layers, material.ids, **sizes)


def _stored(name: str) -> str:
    """heads.1.0.weight as the authors call it."""
    _, k, l, part = name.split(".")
    return f"{k}.{l}.linear.{part}"
