"""What a kind of drafter says of its training; `run` does the rest: texts, states, batches, steps, figures, files.

A recipe is one file of this folder and one line in `registry.RECIPES`. A depth is the number of a drafted token, from 1 on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.models.heads import HeadCheckpoint

__all__ = ["Batch", "Figures", "Material", "Recipe", "unrolled"]


class Batch(NamedTuple):
    """Texts, padded. states: of the layers that the recipe reads, side by side.  laws[:, t]: the target's law of tokens[:, t+1] at the draft
    vocabulary, whose mass is at most 1.  counted: positions of tokens that are to be drafted.
    """

    tokens: Int[Tensor, "B T"]
    states: Float[Tensor, "B T F"]
    laws: Float[Tensor, "B T D"]
    counted: Bool[Tensor, "B T"]


class Figures(NamedTuple):
    """loss: in nats, with a gradient.  acceptance: sum min(p, q) by depth, means over what counts.  agreement: how often the most likely
    tokens are the same.
    """

    loss: Tensor
    acceptance: list[float]
    agreement: list[float]


@dataclass(frozen=True)
class Material:
    """What a network is made of. layers: whose states it reads.  ids: [D] the draft vocabulary.  embeddings, output: the target's, [V, h]
    and [D, h], in bfloat16.  sizes: those that `Recipe.sizes` names.
    """

    target: Any
    layers: tuple[int, ...]
    ids: np.ndarray
    embeddings: Tensor
    output: Tensor
    sizes: Mapping[str, int]
    tokenizer: Any = None

    @property
    def hidden_size(self) -> int:
        """Width of a state of the target."""
        return self.output.shape[1]


class Recipe(ABC):
    """One kind. A network is a module of torch; what is not trained of it are buffers that are not persistent."""

    checkpoint: ClassVar[type[HeadCheckpoint]]
    """What `export` writes, and what training can begin with."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Of `run.Options`, where they are others than those."""
    sizes: ClassVar[Mapping[str, int]] = {}
    """Numbers that the user may choose of a fresh network, with their defaults."""
    option: ClassVar[str] = "--head"
    """By which commands take what it wrote."""

    def layers(self, last: int) -> tuple[int, ...]:
        """Whose states it reads, rising, of a target whose last is this: what enters its head."""
        return (last,)

    @abstractmethod
    def fresh(self, material: Material) -> nn.Module:
        """A network before training."""

    @abstractmethod
    def started(self, material: Material, first: Any) -> nn.Module:
        """A network as an older checkpoint has it."""

    @abstractmethod
    def loss(self, network: Any, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of the first so many depths, or of all where it has fewer."""

    @abstractmethod
    def export(self, network: Any, material: Material, folder: Path) -> None:
        """Write the folder that `checkpoint` reads."""


def unrolled(
    depths: Iterable[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]], *, decay: float = 0.8, tv_weight: float = 0.0
) -> Figures:
    """Figures of logits and the target's laws by depth: the loss is the sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v).

    tv_weight: share of 1 - sum min(p, q) in the loss.

    Example:
        >>> law = torch.tensor([[0.75, 0.25]])
        >>> unrolled([(law.log(), law)]).acceptance
        [1.0]
    """
    total, kept, agreed = torch.zeros(()), list[float](), list[float]()
    for k, (logits, p) in enumerate(depths):
        log_q = logits.float().log_softmax(-1)
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        loss = -(p * log_q).sum(-1).mean()
        total = total + decay**k * ((1 - tv_weight) * loss - tv_weight * overlap)
        kept.append(float(overlap.detach()))
        agreed.append(float((p.argmax(-1) == log_q.argmax(-1)).float().mean()))
    return Figures(total, kept, agreed)
