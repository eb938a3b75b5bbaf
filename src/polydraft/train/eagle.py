"""EAGLE-3's head in torch, and its loss unrolled over its own outputs.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840). At index t, with g[t] the target's states of a low, a middle and a high layer there:

    a_1[t] = layer([embedding of x[t+1]; fc(g[t])])             law of x[t+2]
    a_k[t] = layer([embedding of x[t+k]; a_(k-1)[t]])           law of x[t+k+1]: from the second step the head reads its own output
    loss   = sum over k of decay^(k-1) times -sum_v p(v) ln q_k(v), over the draft vocabulary, p the target's law

In step k index t attends to the first step's keys up to t and, of its own line, to those of steps 2 .. k: what it will see when it drafts.
Trap: a head trained with k = 1 alone has never read its own output, and its second draft is poor.
Tensors are named as the authors name them, so that what is exported is what published checkpoints look like.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from polydraft.atomic import replacing
from polydraft.core import Target
from polydraft.models.eagle import probe

__all__ = ["EagleHead", "HeadShape", "export", "unrolled_loss"]


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


class Norm(nn.Module):
    """Root mean square normalisation with a weight."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(2 * h, shape.num_heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, shape.num_groups * d, bias=False)
        self.v_proj = nn.Linear(2 * h, shape.num_groups * d, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * d, h, bias=False)


class FeedForward(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        h, i = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(h, i, bias=False), nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        h, epsilon = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm = Norm(h, epsilon), Norm(h, epsilon)
        self.post_attention_layernorm = Norm(h, epsilon)
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape)


class EagleHead(nn.Module):
    """The head as it is trained; embeddings and the rows of the output matrix are the target's and stay as they are.

    embeddings: [V, h].  output: [D, h], the target's output matrix at the draft vocabulary.
    """

    embeddings: Tensor
    output: Tensor

    def __init__(self, shape: HeadShape, embeddings: Float[Tensor, "V h"], output: Float[Tensor, "D h"]) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden_size
        self.fc = nn.Linear(len(shape.layers) * h, h, bias=False)
        self.midlayer = Layer(shape)
        self.norm = Norm(h, shape.rms_norm_eps)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("output", output, persistent=False)
        for matrix in self.parameters():
            if matrix.ndim == 2:
                nn.init.normal_(matrix, std=0.02)
        with torch.no_grad():  # what it puts out at first is the state that the target's own head has read
            self.fc.weight[:, -h:] += torch.eye(h)
            self.midlayer.self_attn.o_proj.weight.zero_()
            self.midlayer.mlp.down_proj.weight.zero_()

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
        x = torch.cat([embedded, layer.hidden_norm(states)], -1)
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


def unrolled_loss(
    head: EagleHead,
    tokens: Int[Tensor, "B T"],
    features: Float[Tensor, "B T F"],
    laws: Float[Tensor, "B T D"],
    counted: Bool[Tensor, "B T"],
    *,
    steps: int,
    decay: float = 0.8,
    tv_weight: float = 0.0,
) -> tuple[Tensor, list[float], list[float]]:
    """Loss in nats, and by depth the acceptance sum min(p, q) and how often the most likely tokens agree, means over what counts.

    laws[:, t]: the target's law of x[t+1] at the draft vocabulary, whose mass is at most 1.  counted: positions of drafted tokens.
    tv_weight: share of 1 - sum min(p, q) in the loss.
    """
    _B, T = tokens.shape
    length = T - 1 - steps
    states, lines = head.fc(features[:, :length]), list[tuple[Tensor, Tensor]]()
    total, kept, agreed = torch.zeros(()), list[float](), list[float]()
    for k in range(1, steps + 1):
        states = head.step(tokens[:, k : k + length], states, lines)
        wanted = counted[:, k + 1 : k + 1 + length]
        log_q = head.logits(states)[wanted].float().log_softmax(-1)
        p = laws[:, k : k + length][wanted].float()
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        loss = -(p * log_q).sum(-1).mean()
        total = total + decay ** (k - 1) * ((1 - tv_weight) * loss - tv_weight * overlap)
        kept.append(float(overlap.detach()))
        agreed.append(float((p.argmax(-1) == log_q.argmax(-1)).float().mean()))
    return total, kept, agreed


def export(head: EagleHead, ids: np.ndarray, target: Target, folder: Path) -> None:
    """Write the folder that `models.eagle.EagleCheckpoint` reads. ids: [D] the draft vocabulary, rising.

    Raises:
        OSError: what was there before stays.
    """
    from safetensors.torch import save

    shape = head.shape
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    tensors |= {"d2t": torch.from_numpy(ids - np.arange(len(ids))), "target_probe": probe(target).bfloat16()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": len(head.embeddings),
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(save(tensors))
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode())
