"""EAGLE-3's head in torch, and its loss unrolled over its own outputs.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840). At index t, with g[t] the target's states of a low, a middle and a high layer there:

    a_1[t] = layer([embedding of x[t+1]; fc(g[t])])             law of x[t+2]
    a_k[t] = layer([embedding of x[t+k]; a_(k-1)[t]])           law of x[t+k+1]: from the second step the head reads its own output
    loss   = sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v), over the draft vocabulary, p the target's law

In step k index t attends to the first step's keys up to t and, of its own line, to those of steps 2 .. k: what it will see when it drafts.
Trap: a head trained with k = 1 alone has never read its own output, and its second draft is poor.
Tensors are named as the authors name them, so that what is exported is what published checkpoints look like.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from polydraft.heads.checkpoint import save_head
from polydraft.heads.eagle.checkpoint import EagleCheckpoint, rope_theta
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled
from polydraft.models.checkpoint import head_width

__all__ = ["EagleHead", "EagleRecipe", "HeadShape"]


@dataclass(frozen=True)
class HeadShape:
    """Widths of a head, those of its target but for what is said otherwise.

    layers: whose states it reads, as `Needs.hidden` counts them.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    norm_before_residual: bool = False


class Norm(nn.Module):
    """Root mean square normalisation with a weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.num_heads * d, bias=False)
        self.k_proj = nn.Linear(inputs, shape.num_groups * d, bias=False)
        self.v_proj = nn.Linear(inputs, shape.num_groups * d, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * d, h, bias=False)


class FeedForward(nn.Module):
    def __init__(self, h: int, i: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(h, i, bias=False), nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """inputs: of its attention."""

    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        h, epsilon = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm = Norm(h, epsilon), Norm(h, epsilon)
        self.post_attention_layernorm = Norm(h, epsilon)
        self.self_attn, self.mlp = Attention(shape, inputs), FeedForward(h, shape.intermediate_size)


class EagleHead(nn.Module):
    """The head as it is trained; embeddings and the rows of the output matrix are the target's and stay as they are.

    embeddings: [V, h].  output: [D, h], the target's output matrix at the draft vocabulary.
    """

    embeddings: Tensor
    output: Tensor
    owns_output = False
    """Whether its output rows are others than its target's."""

    def __init__(self, shape: HeadShape, embeddings: Float[Tensor, "V h"], output: Float[Tensor, "D h"]) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden_size
        self.midlayer = self.open(shape)
        self.norm = Norm(h, shape.rms_norm_eps)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("output", output, persistent=False)
        for matrix in self.parameters():
            if matrix.ndim == 2:
                nn.init.normal_(matrix, std=0.02)
        with torch.no_grad():  # what it puts out at first is the state that the target's own head has read
            self.first.weight[:, -h:] += torch.eye(h)
            self.midlayer.self_attn.o_proj.weight.zero_()
            self.midlayer.mlp.down_proj.weight.zero_()

    def open(self, shape: HeadShape) -> Layer:
        """Make what comes before the layer, and the layer."""
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        return Layer(shape, 2 * shape.hidden_size)

    @property
    def first(self) -> nn.Linear:
        """The matrix that the last state goes through."""
        return self.fc

    def read(self, features: Float[Tensor, "B T F"]) -> Float[Tensor, "B T h"]:
        """The target's states as one of the head's own."""
        return self.fc(features)

    def join(
        self, pairs: Float[Tensor, "B T h2"], states: Float[Tensor, "B T h"]
    ) -> tuple[Float[Tensor, "B T h"], Float[Tensor, "B T d"]]:
        """The rows that the layer adds to, and what its attention reads. pairs: normed embeddings and states, side by side."""
        return pairs[..., self.shape.hidden_size :] if self.shape.norm_before_residual else states, pairs

    def _heads(self, x: Tensor, count: int, positions: Int[Tensor, " T"] | None) -> Float[Tensor, "B N T d"]:
        x = x.unflatten(-1, (count, self.shape.head_dim)).transpose(1, 2)
        if positions is None:
            return x
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(
        self, tokens: Int[Tensor, "B T"], states: Float[Tensor, "B T h"], lines: list[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "B T h"]:
        """One step of all lines. tokens: x[t+k].  states: what the head reads at t.  lines: keys and values of the steps before, to
        which this one's are appended.
        """
        shape, layer = self.shape, self.midlayer
        positions = torch.arange(tokens.shape[1], device=tokens.device) + len(lines)
        embedded = layer.input_layernorm(self.embeddings[tokens])
        states, x = self.join(torch.cat([embedded, layer.hidden_norm(states)], -1), states)
        repeat = shape.num_heads // shape.num_groups
        queries = self._heads(layer.self_attn.q_proj(x), shape.num_heads, positions) * shape.head_dim**-0.5
        keys = self._heads(layer.self_attn.k_proj(x), shape.num_groups, positions).repeat_interleave(repeat, 1)
        values = self._heads(layer.self_attn.v_proj(x), shape.num_groups, None).repeat_interleave(repeat, 1)
        lines.append((keys, values))
        T = tokens.shape[1]
        hidden = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = [(queries @ lines[0][0].transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)]
        weights += [(queries * k).sum(-1, keepdim=True).float() for k, _ in lines[1:]]
        first, *others = torch.cat(weights, -1).softmax(-1).split([T] + [1] * (len(lines) - 1), -1)
        mixed = first.to(values.dtype) @ lines[0][1]
        for weight, (_, v) in zip(others, lines[1:], strict=True):
            mixed = mixed + weight * v
        x = states + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, states: Tensor) -> Float[Tensor, "... D"]:
        """Over the draft vocabulary."""
        return linear(self.norm(states), self.output)

    def depths(self, batch: Batch, steps: int) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's laws of each step."""
        length = batch.tokens.shape[1] - 1 - steps
        states, lines = self.read(batch.states[:, :length]), list[tuple[Tensor, Tensor]]()
        for k in range(1, steps + 1):
            states = self.step(batch.tokens[:, k : k + length], states, lines)
            wanted = batch.counted[:, k + 1 : k + 1 + length]
            yield self.logits(states[wanted]), batch.laws[:, k : k + length][wanted].float()


class EagleRecipe(Recipe):
    """See the module."""

    checkpoint = EagleCheckpoint
    network: ClassVar[type[EagleHead]] = EagleHead
    decay: ClassVar[float] = 0.8
    """Of the weights of the steps in the loss."""

    def layers(self, last: int) -> tuple[int, ...]:
        """A low, a middle and the last."""
        return max(1, last // 4), last // 2 + 1, last

    def fresh(self, material: Material) -> EagleHead:
        """A head of its target's widths."""
        return self.network(_shape(material), material.embeddings, material.output)

    def started(self, material: Material, first: EagleCheckpoint) -> EagleHead:
        """A head that was trained before."""
        c = first.config
        shape = HeadShape(
            c.hidden_size,
            c.intermediate_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            head_width(c),
            material.layers,
            c.rms_norm_eps,
            rope_theta(c),
            first.norm_before_residual,
        )
        head = self.network(shape, material.embeddings, first.output(material.target).bfloat16())
        head.load_state_dict({name: first.tensors[name].float() for name in head.state_dict()})
        head.owns_output = "lm_head.weight" in first.tensors
        return head

    def loss(self, network: EagleHead, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of as many steps over the head's own output."""
        return unrolled(network.depths(batch, steps), decay=self.decay, tv_weight=tv_weight)

    def export(self, network: EagleHead, material: Material, folder: Path) -> None:
        """Write what `heads.eagle.checkpoint` reads."""
        shape, own = network.shape, {"lm_head.weight": network.output} if network.owns_output else {}
        save_head(
            folder,
            self.checkpoint,
            network.state_dict() | own,
            material.target,
            shape.layers,
            material.ids,
            **(
                {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} if self.checkpoint is EagleCheckpoint else {}
            ),
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_groups,
            head_dim=shape.head_dim,
            num_hidden_layers=1,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
            norm_before_residual=shape.norm_before_residual,
            tie_word_embeddings=False,
        )


def _shape(material: Material) -> HeadShape:
    h = material.hidden_size
    width = 64 if h % 64 == 0 else h // max(1, h // 32)
    return HeadShape(h, -(-8 * h // 24) * 8, h // width, h // width, width, material.layers, 1e-5, 1e5)
