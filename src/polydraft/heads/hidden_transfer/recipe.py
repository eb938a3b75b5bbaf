"""Hidden transfer in torch: the target stays as it is, and k maps of its states are trained through its remaining layers.

Wu et al. 2024 (arXiv 2404.12022). At position n, with h^l[n] the target's state behind layer l:

    row i    W_i h^(t_i)[n] at position n + i, through layers t_i + 1 .. L; it sees the text up to n and rows 1 .. i      law of x[n+i+1]
    loss     sum over i of 0.8^(i-1) times -sum_v p(v) ln q_i(v), p the target's law there

Rows of the text go through the remaining layers once, without a gradient; pseudo rows stand at every `EVERY`-th position, another set each time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from polydraft.heads.checkpoint import save_head
from polydraft.heads.compiled import compiled
from polydraft.heads.hidden_transfer.checkpoint import TransferCheckpoint
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, unrolled

__all__ = ["TransferNet", "TransferRecipe"]

EVERY = 8
"""Positions of a text for one from which pseudo rows go out."""


class Layer(nn.Module):
    """One layer of a compiled target, as it is: nothing of it is trained or saved."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    bias: Tensor
    q_norm: Tensor
    k_norm: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, arrays: Any, layer: int) -> None:
        super().__init__()
        w, s, h = arrays.weights, arrays.sizes, len(arrays.weights.norm)
        self.heads, self.groups, self.width, self.inner, self.epsilon = s.heads, s.groups, s.width, s.inner, float(s.epsilon)
        sizes = {"qkv": ((s.heads + 2 * s.groups) * s.width, h), "out": (h, s.heads * s.width), "gate_up": (2 * s.inner, h),
                 "down": (h, s.inner)}  # fmt: skip
        for name, shape in sizes.items():
            self.register_buffer(name, getattr(w, name).matrix(layer, *shape).bfloat16(), persistent=False)
        for name in ("attention_norm", "mlp_norm", "bias", "q_norm", "k_norm"):
            self.register_buffer(name, torch.from_numpy(getattr(w, name)[layer]), persistent=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.from_numpy(getattr(w, name)), persistent=False)

    def project(self, x: Float[Tensor, "*N h"], positions: Int[Tensor, "..."]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [*N, heads, D], the keys' and values' groups repeated."""
        y = linear(_norm(x, self.attention_norm, self.epsilon).bfloat16(), self.qkv).float()
        y = (y + self.bias if len(self.bias) else y).unflatten(-1, (-1, self.width))
        q, k, v = y.split([self.heads, self.groups, self.groups], -2)
        if len(self.q_norm):
            q, k = _norm(q, self.q_norm, self.epsilon), _norm(k, self.k_norm, self.epsilon)
        cos, sin, repeat = self.cos[positions][..., None, :], self.sin[positions][..., None, :], self.heads // self.groups
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
        return q, k.repeat_interleave(repeat, -2), v.repeat_interleave(repeat, -2)

    def leave(self, x: Float[Tensor, "*N h"], mixed: Float[Tensor, "*N q"]) -> Float[Tensor, "*N h"]:
        """What the layer puts out of a state and what it attended to."""
        x = x + linear(mixed.bfloat16(), self.out)
        gate, up = linear(_norm(x, self.mlp_norm, self.epsilon).bfloat16(), self.gate_up).split(self.inner, -1)
        return x + linear(silu(gate) * up, self.down)


def _norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gain


class TransferNet(nn.Module):
    """The maps as they are trained, and the target's remaining layers. output: [D, h] its output rows."""

    output: Tensor
    norm: Tensor

    def __init__(self, target: Any, layers: tuple[int, ...], output: Float[Tensor, "D h"]) -> None:
        super().__init__()
        arrays, h = compiled(target, "hidden-transfer").arrays, output.shape[1]
        self.begins, self.epsilon = layers, float(arrays.sizes.epsilon)
        maps = [nn.Linear(h, h, bias=False) for _ in layers]
        for each in maps:
            nn.init.eye_(each.weight)
        self.maps = nn.ModuleList(maps)
        self.layers = nn.ModuleList(Layer(arrays, l) for l in range(layers[0], len(arrays.weights.attention_norm)))
        self.register_buffer("norm", torch.from_numpy(arrays.weights.norm), persistent=False)
        self.register_buffer("output", output, persistent=False)

    def rows(self, states: Float[Tensor, "B T F"], at: Int[Tensor, " A"]) -> Float[Tensor, "B A k h"]:
        """Pseudo rows of the positions `at` of texts, behind the last layer and the norm. states: behind layers t_1 .. t_k."""
        B, T, _ = states.shape
        given, every = states.float().chunk(len(self.maps), -1), torch.arange(T, device=states.device)
        text, pseudo = given[0], states.new_zeros(B, len(at), 0, given[0].shape[-1]).float()
        for l in range(self.begins[0], self.begins[0] + len(self.layers) + 1):
            if l in self.begins:
                i = self.begins.index(l)
                pseudo = torch.cat([pseudo, self.maps[i](given[i][:, at])[:, :, None].float()], 2)
            if l < self.begins[0] + len(self.layers):
                text, pseudo = self._through(self.layers[l - self.begins[0]], text, pseudo, every, at)
        return _norm(pseudo, self.norm, self.epsilon)

    def _through(self, layer: Any, text: Tensor, pseudo: Tensor, every: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the texts and pseudo rows through a layer."""
        with torch.no_grad():
            q, k, v = layer.project(text, every)
            mixed = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
            text = layer.leave(text, mixed.transpose(1, 2).flatten(2))
        i = torch.arange(pseudo.shape[2], device=at.device)
        queries, keys, values = layer.project(pseudo, at[:, None] + 1 + i)
        queries = queries * layer.width**-0.5
        seen = torch.einsum("bakhd,bthd->bahkt", queries, k).masked_fill(every > at[:, None, None, None], -torch.inf)
        own = torch.einsum("bakhd,bajhd->bahkj", queries, keys).masked_fill(i > i[:, None], -torch.inf)
        share, own_share = torch.cat([seen, own], -1).float().softmax(-1).split([len(every), len(i)], -1)
        mixed = torch.einsum("bahkt,bthd->bakhd", share, v) + torch.einsum("bahkj,bajhd->bakhd", own_share, values)
        return text, layer.leave(pseudo, mixed.flatten(3))

    def depths(self, batch: Batch) -> Iterator[tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]]:
        """Logits and the target's laws of each row."""
        k, T = len(self.maps), batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - k, EVERY, device=batch.tokens.device)
        rows = self.rows(batch.states, at)
        for i in range(1, k + 1):
            wanted = batch.counted[:, at + i + 1]
            yield linear(rows[:, :, i - 1][wanted].to(self.output.dtype), self.output), batch.laws[:, at + i][wanted]


class TransferRecipe(Recipe):
    """See the module. `layers` of the options are t_1 .. t_k."""

    checkpoint = TransferCheckpoint

    def layers(self, last: int) -> tuple[int, ...]:
        """Three rows, each a layer behind the one before; the first one behind four fifths of all."""
        first = max(1, min(4 * last // 5, last - 3))
        return first, first + 1, first + 2

    def fresh(self, material: Material) -> TransferNet:
        """Maps that change nothing."""
        return TransferNet(material.target, material.layers, material.output)

    def started(self, material: Material, first: TransferCheckpoint) -> TransferNet:
        """Maps that were trained before."""
        made = TransferNet(material.target, first.layers, material.output)
        made.load_state_dict({name: first.tensors[name].float() for name in made.state_dict()})
        return made

    def loss(self, network: TransferNet, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all rows."""
        return unrolled(network.depths(batch), tv_weight=tv_weight)

    def export(self, network: TransferNet, material: Material, folder: Path) -> None:
        """Write the folder that `TransferCheckpoint` reads."""
        save_head(folder, TransferCheckpoint, network.state_dict(), material.target, material.layers, material.ids)
