"""A block diffusion drafter in torch: layers over [last token, masks] that read the target's states as keys and values.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636). At position n, with g[n] the target's states of
some layers there, and the block x[n+1], MASK, ..., MASK at positions n+1 .. n+1+X:

    columns    in every layer keys and values of norm(fc(g[0 .. n]))
    block      x[n+1] sees the columns; places behind it see columns, x[n+1] and each other
    law k      at place k: x[n+1+k]
    loss       sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v) with all places masked, p the target's law there; and, time-sampled:
               at t ~ U(0, 1) each place is masked with chance t, else it shows its token; the masked ones count 1/t

Blocks stand at every `EVERY`-th position, another set each time. Trap: trained with all places masked alone, it has never read a revealed token.
"""

from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from polydraft.heads.checkpoint import save_head
from polydraft.heads.diffusion.checkpoint import DiffusionCheckpoint
from polydraft.heads.eagle.checkpoint import rope_theta
from polydraft.heads.eagle.recipe import FeedForward, Norm
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled
from polydraft.models.checkpoint import head_width

__all__ = ["DiffusionNet", "DiffusionRecipe"]

EVERY = 5
"""Positions of a text for one from which a block goes out."""
LEAST = 0.05
"""Of t: the weight 1/t is bounded."""


class Attention(nn.Module):
    def __init__(self, h: int, heads: int, groups: int, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(h, heads * width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(h, groups * width, bias=False), nn.Linear(h, groups * width, bias=False)
        self.o_proj = nn.Linear(heads * width, h, bias=False)


class Layer(nn.Module):
    def __init__(self, h: int, inner: int, heads: int, groups: int, width: int, theta: float, epsilon: float) -> None:
        super().__init__()
        self.heads, self.groups, self.width, self.theta = heads, groups, width, theta
        self.input_layernorm, self.post_attention_layernorm = Norm(h, epsilon), Norm(h, epsilon)
        self.self_attn, self.mlp = Attention(h, heads, groups, width), FeedForward(h, inner)
        nn.init.zeros_(self.self_attn.o_proj.weight)  # at first a layer adds nothing
        nn.init.zeros_(self.mlp.down_proj.weight)

    def _rotated(self, x: Tensor, count: int, positions: Int[Tensor, "..."]) -> Tensor:
        """[..., count * width] -> [..., heads, width], groups repeated."""
        x = x.unflatten(-1, (count, self.width)).float()
        rates = self.theta ** (-torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = positions[..., None, None] * rates
        (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).repeat_interleave(self.heads // count, -2)

    def forward(
        self, x: Float[Tensor, "B A N h"], columns: Float[Tensor, "B T h"], at: Int[Tensor, " A"], own: Bool[Tensor, "N N"]
    ) -> Float[Tensor, "B A N h"]:
        """Blocks through the layer. columns: normed.  at: the last column that each block sees.  own: which of its rows a row sees."""
        attention, every = self.self_attn, torch.arange(columns.shape[1], device=x.device)
        positions = at[:, None] + 1 + torch.arange(x.shape[2], device=x.device)
        y, repeat = self.input_layernorm(x), self.heads // self.groups

        def values(z: Tensor) -> Tensor:
            return attention.v_proj(z).float().unflatten(-1, (self.groups, self.width)).repeat_interleave(repeat, -2)

        queries = self._rotated(attention.q_proj(y), self.heads, positions) * self.width**-0.5
        past, keys = (
            self._rotated(attention.k_proj(columns), self.groups, every),
            self._rotated(attention.k_proj(y), self.groups, positions),
        )
        seen = torch.einsum("banhd,bthd->bahnt", queries, past).masked_fill(every > at[:, None, None, None], -torch.inf)
        inside = torch.einsum("banhd,bamhd->bahnm", queries, keys).masked_fill(~own, -torch.inf)
        share, own_share = torch.cat([seen, inside], -1).float().softmax(-1).split([len(every), len(own)], -1)
        mixed = torch.einsum("bahnt,bthd->banhd", share, values(columns))
        mixed = mixed + torch.einsum("bahnm,bamhd->banhd", own_share, values(y))
        x = x + attention.o_proj(mixed.flatten(3))
        return x + self.mlp(self.post_attention_layernorm(x))


class DiffusionNet(nn.Module):
    """The drafter as it is trained; embeddings and output rows are the target's and stay as they are. block: X masks."""

    embeddings: Tensor
    output: Tensor

    def __init__(
        self,
        material: Material,
        block: int,
        layers: int,
        inner: int,
        heads: int,
        groups: int,
        width: int,
        theta: float,
        epsilon: float,
    ) -> None:
        super().__init__()
        h, self.block, self.epsilon = material.hidden_size, block, epsilon
        self.fc = nn.Linear(len(material.layers) * h, h, bias=False)
        self.hidden_norm, self.norm = Norm(h, epsilon), Norm(h, epsilon)
        self.mask = nn.Parameter(material.embeddings.float().std() * torch.randn(h))
        self.layers = nn.ModuleList(Layer(h, inner, heads, groups, width, theta, epsilon) for _ in range(layers))
        self.register_buffer("embeddings", material.embeddings, persistent=False)
        self.register_buffer("output", material.output, persistent=False)

    def logits(
        self, states: Float[Tensor, "B T F"], blocks: Int[Tensor, "B A N"], masked: Bool[Tensor, "B A N"], at: Int[Tensor, " A"]
    ) -> Float[Tensor, "B A X D"]:
        """At the places of blocks whose first token is the last known one; those that are masked show the mask."""
        columns = self.hidden_norm(self.fc(states))
        x = torch.where(masked[..., None], self.mask, self.embeddings[blocks].float())
        own = torch.ones(2 * [blocks.shape[2]], dtype=torch.bool, device=x.device)
        own[0, 1:] = False
        for layer in self.layers:
            x = layer(x, columns, at, own)
        return linear(self.norm(x[:, :, 1:]).to(self.output.dtype), self.output)


class DiffusionRecipe(Recipe):
    """See the module. sizes: layers, and places of a block."""

    checkpoint = DiffusionCheckpoint
    sizes: ClassVar = {"layers": 2, "block": 4}

    def layers(self, last: int) -> tuple[int, ...]:
        """A low, a middle and the last."""
        return max(1, last // 4), last // 2 + 1, last

    def fresh(self, material: Material) -> DiffusionNet:
        """A drafter of its target's width, whose layers add nothing yet."""
        h = material.hidden_size
        width = 64 if h % 64 == 0 else h // max(1, h // 32)
        heads = h // width
        groups, inner = heads // 3 if heads % 3 == 0 else heads, -(-8 * h // 24) * 8
        return DiffusionNet(material, material.sizes["block"], material.sizes["layers"], inner, heads, groups, width, 1e5, 1e-5)

    def started(self, material: Material, first: DiffusionCheckpoint) -> DiffusionNet:
        """A drafter that was trained before."""
        c = first.config
        sizes = c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, head_width(c), rope_theta(c), c.rms_norm_eps
        made = DiffusionNet(material, first.block, c.num_hidden_layers, *sizes)
        made.load_state_dict({name: first.tensors[name].float() for name in made.state_dict()})
        return made

    def loss(self, network: DiffusionNet, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all places: those of blocks of masks, whose figures these are, and time-sampled."""
        X, T = network.block, batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - X, EVERY, device=batch.tokens.device)
        places = at[:, None] + 1 + torch.arange(X + 1, device=at.device)
        blocks, laws, counted = batch.tokens[:, places], batch.laws[:, places[:, :-1]], batch.counted[:, places[:, 1:]]
        masked = torch.ones_like(blocks, dtype=torch.bool)
        masked[..., 0] = False
        logits = network.logits(batch.states, blocks, masked, at)
        whole = unrolled(
            ((logits[:, :, k][counted[:, :, k]], laws[:, :, k][counted[:, :, k]]) for k in range(X)), tv_weight=tv_weight
        )
        if not torch.is_grad_enabled():
            return whole
        times = torch.rand(*blocks.shape[:2], 1, device=at.device).clamp(min=LEAST)
        masked = masked & (torch.rand(blocks.shape, device=at.device) < times)
        log_q = network.logits(batch.states, blocks, masked, at).float().log_softmax(-1)
        wanted = masked[..., 1:] & counted
        sampled = (-(laws * log_q).sum(-1) * wanted / times).sum() / counted.sum().clamp(min=1)
        return whole._replace(loss=whole.loss + sampled)

    def export(self, network: DiffusionNet, material: Material, folder: Path) -> None:
        """Write the folder that `DiffusionCheckpoint` reads."""
        layer = network.layers[0]
        config = {
            "block_size": network.block,
            "num_hidden_layers": len(network.layers),
            "intermediate_size": layer.mlp.up_proj.out_features,  # pyright: ignore[reportAttributeAccessIssue]
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.groups,
            "head_dim": layer.width,
            "rope_theta": layer.theta,
            "rms_norm_eps": network.epsilon,
        }
        save_head(folder, DiffusionCheckpoint, network.state_dict(), material.target, material.layers, material.ids, **config)
