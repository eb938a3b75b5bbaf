"""Gated delta nets: a tree scored from one state is the recurrence along each of its paths, and so is the state that accepted nodes are folded into."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from polydraft.models.mixers.delta_net.code import (
    DeltaSizes,
    DeltaWeights,
    delta_heads,
    delta_scratch,
    delta_shape,
    new_delta,
)
from polydraft.models.mixers.recurrent import BLOCK, PENDING
from polydraft.models.mixers.workspace import ROW
from polydraft.numerics.compiled_code import njit

LARGEST = 1e-4
"""Of the largest number, by which float32 may differ from float64."""


class Tokens(NamedTuple):
    """Of each node of a tree, in float64: q, k [N, K], v [N, V], g, beta [N]; q and k are as the recurrence reads them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def recurrence(tokens: Tokens, path: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs along a path, and the state behind it (arXiv 2412.06464, equation 10)."""
    outputs = []
    for n in path:
        state = tokens.g[n].exp() * state
        u = tokens.beta[n] * (tokens.v[n] - tokens.k[n] @ state)
        state = state + torch.outer(tokens.k[n], u)
        outputs.append(tokens.q[n] @ state)
    return torch.stack(outputs), state


def from_one_state(tokens: Tokens, parents: list[int], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, u and G of all nodes from the state before the tree; the formulas of `mixers.delta_net.code`."""
    outputs = []
    us = list[Tensor]()
    totals = list[Tensor]()
    for n in range(len(parents)):
        total = tokens.g[n] + (totals[parents[n]] if n else 0.0)
        totals.append(total)
        u = tokens.v[n] - total.exp() * tokens.k[n] @ state
        o = total.exp() * tokens.q[n] @ state
        for l in path_to(parents, n)[:-1]:
            share = (total - totals[l]).exp()
            u = u - share * (tokens.k[n] @ tokens.k[l]) * us[l]
            o = o + share * (tokens.q[n] @ tokens.k[l]) * us[l]
        us.append(tokens.beta[n] * u)
        outputs.append(o + (tokens.q[n] @ tokens.k[n]) * us[n])
    return torch.stack(outputs), torch.stack(us), torch.stack(totals)


def folded(tokens: Tokens, path: list[int], u: Tensor, total: Tensor, state: Tensor) -> Tensor:
    """The state behind an accepted path."""
    last = path[-1]
    shares = (total[last] - total[path]).exp()
    return total[last].exp() * state + (shares[:, None] * tokens.k[path]).T @ u[path]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_tree(size: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [-1, *(choose.randrange(max(0, n - 4), n) for n in range(1, size))]


def random_tokens(size: int, K: int = 8, V: int = 6, decay: float = 1.0) -> tuple[Tokens, Tensor]:
    q, k = (F.normalize(torch.randn(size, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(size, V, dtype=torch.float64)
    g = -decay * torch.rand(size, dtype=torch.float64)
    return Tokens(q * K**-0.5, k, v, g, torch.rand(size, dtype=torch.float64)), torch.randn(
        K, V, dtype=torch.float64
    )


def test_the_recurrence_is_that_of_transformers():
    torch.manual_seed(0)
    tokens, state = random_tokens(20)
    q, k, v = (x[None, :, None].float() for x in (tokens.q * 8**0.5, tokens.k, tokens.v))
    g, beta = (x[None, :, None].float() for x in (tokens.g, tokens.beta))
    theirs, their_state = torch_recurrent_gated_delta_rule(q, k, v, g, beta, state[None, None].float(), True)
    ours, our_state = recurrence(tokens, list(range(20)), state)
    assert torch.allclose(theirs[0, :, 0].double(), ours, atol=1e-5)
    assert torch.allclose(their_state[0, 0].double(), our_state, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decay", [0.1, 5.0, 300.0])
def test_a_tree_from_one_state_is_the_recurrence_along_each_of_its_paths(seed, decay):
    torch.manual_seed(seed)
    parents = random_tree(24, seed)
    tokens, state = random_tokens(24, decay=decay)
    outputs, u, total = from_one_state(tokens, parents, state)
    for node in range(24):
        path = path_to(parents, node)
        expected, behind = recurrence(tokens, path, state)
        assert torch.allclose(outputs[path], expected, rtol=0, atol=1e-10)
        assert torch.allclose(folded(tokens, path, u, total, state), behind, rtol=0, atol=1e-10)


class Net(NamedTuple):
    """A layer between its products, compiled and in float64."""

    sizes: DeltaSizes
    weights: DeltaWeights

    def tokens(self, count: int) -> Tensor:
        """Random outputs of the first product, [count, q, k, v, z, b and a]."""
        s = self.sizes
        return torch.randn(count, self.weights.taps.shape[2] + s.value_heads * (s.value_width + 2))


def random_net(
    key_heads: int = 2, value_heads: int = 4, K: int = 8, V: int = 40, *, tiled: bool, decay: float = 1.0
) -> Net:
    sizes = DeltaSizes(key_heads, value_heads, K, V, 4, tiled)
    channels = 2 * key_heads * K + value_heads * V
    taps = torch.randn(1, 4, channels)
    bias = torch.randn(1, value_heads)
    norm = torch.rand(1, V) + 0.5
    rate = -decay * torch.rand(1, value_heads)
    return Net(sizes, DeltaWeights(*(x.numpy() for x in (taps, rate, bias, norm))))


def along_path(net: Net, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the last product after each token of a text, and the states [heads, K, V], in float64; inputs: as of `delta_heads`."""
    s = net.sizes
    w = [torch.from_numpy(x[0]).double() for x in net.weights]
    taps, rate, bias, norm = w
    channels = taps.shape[1]
    H = s.value_heads
    K = s.key_width
    V = s.value_width
    x, z, b, a = inputs.double().split([channels, H * V, H, H], -1)
    padded = F.pad(x.T, (s.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], taps.T[:, None], groups=channels))[0].T
    q, k, v = mixed.split([s.key_heads * K, s.key_heads * K, H * V], -1)
    outputs = []
    states = []
    for j in range(H):
        g = j % s.key_heads if s.tiled else j // (H // s.key_heads)
        key, query = (
            y[:, g * K : (g + 1) * K] / (y[:, g * K : (g + 1) * K].square().sum(-1, True) + 1e-6).sqrt()
            for y in (k, q)
        )
        log_decay = rate[j] * F.softplus(a[:, j] + bias[j])
        tokens = Tokens(query * K**-0.5, key, v[:, j * V : (j + 1) * V], log_decay, b[:, j].sigmoid())
        out, state = recurrence(tokens, list(range(len(x))), torch.zeros(K, V, dtype=torch.float64))
        out = out * (out.square().mean(-1, True) + 1e-6).rsqrt() * norm * F.silu(z[:, j * V : (j + 1) * V])
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, -1), torch.stack(states)


@njit
def run(weights, memory, rows, seen, projected, mixed, scratch):
    for g in range(memory.sizes.key_heads):
        delta_heads(weights, memory, 0, rows, seen, 0, len(rows), g, projected, mixed, scratch, 0)


class Slot:
    """One slot of a compiled net: committed tokens, of which the first are in the state, and trees behind them."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.folded = np.zeros(1, np.int64)
        self.length = 0
        self.memory, self.kind = new_delta(delta_shape(1, net.sizes), self.folded)
        self.scratch = delta_scratch(net.sizes, 64, PENDING, 1)

    def score(self, projected: Tensor, parents: list[int], since: int = 0) -> Tensor:
        rows = np.zeros(len(parents) - since, ROW)
        seen = np.zeros((len(parents) - since, 64), np.int64)
        for r, node in enumerate(range(since, len(parents))):
            path = path_to(parents, node)
            rows[r]["column"], rows[r]["length"], rows[r]["num_seen"] = (
                self.length + node,
                self.length,
                len(path),
            )
            seen[r, : len(path)] = [self.length + n for n in path]
        mixed = np.zeros((len(rows), self.net.sizes.value_heads * self.net.sizes.value_width), np.float32)
        run(self.net.weights, self.memory, rows, seen, projected[since:].numpy(), mixed, self.scratch)
        return torch.from_numpy(mixed)

    def commit(self, path: list[int]) -> None:
        """Accept a path, and fold whole blocks."""
        waiting = self.length - int(self.folded[0])
        for rows in self.kind.pending:
            rows[0, 0, waiting : waiting + len(path)] = rows[0, 0, waiting + np.array(path)]
        self.length += len(path)
        while self.length - self.folded[0] >= BLOCK:
            self.kind.fold(0, 0)
            self.folded[0] += BLOCK
            for rows in self.kind.pending:
                rows[0, 0, :-BLOCK] = rows[0, 0, BLOCK:].copy()

    def states(self) -> Tensor:
        """[heads, K, V]"""
        states = torch.from_numpy(self.memory.states[0, 0])
        return states.transpose(1, 2).flatten(2)[..., : self.net.sizes.value_width].double()


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert (ours - expected).abs().max() < LARGEST * expected.abs().max()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("decay", [0.05, 1.0, 40.0])
def test_compiled_trees_and_accepted_paths_are_those_of_the_recurrence(tiled, decay):
    torch.manual_seed(1)
    net = random_net(tiled=tiled, decay=decay)
    slot = Slot(net)
    text = net.tokens(0)
    for seed in range(6):
        parents = random_tree((1, 2, 24, 47, 40, 60)[seed], seed)
        nodes = net.tokens(len(parents))
        outputs = slot.score(nodes, parents)
        for node in range(0, len(parents), 3):
            path = path_to(parents, node)
            expected, _ = along_path(net, torch.cat([text, nodes[path]]))
            assert_close(outputs[path], expected[-len(path) :])
        accepted = path_to(parents, len(parents) - 1)
        slot.commit(accepted)
        text = torch.cat([text, nodes[accepted]])
        if slot.folded[0]:
            assert_close(slot.states(), along_path(net, text[: slot.folded[0]])[1])
    assert slot.folded[0] >= 2 * BLOCK


def test_a_tree_that_is_scored_depth_by_depth_has_the_outputs_of_one_pass():
    torch.manual_seed(2)
    net = random_net(tiled=False)
    together = Slot(net)
    grown = Slot(net)
    parents = random_tree(20, 3)
    nodes = net.tokens(20)
    expected = together.score(nodes, parents)
    some = [grown.score(nodes[:end], parents[:end], since) for since, end in ((0, 1), (1, 7), (7, 20))]
    assert_close(torch.cat(some), expected)


def test_a_long_text_with_strong_decays_keeps_its_numbers():
    torch.manual_seed(3)
    net = random_net(tiled=False, decay=30.0)
    slot = Slot(net)
    length = 600
    text = net.tokens(length)
    outputs = []
    for begin in range(0, length, 60):
        piece = text[begin : begin + 60]
        outputs.append(slot.score(piece, list(range(-1, len(piece) - 1))))
        slot.commit(list(range(len(piece))))
    assert_close(torch.cat(outputs), along_path(net, text)[0])
    assert_close(slot.states(), along_path(net, text[: slot.folded[0]])[1])
