"""Flow verification: the k draws of a context are one tuple of at most V, and a transport from tuples to tokens says what each child is worth.

Our own verifier, for systematic draws (`DraftSampling.SYSTEMATIC`; docs/papers/flow.md has the proof).

    D, P(D)  the pieces: as u runs over [0, 1), the tuple of the k draws changes at most V times
    w        weight with which the context is entered, the root's is 1; what is emitted here has distribution w p
    T(x|D)   >= 0, at most 1 over the distinct x of D, and E[T(x|D)] <= w p(x): the mass that goes on at child x

    children are visited in ascending q, each token once, x with weight T(x|D) / (1 - T visited before)
    then the context itself is accepted with weight S / (S + 1 - w), S = sum rest, and emits N(rest), rest = w p - E[T]

Lossless for any such T, found here by four steps of scaling and a fill:

    a(x) = w p / (r - min(w p, .9 r)), r = min(1, k q)     E(x) = sum over pieces with x of P a(x) / (1 + sum of a over D)
    a <- a w p / E, four times     phi = min(1, w p / E)     T(x|D) = phi(x) a(x) / (1 + sum of a over D)
    fill: in ascending q, draw by draw, a token takes of what its tuples have left as much as its rest allows

One path is block verification, to the last bit. Traps: iid draws; one u for a whole tree; weights T instead of T over what is left; no phi;
E from the marginals of the draws instead of their tuples.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import FIXED, DraftSampling
from polydraft.methods.papers import method
from polydraft.verifiers.block import tries as one_draw
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.draws import without_repeats
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, reweight
from polydraft.verifiers.walks.flow import LARGEST, SMALLEST, STEPS, walk


def pieces(q: Float[Tensor, "M V"], k: int) -> tuple[Float[Tensor, "M P"], Int[Tensor, "M P k"]]:
    """The distribution of k systematic draws from each row: probabilities, some of them 0, and tuples of token ids.

    Example:
        >>> probability, draws = pieces(torch.tensor([[0.5, 0.25, 0.25]]), 2)
        >>> there = probability > 0
        >>> probability[there].tolist(), draws[there].tolist()
        ([0.5, 0.5], [[0, 1], [0, 2]])
    """
    j = torch.arange(k, device=q.device)
    F = q.cumsum(1)  # one after the other, as `categorical.choose_systematic` adds them up
    F = F / F[:, -1:]
    turns = (k * F[:, :, None] - j).clamp(0, 1).flatten(1)  # where u changes draw j
    edges = torch.nn.functional.pad(turns.sort(1).values, (1, 0))
    edges = torch.nn.functional.pad(edges, (0, 1), value=1.0)
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    draws = torch.searchsorted(F, ((middle[:, :, None] + j) / k).flatten(1), right=True)
    last = q.shape[1] - 1 - (q > 0).flip(1).int().argmax(1, keepdim=True)
    return edges.diff(dim=1), torch.minimum(draws, last).unflatten(1, (-1, k))


class Flow(NamedTuple):
    """order: places of the draws in the order of visits.  turns: of the visits, -1 where a token was visited before.  mass: T(x|D) there, or 0.

    rest: what the context itself emits, unnormalised.
    """

    order: Int[Tensor, "M k"]
    turns: Int[Tensor, "M k"]
    mass: Float[Tensor, "M k"]
    rest: Float[Tensor, "M V"]


def look_up(row: Float[Tensor, "M V"], D: Int[Tensor, "M P k"]) -> Float[Tensor, "M P k"]:
    """row[D]."""
    return row.gather(1, D.flatten(1)).view(D.shape)


def sum_by_token(
    like: Float[Tensor, "M V"], D: Int[Tensor, "M P k"], x: Float[Tensor, "M P k"]
) -> Float[Tensor, "M V"]:
    """Sums of x over the places where D holds each token."""
    return torch.zeros_like(like).scatter_add(1, D.flatten(1), x.flatten(1))


def scaled(
    g: Float[Tensor, "M V"], r: Float[Tensor, "M V"], P: Float[Tensor, "M P"], D: Int[Tensor, "M P k"]
) -> tuple[Float[Tensor, "M P k"], Float[Tensor, "M V"]]:
    """T(x|D) at the first copy of each token of each piece, and what it leaves of g = w p."""
    new = without_repeats(D) >= 0

    def shares(a: Float[Tensor, "M V"]) -> tuple[Float[Tensor, "M P k"], Float[Tensor, "M V"]]:
        held = look_up(a, D) * new
        part = held / (1.0 + held.sum(-1, keepdim=True))
        return part, sum_by_token(g, D, P[..., None] * part)

    a = (g / (r - torch.minimum(g, 0.9 * r))).clamp(SMALLEST, LARGEST)
    for _ in range(STEPS):
        _, E = shares(a)
        a = torch.where(E > 0.0, (a * g / E).clamp(SMALLEST, LARGEST), a)
    shared, E = shares(a)
    phi = torch.where(g < E, g / E, 1.0)
    return shared * look_up(phi, D), (g - phi * E).clamp(min=0.0)


def filled(
    T: Float[Tensor, "M P k"], rest: Float[Tensor, "M V"], P: Float[Tensor, "M P"], D: Int[Tensor, "M P k"]
) -> tuple[Float[Tensor, "M P k"], Float[Tensor, "M V"]]:
    """The same once the tuples, in the order of D, have given of what they have left as much as the rest allows."""
    remaining = 1.0 - T.sum(-1)
    columns = list[Tensor]()
    for y, t in zip(D.split(1, -1), T.unbind(-1), strict=True):
        offered = sum_by_token(rest, y, (P * remaining)[..., None])
        part = torch.where(offered > 0.0, rest / offered, 0.0).clamp(max=1.0)
        mass_taken = look_up(part, y)[..., 0]
        columns.append(t + mass_taken * remaining)
        rest = (rest - part * offered).clamp(min=0.0)
        remaining = remaining * (1.0 - mass_taken)
    return torch.stack(columns, -1), rest


def transport(
    w: Float[Tensor, " M"], p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M k"]
) -> Flow:
    """What the children are worth at contexts of weight w whose draws from q these are; rows of p and q sum to 1.

    Example:
        >>> p, q = torch.tensor([[0.2, 0.5, 0.3]]).double(), torch.tensor([[0.6, 0.2, 0.2]]).double()
        >>> flow = transport(torch.ones(1), p, q, torch.tensor([[0, 1]]))
        >>> flow.order.tolist(), [round(x, 3) for x in flow.mass[0].tolist()]
        ([[1, 0]], [0.974, 0.026])
    """
    P, D = pieces(q, draws.shape[1])
    P = torch.nn.functional.pad(P, (0, 1))
    D = torch.cat([D, draws[:, None]], 1)  # the last one is what was drawn
    T, rest = scaled(w[:, None] * p, (draws.shape[1] * q).clamp(max=1.0), P, D)
    order = look_up(q, D).argsort(dim=-1, stable=True)
    D = D.gather(-1, order)
    T = T.gather(-1, order)
    T, rest = filled(T, rest, P, D)
    tokens = D[:, -1]
    new = without_repeats(D[:, -1]) >= 0
    mass = torch.zeros_like(p).scatter_add(1, tokens, T[:, -1]).gather(1, tokens)
    return Flow(order[:, -1], torch.where(new, new.cumsum(1) - 1, -1), torch.where(new, mass, 0.0), rest)


def weights(mass: Float[Tensor, "M n"]) -> Float[Tensor, "M n"]:
    """With which the children are entered, one after the other: their mass over what those before have left.

    Example:
        >>> weights(torch.tensor([[0.5, 0.25, 0.25]])).tolist()
        [[0.5, 0.5, 1.0]]
    """
    remaining = 1.0 - mass.cumsum(1) + mass
    return torch.where((mass <= 0.0) | (remaining <= 0.0), 0.0, mass / remaining).clamp(max=1.0)


def tries(at: Contexts) -> Decision:
    """One draw is block verification; several, all contexts that have as many at a time."""
    single = one_draw(at._replace(tokens=at.tokens[:, :1]))
    w, p, q, tokens, *_ = at
    assert q is not None
    into = torch.zeros_like(tokens, dtype=p.dtype)
    turns = torch.full_like(tokens, -1)
    into[:, :1], turns[:, :1], stops, rest = (
        single.weights,
        single.turns,
        single.stops.clone(),
        single.rest.clone(),
    )
    counts = (tokens >= 0).sum(1) * (w != 0.0)
    for k in range(2, tokens.shape[1] + 1):
        i = (counts == k).nonzero()[:, 0]
        if len(i) == 0:
            continue
        draws = tokens[i][tokens[i] >= 0].view(-1, k)
        weight = torch.where(
            (q[i].gather(1, draws) > 0.0).all(1), w[i], torch.nan
        )  # no draw can have no mass
        order, turn, mass, remaining = transport(weight, p[i], q[i], draws)
        into[i[:, None], order] = weights(mass)
        turns[i[:, None], order] = turn
        stops[i] = reweight(weight, remaining.sum(1))
        rest[i] = remaining
    return Decision(into, stops, rest, turns)


flow = LeafToRoot(method("flow", "Flow verification", "", {DraftSampling.SYSTEMATIC}, FIXED), tries, walk)
"""The verifier."""
