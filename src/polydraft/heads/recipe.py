"""What a kind of drafter says of its training; `run` does the rest: texts, states, batches, steps, figures, files.

A recipe stands beside its network, in heads/KIND/network.py, and is named in `registry.HEADS`. A depth is the number of a drafted token, from 1 on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.heads.checkpoint import HeadCheckpoint, head_config, save_head
from polydraft.heads.losses import DECAY, Figures, Loss
from polydraft.heads.network import Material
from polydraft.models.torch.door import out


class Batch(NamedTuple):
    """Texts, padded. states: of the layers that the recipe reads, side by side.  distributions[:, t]: the target's distribution of tokens[:, t+1] at the draft
    vocabulary, whose mass is at most 1.  counted: positions of tokens that are to be drafted.
    """

    tokens: Int[Tensor, "B T"]
    states: Float[Tensor, "B T F"]
    distributions: Float[Tensor, "B T D"]
    counted: Bool[Tensor, "B T"]


class Recipe(ABC):
    """One kind. A network is a module of torch; what is not trained of it are buffers that are not persistent."""

    checkpoint: ClassVar[type[HeadCheckpoint]]
    """What `export` writes, and what training can begin with."""
    network: ClassVar[Any]
    """Its class in torch, a `HeadNetwork`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Of `run.Options`, where they are others than those."""
    sizes: ClassVar[Mapping[str, int]] = {}
    """Numbers that the user may choose of a fresh network, with their defaults."""
    decay: ClassVar[float] = DECAY
    """Weight of a depth in the loss over that of the one before, where the user gives none."""
    reads_three: ClassVar[bool] = False
    """Whether it reads the states of three layers of the target."""
    option: ClassVar[str] = "--head"
    """By which commands take what it wrote."""

    def layers(self, last: int) -> tuple[int, ...]:
        """Whose states it reads, rising, of a target whose last is this: what enters its head, or a low, a middle and that one."""
        return (max(1, last // 4), last // 2 + 1, last) if self.reads_three else (last,)

    @abstractmethod
    def fresh(self, material: Material) -> nn.Module:
        """A network before training."""

    def started(self, material: Material, first: Any) -> nn.Module:
        """A network as an older checkpoint has it."""
        return self.network.of(first, material)

    @abstractmethod
    def loss(self, network: Any, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of the first so many depths, or of all where it has fewer."""

    def finish(self, network: Any, held: Iterable[Batch]) -> dict[str, Any]:
        """What is done with held-out text once training is over; its figures go into the card."""
        return {}

    settings: ClassVar[tuple[str, ...]] = ()
    """What `export` writes of a network's configuration."""

    def export(self, network: Any, material: Material, folder: Path) -> None:
        """Write the folder that `checkpoint` reads."""
        config = {name: getattr(network.config, name) for name in self.settings}
        tensors = {network.stored(name): out(tensor) for name, tensor in network.state_dict().items()}
        tensors |= {"lm_head.weight": out(network.output)} if network.owns_output else {}
        save_head(
            folder,
            self.checkpoint,
            tensors,
            material.target,
            material.layers,
            material.ids,
            **config,
            **self.more(network),
        )

    def more(self, network: Any) -> dict[str, Any]:
        """What else `export` writes into the configuration."""
        return {}


def fresh_config(h: int, **settings: Any) -> Any:
    """The configuration of layers of this width, but for what `settings` say otherwise."""
    width = 64 if h % 64 == 0 else h // max(1, h // 32)
    heads = h // width
    inner = -(-8 * h // 24) * 8
    sizes = {"hidden_size": h, "intermediate_size": inner, "num_attention_heads": heads, "head_dim": width}
    return head_config({**sizes, "rms_norm_eps": 1e-5, "rope_theta": 1e5, **settings})
