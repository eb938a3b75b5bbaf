"""Leaf-to-root rules in torch, for rows that are not on a CPU: greedy traversal and traversal, as `device.Rule`s.

The host knows the trees, so it knows which contexts there are and who is tried where; the device finds weights, residuals and, for greedy
traversal, the order. Contexts of one depth are a batch of rows [M, V], those with one draw apart from those with several: one pass a depth,
one try of all of them at a time. Nothing is read back before the outcome.

    w  weight of a context      a  accept, what is left of it      turn[c]  as which try of its context a child came
    A(v) = prod (1 - a) over v and all below        before(v) = prod A over earlier siblings, of v and of all above it
    stop(v) = before(v) a(v) A(v) / (1 - a(v))      R(v) = before(v) A(v): the mass that is left when v's visit ends

A stop that is drawn in the order of the visits is the first visit whose 1 - R is above the uniform.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import Draft, SiblingLaw
from polydraft.verifiers.fast.device import Nodes, masses
from polydraft.verifiers.fast.device_contexts import Contexts, Level
from polydraft.verifiers.lift.draws import draws_at

PER_OCTAVE, HALF, GATE = 16.0, 128, 0.2
"""As in `verifiers.greedy_traversal`."""
_BUCKETS = 2 * HALF + 1
_LOWEST = int(np.float32(0.5**0.5).view(np.int32))
_LOG2 = tuple(float(np.float32(2.0 / np.log(2.0) / k)) for k in (1, 3, 5, 7))


def _total(x: Float[Tensor, "*M V"]) -> Float[Tensor, "*M"]:
    return x.sum(-1, dtype=torch.float64)


def _keep(w: Tensor, px: Tensor, lawx: Tensor) -> Float[Tensor, " M"]:
    """`rows.keep`."""
    return (w * px.double() / lawx).clamp(max=1.0).masked_fill(~(lawx > 0), torch.nan)


def _reweight(w: Tensor, s: Tensor) -> Float[Tensor, " M"]:
    """`rows.reweight`."""
    return (s / (s + (1.0 - w))).masked_fill((s == 0) & (w == 1), 1.0)


def _reject(w: Tensor, p: Float[Tensor, "M V"], law: Float[Tensor, "M V"]) -> tuple[Tensor, Tensor]:
    """`rows.reject`: what is left of w and p."""
    lack = (w[:, None] * p - law).clamp(min=0)
    s = lack.sum(-1)
    return _reweight(w, s), torch.where((s > 0)[:, None], (lack / s[:, None]).to(p.dtype), p)


def _at(rows: Float[Tensor, "M V"], token: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    return rows.gather(1, token.clamp(min=0)[:, None])[:, 0].double()


def _only(rows: Float[Tensor, "M V"], kept: Bool[Tensor, "M V"]) -> Float[Tensor, "M V"]:
    """The rows where they are kept, normalised; zeros where nothing is left."""
    left = torch.where(kept, rows, 0.0)
    s = _total(left)[:, None]
    return torch.where(s > 0, left / s, 0.0).to(rows.dtype)


class Sweep:
    """The state of a sweep. mass, total: p = mass / total.  laws: [B R, V].

    weight, accept, turn: [B N + 1], the last place for what is not entered.  left: [C, V] what the tries leave of p at contexts with several draws.
    """

    def __init__(self, logits: Float[Tensor, "B N V"], laws: Float[Tensor, "B R V"] | None, draft: Draft) -> None:
        mass, total = masses(logits)
        B, N, self.vocab_size = mass.shape
        self.batch_size, self.num_nodes = B, N
        self.mass, self.total = mass.flatten(0, 1), total.flatten()
        self.laws = mass.new_zeros(1, self.vocab_size) if laws is None else laws.flatten(0, 1)
        self.weight, self.accept = total.new_zeros(2, B * N + 1).unbind()
        self.turn = torch.zeros(B * N + 1, dtype=torch.int64, device=mass.device)
        roots = torch.arange(B, device=mass.device) * N
        self.weight[roots] = 1.0
        self.accept[roots] = 1.0

    @cached_property
    def law_total(self) -> Float[Tensor, " BR"]:
        return _total(self.laws)

    def normal(self, rows: Float[Tensor, "BM V"], totals: Tensor, at: Int[Tensor, " M"]) -> Float[Tensor, "M V"]:
        """Rows, normalised; zeros where there is nothing."""
        s = totals[at][:, None]
        return torch.where(s != 0, rows[at] / s, 0.0)

    def enter(self, child: Int[Tensor, " M"], w: Tensor, turn: int, entered: Bool[Tensor, " M"]) -> None:
        """Children are tried with these weights."""
        at = torch.where(entered, child, len(self.weight) - 1)
        self.weight[at] = w
        self.accept[at] = w
        self.turn[at] = turn

    def try_one(self, level: Level) -> None:
        """Contexts with one draw from a row: nothing of the residual is written down."""
        v, x, r = level.context, level.token[:, 0], level.row[:, 0]
        w, p, q, pu, qu = self.weight[v], self.mass[v], self.laws[r], self.total[v], self.law_total[r]
        into = _keep(w, _at(p, x) / pu, _at(q, x) / qu)
        self.enter(level.child[:, 0], into, 0, torch.ones_like(x, dtype=torch.bool))
        surplus = ((w / pu)[:, None] * p - (1.0 / qu)[:, None] * q).clamp(min=0).sum(-1)
        self.accept[v] = _reweight(w, surplus)


class LeafToRootRule(ABC):
    """A rule for trees as a `device.Rule`: its tries at contexts with several draws, and the order of the stop's draw."""

    def __call__(self, logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Tensor, Tensor]:
        contexts, sweep, left = self.swept(logits, laws, nodes)
        stop, remaining = stops(sweep, contexts, nodes)
        node = self.drawn(stop, remaining, nodes.uniform(noise.Stream.STOP), contexts)
        return node, noise.try_choose(after(sweep, contexts, left, node), nodes.uniform(noise.Stream.EXTRA))

    def swept(self, logits: Tensor, laws: Tensor | None, nodes: Nodes) -> tuple[Contexts, Sweep, Float[Tensor, "C V"]]:
        """All tries, from the root down; and what they left of p where there were several."""
        draft = nodes.draft
        contexts = Contexts.of(draft, *self.draws(draft), logits.device)
        sweep = Sweep(logits, laws, draft)
        rows: list[Tensor] = []
        for level in contexts.levels:
            if self.is_single(level, draft):
                sweep.try_one(level)
            else:
                rows.append(self.try_several(sweep, level, draft))
        return contexts, sweep, torch.cat(rows) if rows else sweep.mass[:1]

    @abstractmethod
    def draws(self, draft: Draft) -> tuple[np.ndarray, bool]:
        """[B, N, W] the draws at each context in the order of their tries; whether single ones are a case of their own."""

    def is_single(self, level: Level, draft: Draft) -> bool:
        """Whether the contexts of a level have one draw, of a row."""
        return level.child.shape[1] == 1

    @abstractmethod
    def try_several(self, sweep: Sweep, level: Level, draft: Draft) -> Float[Tensor, "M V"]:
        """The tries at contexts with several draws; what they leave of p."""

    @abstractmethod
    def drawn(self, stop: Tensor, remaining: Tensor, u: Float[Tensor, " B"], contexts: Contexts) -> Int[Tensor, " B"]:
        """The stop node; -1 where there is none."""


def stops(sweep: Sweep, contexts: Contexts, nodes: Nodes) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """stop and R of the module, for contexts; 0 and 1 for others."""
    B, N = nodes.tokens.shape
    accept, turn = (x[:-1].view(B, N) for x in (sweep.accept, sweep.turn))
    real = nodes.context > 0
    accept = torch.where(real, accept, 0.0)
    on = (1.0 - accept)[:, None]
    below = contexts.within.transpose(1, 2)  # [b, v, u]: u is v or below it
    itself = torch.eye(N, dtype=torch.bool, device=accept.device)
    under = torch.where(below & ~itself, on, 1.0).prod(-1)
    whole = under * (1.0 - accept)
    earlier = (nodes.above[:, :, None] == nodes.above[:, None]) & (turn[:, None] < turn[:, :, None])
    earlier &= (real & (nodes.above >= 0))[:, None]
    beside = torch.where(earlier, whole[:, None], 1.0).prod(-1)
    before = torch.where(contexts.within, beside[:, None], 1.0).prod(-1)
    return torch.where(real, before * under * accept, 0.0), torch.where(real, before * whole, 1.0)


def after(sweep: Sweep, contexts: Contexts, left: Float[Tensor, "C V"], node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """The law of the extra token, not normalised."""
    at = torch.arange(len(node), device=node.device) * sweep.num_nodes + node.clamp(min=0)
    place = contexts.place.flatten()[at]
    law = sweep.mass[at].double()
    single = [level for level in contexts.levels if level.child.shape[1] == 1]
    if single:
        row = torch.zeros_like(sweep.turn)
        for level in single:
            row[level.context] = level.row[:, 0]
        w, r = sweep.weight[at], row[at]
        residual = ((w / sweep.total[at])[:, None] * law - (1.0 / sweep.law_total[r])[:, None] * sweep.laws[r]).clamp(min=0)
        law = torch.where(((place == -1) & (residual.sum(-1) > 0))[:, None], residual, law)
    return torch.where((place >= 0)[:, None], left[place.clamp(min=0)], law) if contexts.num_several else law


class GreedyTraversalRule(LeafToRootRule):
    """`verifiers.greedy_traversal`; the symbols are its own."""

    def draws(self, draft: Draft) -> tuple[np.ndarray, bool]:
        return tree.children(draft.tree).cpu().numpy(), True

    def try_several(self, sweep: Sweep, level: Level, draft: Draft) -> Float[Tensor, "M V"]:
        v, token, group = level.context, level.token, level.group
        w, row = sweep.weight[v], level.row[:, 0]
        kind = sweep.mass.dtype
        P, whole = (sweep.normal(*given).to(kind) for given in ((sweep.mass, sweep.total, v), (sweep.laws, sweep.law_total, row)))
        Q, left = whole, token >= 0
        inside, current = torch.zeros_like(left), torch.zeros_like(v)
        order, highest, law = torch.zeros(P.shape, dtype=torch.int32, device=P.device), torch.zeros_like(v), whole
        for turn in range(token.shape[1]):
            fresh = ~inside.any(1)
            if turn:
                over = fresh & left.any(1) & ~(left & (group == current[:, None])).any(1)
                current, Q = current + over, torch.where(over[:, None], whole, Q)
            shared = left & (group == current[:, None])
            n = shared.sum(1)
            found = _order(P, Q, n)
            first = _first_of_highest(Q, n, found, token.shape[1])
            at = found.gather(1, token.clamp(min=0))
            top = torch.where(shared, at, -1).amax(1)
            begun = fresh[:, None] & shared & (at == top[:, None])
            if turn:
                first = torch.where(fresh[:, None], first, _only(Q, order == highest[:, None]))
                found, top = torch.where(fresh[:, None], found, order), torch.where(fresh, top, highest)
            order, highest, law, inside, left = found, top, first, inside | begun, left & ~begun
            going, j = inside.any(1), inside.int().argmax(1)[:, None]
            c, x = level.child.gather(1, j)[:, 0], token.gather(1, j)[:, 0]
            known = ((token == x[:, None]) & (group < current[:, None])).any(1)
            sweep.enter(c, _keep(w, _at(P, x), _at(law, x)), turn, going & ~known)
            less, rest = _reject(w, P, law)
            w, P = torch.where(going, less, w), torch.where(going[:, None], rest, P)
            inside &= token != x[:, None]
            Q = Q.scatter(1, x.clamp(min=0)[:, None], torch.where(going, 0.0, _at(Q, x)).to(kind)[:, None])
            lower = ~inside.any(1) & (left & (group == current[:, None])).any(1)
            Q = torch.where(lower[:, None], _only(Q, order < highest[:, None]), Q)
        sweep.accept[v] = w
        return P

    def drawn(self, stop: Tensor, remaining: Tensor, u: Float[Tensor, " B"], contexts: Contexts) -> Int[Tensor, " B"]:
        """In the order of the visits; of chains root first, as block verification."""
        reached = (stop > 0) & (1.0 - remaining > u[:, None])
        node = torch.where(reached.any(1), torch.where(reached, remaining, -1.0).argmax(1), -1)
        node = torch.where(stop.isnan().any(1), -1, node)
        return torch.where(contexts.chain, noise.try_choose(stop, u), node)


def _order(P: Float[Tensor, "M V"], Q: Float[Tensor, "M V"], n: Int[Tensor, " M"]) -> Int[Tensor, "M V"]:
    """Bucket of every token; one for all where there is one draw or the gate is closed."""
    closed = (n <= 1) | (_total(torch.minimum(P, Q)) > 1.0 - GATE / n.clamp(min=1))
    ratio = torch.where(P * Q > 0, P.float() / Q.float(), 0.0)
    bits = ratio.view(torch.int32)
    exponent = (bits - _LOWEST) >> 23
    m = (bits - (exponent << 23)).view(torch.float32)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    octaves = exponent.float() + s * (_LOG2[0] + z * (_LOG2[1] + z * (_LOG2[2] + z * _LOG2[3])))
    step = (PER_OCTAVE * octaves + 0.5).floor().clamp(-HALF, HALF)
    return (step.int() + HALF).masked_fill(closed[:, None], 0)


def _first_of_highest(
    Q: Float[Tensor, "M V"], n: Int[Tensor, " M"], order: Int[Tensor, "M V"], most: int
) -> Float[Tensor, "M V"]:
    """Law of the first draw, in draw order, of the highest bucket that holds one of n draws."""
    place = order.long()
    inside = torch.zeros(len(Q), _BUCKETS, dtype=torch.float64, device=Q.device).scatter_add_(1, place, Q.double())
    high = inside.cumsum(1)
    low = high - inside
    weight = torch.zeros_like(inside)
    for i in range(most):
        power = (n[:, None] - 1 - i).clamp(min=0)
        weight += torch.where(i < n[:, None], high**i * low**power, 0.0)
    weight = weight / (inside * weight).sum(1, keepdim=True)
    return (Q * weight.gather(1, place)).to(Q.dtype)


class TraversalRule(LeafToRootRule):
    """`verifiers.traversal`; merged: equal siblings once, as draws without replacement."""

    def __init__(self, merged: bool = False) -> None:
        self._merged = merged

    def _law(self, draft: Draft) -> SiblingLaw:
        return SiblingLaw.WITHOUT_REPLACEMENT if self._merged else draft.law

    def draws(self, draft: Draft) -> tuple[np.ndarray, bool]:
        """Of greedy plus one the sampled child first."""
        draws = draws_at(draft.tree, self._merged).cpu().numpy()
        if self._law(draft) is SiblingLaw.GREEDY_PLUS_ONE:
            counts = (draws >= 0).sum(-1, keepdims=True)
            turns = np.arange(draws.shape[2])
            draws = np.where(turns < counts, np.take_along_axis(draws, (turns - 1) % np.maximum(counts, 1), 2), -1)
        return draws, self._law(draft) is not SiblingLaw.POINT_MASS

    def is_single(self, level: Level, draft: Draft) -> bool:
        return level.child.shape[1] == 1 and self._law(draft) is not SiblingLaw.POINT_MASS

    def try_several(self, sweep: Sweep, level: Level, draft: Draft) -> Float[Tensor, "M V"]:
        kind, v, token = self._law(draft), level.context, level.token
        w = sweep.weight[v]
        p = sweep.normal(sweep.mass, sweep.total, v)
        q = law = sweep.normal(sweep.laws, sweep.law_total, level.row[:, 0])
        sure = w == 0
        if kind is SiblingLaw.GREEDY_PLUS_ONE:
            for i in range(1, token.shape[1]):
                law = _without(law, token[:, i])
        for turn in range(token.shape[1]):
            x = token[:, turn]
            if kind is SiblingLaw.INDEPENDENT and turn:
                law = sweep.normal(sweep.laws, sweep.law_total, level.row[:, turn])
            elif kind is SiblingLaw.WITHOUT_REPLACEMENT and turn:
                law = _without(law, token[:, turn - 1])
            elif kind is SiblingLaw.POINT_MASS or (kind is SiblingLaw.GREEDY_PLUS_ONE and turn):
                law = _one_hot(q, x)
            elif kind is SiblingLaw.GREEDY_PLUS_ONE:
                law = torch.where((_at(law, x) == 0)[:, None], _one_hot(q, x), law)
            going, known = (x >= 0) & ~sure, (token[:, :turn] == x[:, None]).any(1)
            into = _keep(w, _at(p, x), _at(law, x))
            sweep.enter(level.child[:, turn], into, turn, going & ~known)
            sure = sure | (going & ~known & (into == 1))
            less, rest = _reject(w, p, law)
            w, p = torch.where(going & ~sure, less, w), torch.where((going & ~sure)[:, None], rest, p)
        sweep.accept[v] = w
        return p

    def drawn(self, stop: Tensor, remaining: Tensor, u: Float[Tensor, " B"], contexts: Contexts) -> Int[Tensor, " B"]:
        """In the order of the nodes."""
        return noise.try_choose(stop, u)


def _one_hot(like: Float[Tensor, "M V"], x: Int[Tensor, " M"]) -> Float[Tensor, "M V"]:
    return torch.zeros_like(like).scatter(1, x.clamp(min=0)[:, None], 1.0)


def _without(law: Float[Tensor, "M V"], x: Int[Tensor, " M"]) -> Float[Tensor, "M V"]:
    """The law without a token, summed anew; as it is where there is none to take out."""
    at = x.clamp(min=0)[:, None]
    left = law.scatter(1, at, torch.where(x < 0, _at(law, x), 0.0)[:, None].to(law.dtype))
    s = _total(left)[:, None]
    return torch.where(s > 0, left / s, 0.0).to(law.dtype)
