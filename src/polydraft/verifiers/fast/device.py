"""The fused walks in torch, for logits that are not on a CPU: one transfer to the host a round, of the outcome alone.

Trees are small and live on the host: their geometry is worked out there and sent along. Rows over the vocabulary stay where
they are. Each rule gives the stop node and the extra token of every batch row, as its walk on a CPU does and on the same
noise; the outcomes are equal up to rounding. Batch rows with faulty logits get -1: the readable path then names the fault.

    mass, total   exp(logits - max) in float32, and its sum in float64: p = mass / total
    above         first copy of the node that a node hangs on; -1 at the root and at padding
    context       1 at nodes that are no copy of an earlier one and no padding: where a walk may stop
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import Draft, NoiseKey, Outcome, TokenTree
from polydraft.staging import fetched, sent


@dataclass(frozen=True)
class Nodes:
    """A batch of drafted trees, and the key of the round, where the logits are.

    draft: on the host, but for its laws.  last: [B] the last node.  on_path: [B, N, N] node m is n or above it.
    """

    draft: Draft
    tokens: Int[Tensor, "B N"]
    rows: Int[Tensor, "B N"]
    above: Int[Tensor, "B N"]
    depth: Int[Tensor, "B N"]
    context: Int[Tensor, "B N"]
    last: Int[Tensor, " B"]
    on_path: Bool[Tensor, "B N N"]
    key: NoiseKey
    uniforms: Float[Tensor, "2 B"]
    """Of the stop and of the extra token: made on the host, where they are one call."""

    @classmethod
    def of(cls, draft: Draft, key: NoiseKey, device: torch.device) -> "Nodes":
        """What a rule needs to know of a draft and of the noise, none of which waits for the device."""
        drafted = draft.tree
        first, depth = tree.first_copies(drafted), tree.depths(drafted)
        N = drafted.num_nodes
        real = drafted.is_node
        above = torch.where(drafted.parents >= 0, first.gather(1, drafted.parents.clamp(min=0)), -1)
        context = (first == torch.arange(N)) & real
        facts = torch.stack([drafted.tokens, draft.rows, above, depth, context.long()], -1)
        last = real.sum(1) - 1
        ends = torch.stack([key.seed, key.sample, key.position, last, last], -1)[:, None]
        every = sent(torch.cat([facts, ends], 1), device)
        tokens, rows, above, height, contexts = every[:, :N].unbind(-1)
        seed, sample, position, last, _ = every[:, N].unbind(-1)
        seen = sent(tree.ancestors(drafted), device)
        drawn = torch.stack([noise.uniforms(key, stream, 1)[:, 0] for stream in (noise.Stream.STOP, noise.Stream.EXTRA)])
        there = NoiseKey(seed, sample, position)
        return cls(draft, tokens, rows, above, height, contexts, last, seen, there, sent(drawn, device))

    def uniform(self, stream: noise.Stream) -> Float[Tensor, " B"]:
        return self.uniforms[0 if stream is noise.Stream.STOP else 1]


Rule = Callable[[Tensor, Tensor | None, Nodes], tuple[Tensor, Tensor]]
"""(logits [B, N, V], rows of the draft's laws [B, R, V] or None, nodes) -> stop node [B], extra token [B]; -1 where faulty."""


def masses(logits: Float[Tensor, "*M V"]) -> tuple[Float[Tensor, "*M V"], Float[Tensor, "*M"]]:
    """(mass, total); NaN where a row holds NaN or +inf or has no token left."""
    mass = (logits - logits.amax(-1, keepdim=True)).exp()
    return mass, mass.sum(-1, dtype=torch.float64)


def _at(rows: Shaped[Tensor, "B N V"], node: Int[Tensor, " B"]) -> Shaped[Tensor, "B V"]:
    return rows[torch.arange(len(node), device=node.device), node]


def block(logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Block verification of chains; the symbols are those of `verifiers.block.block`."""
    mass, total = masses(logits)
    B, N, V = mass.shape
    batch = torch.arange(B, device=mass.device)[:, None]
    q = mass.new_zeros(B, 0, V) if laws is None else laws[batch, nodes.rows[:, 1:].clamp(min=0)]
    drawn = nodes.tokens[:, 1 : q.shape[1] + 1, None]
    px, qx = mass[:, :-1].gather(2, drawn)[..., 0] / total[:, :-1], q.gather(2, drawn)[..., 0].double()
    ratio = (px / qx).masked_fill(~(qx > 0), torch.nan)
    w = [torch.ones_like(total[:, 0])]
    for i in range(N - 1):
        w.append((w[-1] * ratio[:, i]).clamp(max=1.0))
    weights = torch.stack(w, 1)
    scale = (weights / total)[:, :-1, None]
    surplus = (mass[:, :-1] * scale - q).clamp(min=0).sum(-1)
    spent = surplus + (1 - weights[:, :-1])
    h = (surplus / spent).masked_fill(spent == 0, 1.0)
    places = torch.arange(N, device=mass.device)
    keep = torch.where(places < nodes.last[:, None], torch.cat([h, h.new_zeros(B, 1)], 1), weights)
    keep = keep.masked_fill(places > nodes.last[:, None], 0.0)
    alive = torch.cat([(1 - keep).flip(1).cumprod(1).flip(1)[:, 1:], torch.ones_like(keep[:, :1])], 1)
    node = noise.try_choose(keep * alive, nodes.uniform(noise.Stream.STOP))
    n = node.clamp(min=0)
    law = _at(mass, n)
    if N > 1:
        inner = n.clamp(max=N - 2)
        residual = (law * _at(scale, inner) - _at(q, inner)).clamp(min=0)
        law = torch.where((n < nodes.last)[:, None], residual, law.double())
    return node, noise.try_choose(law, nodes.uniform(noise.Stream.EXTRA))


def match(logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Sample and match: the stop node's law is p without the tokens that were drafted there."""
    mass, total = masses(logits)
    parent, child = nodes.above.clamp(min=0), (nodes.context > 0) & (nodes.above >= 0)
    chosen = mass.flatten(1).gather(1, parent * mass.shape[2] + nodes.tokens) / total.gather(1, parent)
    branch = torch.where(nodes.depth > 0, chosen, 1.0)
    reach = torch.where(nodes.on_path, branch[:, None], 1.0).prod(-1) * nodes.context
    stop = reach.scatter_add(1, parent, torch.where(child, -reach, 0.0)).clamp(min=0)
    node = noise.try_choose(stop, nodes.uniform(noise.Stream.STOP))
    n = node.clamp(min=0)
    taken = torch.where(child & (nodes.above == n[:, None]), 0.0, torch.inf)
    law = _at(mass, n).scatter_reduce(1, nodes.tokens, taken.to(mass.dtype), "amin")
    return node, noise.try_choose(law, nodes.uniform(noise.Stream.EXTRA))


def _follow(picks: Int[Tensor, "B N"], nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Where the walk along the picks leaves the tree, and the pick there."""
    hit = (nodes.depth == 0) | (nodes.tokens == picks.gather(1, nodes.above.clamp(min=0)))
    reached = (hit[:, None] | ~nodes.on_path).all(-1)
    node = (reached * nodes.context * (nodes.depth + 1)).argmax(1)
    return node, picks.gather(1, node[:, None])[:, 0]


def race(active: Callable[[TokenTree], np.ndarray]) -> Rule:
    """Races at every node, depth by depth. active: as `verifiers.race.Race.active`."""

    def rule(logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Tensor, Tensor]:
        playing, depth = active(nodes.draft.tree), tree.depths(nodes.draft.tree).numpy()
        mass, total = masses(logits)
        (B, N, V), K = mass.shape, playing.shape[2]
        there = sent(torch.from_numpy(playing), mass.device)
        key, picks = nodes.key, torch.full((B, N), -1, device=mass.device)
        for d in range(int(depth.max()) + 1):
            begin, end = np.flatnonzero((depth == d).any(0))[[0, -1]].tolist()
            here = slice(begin, end + 1)
            clocks = noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), K * V).view(B, 1, K, V)
            clock = clocks[:, :, 0] if K == 1 else torch.where(there[:, here, :, None], clocks, torch.inf).amin(2)
            pick = torch.where(mass[:, here] > 0, clock / mass[:, here], torch.inf).argmin(-1)
            picks[:, here] = torch.where(nodes.depth[:, here] == d, pick, picks[:, here])
        return _follow(torch.where(total.isfinite(), picks, -1), nodes)

    return rule


def greedy(logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """The largest logit at every node, the lowest id among equals."""
    top = logits.amax(-1)
    return _follow(torch.where(top.isfinite(), logits.argmax(-1), -1), nodes)


def decide(rule: Rule, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Int[Tensor, "B M"]:
    """The outcome of every batch row as one table on the logits' device: path, number accepted, extra token."""
    nodes = Nodes.of(draft, key, logits.device)
    laws = None if draft.probs is None else sent(draft.probs, logits.device)
    node, token = rule(logits, laws, nodes)
    n, N = node.clamp(min=0), draft.tree.num_nodes
    places = torch.arange(N, device=logits.device)
    path = torch.where(_at(nodes.on_path, n) & (places > 0), places, N).sort(1).values[:, : N - 1]
    count = torch.where((node < 0) | (token < 0), -1, nodes.depth.gather(1, n[:, None])[:, 0])
    return torch.cat([torch.where(path < N, path, -1), count[:, None], token[:, None]], 1)


def walk(rule: Rule, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
    """The rule's outcome, on the host; None where logits are faulty.

    Example:
        >>> drafted = Draft.empty(torch.tensor([5]))
        >>> walk(greedy, drafted, torch.tensor([[[0.0, 2.0, 1.0]]]), NoiseKey.of([0], [0], [1])).token.tolist()
        [1]
    """
    return outcome(decide(rule, draft, logits, key))


def outcome(table: Int[Tensor, "B M"]) -> Outcome | None:
    """What a device decided, read once; None where logits are faulty."""
    found = fetched(table)
    count, token = found[:, -2], found[:, -1]
    if (count < 0).any():
        return None
    return Outcome(found[:, : int(count.max())], count, token)
