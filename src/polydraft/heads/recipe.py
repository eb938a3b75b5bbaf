"""What a kind of drafter says of its training; `run` does the rest: texts, states, batches, steps, figures, files.

A recipe stands beside its network, in heads/KIND/network.py, and is one line in `registry.RECIPES`. A depth is the number of a drafted token, from 1 on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.heads.checkpoint import HeadCheckpoint, head_config, save_head
from polydraft.heads.network import Material

ROWS = 128

__all__ = ["Batch", "Figures", "Material", "Recipe", "fresh_config", "unrolled"]


class Batch(NamedTuple):
    """Texts, padded. states: of the layers that the recipe reads, side by side.  distributions[:, t]: the target's distribution of tokens[:, t+1] at the draft
    vocabulary, whose mass is at most 1.  counted: positions of tokens that are to be drafted.
    """

    tokens: Int[Tensor, "B T"]
    states: Float[Tensor, "B T F"]
    distributions: Float[Tensor, "B T D"]
    counted: Bool[Tensor, "B T"]


class Figures(NamedTuple):
    """loss: in nats, with a gradient.  acceptance: sum min(p, q) by depth, means over what counts.  agreement: how often the most likely
    tokens are the same.
    """

    loss: Tensor
    acceptance: list[float]
    agreement: list[float]


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
    option: ClassVar[str] = "--head"
    """By which commands take what it wrote."""

    def layers(self, last: int) -> tuple[int, ...]:
        """Whose states it reads, rising, of a target whose last is this: what enters its head."""
        return (last,)

    @abstractmethod
    def fresh(self, material: Material) -> nn.Module:
        """A network before training."""

    def started(self, material: Material, first: Any) -> nn.Module:
        """A network as an older checkpoint has it."""
        return self.network.of(first, material)

    @abstractmethod
    def loss(self, network: Any, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of the first so many depths, or of all where it has fewer."""

    settings: ClassVar[tuple[str, ...]] = ()
    """What `export` writes of a network's configuration."""

    def export(self, network: Any, material: Material, folder: Path) -> None:
        """Write the folder that `checkpoint` reads."""
        config = {name: getattr(network.config, name) for name in self.settings}
        tensors = {network.stored(name): tensor for name, tensor in network.state_dict().items()}
        tensors |= {"lm_head.weight": network.output} if network.owns_output else {}
        save_head(
            folder, self.checkpoint, tensors, material.target, material.layers, material.ids, **config, **self.more(network)
        )

    def more(self, network: Any) -> dict[str, Any]:
        """What else `export` writes into the configuration."""
        return {}


def fresh_config(h: int, **settings: Any) -> Any:
    """The configuration of layers of this width, but for what `settings` say otherwise."""
    width = 64 if h % 64 == 0 else h // max(1, h // 32)
    heads, inner = h // width, -(-8 * h // 24) * 8
    sizes = {"hidden_size": h, "intermediate_size": inner, "num_attention_heads": heads, "head_dim": width}
    return head_config({**sizes, "rms_norm_eps": 1e-5, "rope_theta": 1e5, **settings})


def unrolled(
    depths: Iterable[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]], *, decay: float = 0.8, tv_weight: float = 0.0
) -> Figures:
    """Figures of logits and the target's distributions by depth: the loss is the sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v).

    tv_weight: share of 1 - sum min(p, q) in the loss.

    Example:
        >>> distribution = torch.tensor([[0.75, 0.25]])
        >>> unrolled([(distribution.log(), distribution)]).acceptance
        [1.0]
    """
    total, accepted, agreed = torch.zeros(()), list[float](), list[float]()
    for k, (logits, p) in enumerate(depths):
        loss, overlap, agreement = _Distance.apply(logits, p, tv_weight)
        total = total + decay**k * loss
        accepted.append(float(overlap))
        agreed.append(float(agreement))
    return Figures(total, accepted, agreed)


class _Distance(torch.autograd.Function):
    """(1 - tv_weight) of the cross-entropy less tv_weight of the overlap, a mean over rows; the overlap; how often the most likely tokens are the same.

    The gradient is made with the loss, ROWS rows at a time: rows of a whole vocabulary that stay in the caches are not written and read ten times.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Float[Tensor, "n D"], p: Float[Tensor, "n D"], tv_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, sums = torch.empty_like(logits), torch.zeros(3, dtype=torch.float64)
        for x, distribution, slope in zip(logits.split(ROWS), p.split(ROWS), gradient.split(ROWS), strict=True):
            log_q = x.float().log_softmax(-1)
            agreed = ((log_q == log_q.amax(-1, True)) & (distribution == distribution.amax(-1, True))).any(-1).sum()
            entropy = -torch.linalg.vecdot(distribution, log_q).sum()
            q = log_q.exp_()
            overlap = torch.minimum(distribution, q).sum()
            sums += torch.stack([entropy.double(), overlap.double(), agreed.double()]).cpu()
            if not ctx.needs_input_grad[0]:
                continue
            step = (1 - tv_weight) * (distribution.sum(-1, keepdim=True) * q - distribution)
            if tv_weight:
                below = q * (q < distribution)
                step -= tv_weight * (below - below.sum(-1, keepdim=True) * q)
            slope.copy_(step)
        entropy, overlap, agreed = sums / len(logits)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(overlap, agreed)
        return ((1 - tv_weight) * entropy - tv_weight * overlap).float(), overlap, agreed

    @staticmethod
    def backward(ctx: Any, *wanted: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * (wanted[0] / len(gradient)).to(gradient), None, None
