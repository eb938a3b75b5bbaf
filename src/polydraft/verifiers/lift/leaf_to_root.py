"""Leaf-to-root sweep: lift a rule for the tries at one context to a whole tree.

Weng et al. 2025 (traversal verification, arXiv 2505.12398), freed of its draw order.

    visit(v, w)   accepts v or something below it with total probability w, and then goes on by the target's distribution;
                  the root has w = 1, a leaf is accepted with probability w
    tries at v    its children in an order that is fixed given the draft, each against q, the exact conditional distribution of
                  that draw:  visit(x, min(1, w p(x) / q(x)));  rejected: p <- N((w p - q)+), w <- S / (S + 1 - w)
    after them    v is accepted with probability a(v) = what is left of w, and emits a token of what is left of p

As the order is fixed, the sweep is the contexts in post-order:  stop(v) = a(v) prod over all u before v of (1 - a(u)).
Lossless if every q is the distribution of its draw given all that was looked at before, and the order looks at no draw that is
not revealed yet. A child entered with weight 1 surely accepts: its later siblings, and v itself, are never reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method
from polydraft.errors import InvalidInputError
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, reject, reweight, surplus, total
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.lift.verdict import TreeVerdict


class Sweep(NamedTuple):
    """A batch, as compiled rules see it.

    p: [B, N, V].  q: [B, R, V].  tokens, rows: [B, N] as in the draft.
    draws: [B, N, W] nodes drawn at each context in draw order, padded with -1.  counts: [B, N] how many.
    sampling: value of the DraftSampling of these draws.
    weight: [B, N] w of each context that is entered, else 0.  accept: [B, N] a(v).
    order: [B, N, W] the children that are tried, in that order, padded with -1.
    """

    p: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    draws: np.ndarray
    counts: np.ndarray
    sampling: int
    weight: np.ndarray
    accept: np.ndarray
    order: np.ndarray


Tries = Callable[[np.ndarray, Sweep, np.ndarray], None]
"""(contexts [M, 2] as (b, v), parents first; sweep; residual [M, V] or [0, 0]) -> None: a compiled rule.

For each context that `opened` says has draws it calls `tried` for children in the order of their tries and sets `accept`.
Where there is room it leaves the distribution of a token emitted there in its row of `residual`.
"""


@compiled
def opened(sweep, b, v, rest, q, residual):
    """How many draws there are to try at v, with rest = p and q that of the first of them; 0 where none is left to do.

    A single draw from q is tried here, by gathered scalars and one pass over the rows if it may be rejected.
    """
    n, w, child = sweep.counts[b, v], sweep.weight[b, v], sweep.draws[b, v, 0]
    p, row = sweep.p[b, v], sweep.rows[b, child]
    if w == 0.0:
        return 0
    if n == 1 and row >= 0 and residual.size == 0:
        x, q = sweep.tokens[b, child], sweep.q[b, row]
        p_sum, q_sum = total(p), total(q)
        into = keep(w, p[x] / p_sum, q[x] / q_sum)
        enter(sweep, b, v, 0, child, into)
        if into < 1.0:
            sweep.accept[b, v] = reweight(w, surplus(w / p_sum, p, 1.0 / q_sum, q))
        return 0
    copy_normalised(p, rest)
    if row >= 0:
        copy_normalised(sweep.q[b, row], q)
    return n


@compiled
def enter(sweep, b, v, turn, child, w):
    """The child (first node of its context) is tried at v as number `turn`, with weight w."""
    sweep.order[b, v, turn] = child
    sweep.weight[b, child] = w
    sweep.accept[b, child] = w  # right for a leaf; a context with draws sets its own


@compiled
def tried(sweep, b, v, turn, child, w, rest, q):
    """Try a child drawn from q against `rest`; what its rejection leaves of w, `rest` with it; -1 where it surely accepts."""
    x = sweep.tokens[b, child]
    into = keep(w, rest[x], q[x])
    enter(sweep, b, v, turn, child, into)
    return -1.0 if into == 1.0 else reject(w, rest, q)


@compiled
def _stops(order, accept, stop, turns):
    """stop [B, N] from the order of tries and the probability to be accepted at each turn; turns [B, N]: nodes in the order in which their visits end."""
    B, N, W = order.shape
    pending, visited = np.empty(N, np.int64), np.empty(N, np.int64)
    for b in range(B):
        size, done = 1, 0
        pending[0] = 0
        while size > 0:  # parents first, last tries first: the reverse of post-order
            size -= 1
            v = pending[size]
            visited[done] = v
            done += 1
            for k in range(W):
                if order[b, v, k] >= 0:
                    pending[size] = order[b, v, k]
                    size += 1
        alive = 1.0
        for i in range(done - 1, -1, -1):
            v = visited[i]
            stop[b, v] = alive * accept[b, v]
            alive *= 1.0 - accept[b, v]
            turns[b, done - 1 - i] = v


@compiled
def _targets(p, at, distributions):
    """distributions[i] = the normalised target row of context at[i]."""
    for i in range(len(at)):
        copy_normalised(p[at[i, 0], at[i, 1]], distributions[i])


def _host(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().numpy()


def host_rows(draft: Draft, target_probs: Float[Tensor, "B N V"]) -> tuple[np.ndarray, np.ndarray]:
    """p and q on the host, of one type; a draft without q has one row of zeros, from which nothing can be drawn."""
    probs = torch.zeros_like(target_probs[:, :1]) if draft.probs is None else draft.probs
    kind = torch.float64 if torch.float64 in (probs.dtype, target_probs.dtype) else torch.float32
    return _host(target_probs.to(kind)), _host(probs.to(kind))


def check_stop(stop: np.ndarray) -> None:
    """Raise InvalidInputError where a token was tried that its row gives no mass."""
    if np.isnan(stop).any():
        raise InvalidInputError(
            "a drafted token has probability 0 in its row of draft.probs; report the very rows that were sampled."
        )


def chains(parents: Int[np.ndarray, "B N"]) -> Bool[np.ndarray, " B"]:
    """Whether a row is one path."""
    return ((parents == np.arange(-1, parents.shape[1] - 1)) | (parents < 0)).all(1)


def in_turn(turns: Int[np.ndarray, "B N"], parents: Int[np.ndarray, "B N"]) -> Int[np.ndarray, "B N"]:
    """All nodes of each row in the order of the stop's draw: that of their visits, then the others; of chains as in block verification, root first.

    Example:
        >>> in_turn(np.array([[2, 0, -1], [1, 0, -1]]), np.array([[-1, 0, 0], [-1, 0, -1]])).tolist()
        [[2, 0, 1], [0, 1, 2]]
    """
    order = np.tile(np.arange(turns.shape[1]), (len(turns), 1))
    for b in np.flatnonzero(~chains(parents)):
        visited = [n for n in turns[b].tolist() if n >= 0]
        order[b] = [*visited, *({*order[b].tolist()} - {*visited})]
    return order


@dataclass(frozen=True)
class LeafToRoot:
    """A verifier for trees, made of a compiled rule for the tries at one context.

    merged: equal siblings are one draw, of draws without replacement; see `lift.draws`.
    in_turn: the stop is drawn in the order of the visits, so that a walk need not look beyond it; of chains root first.
    Rows on another device are copied to the host, and the verdict's tables back.
    """

    info: Method
    tries: Tries
    merged: bool = False
    in_turn: bool = False

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p, q = host_rows(draft, target_probs)
        draws = _host(draws_at(draft.tree, self.merged))
        drawn = draws >= 0
        sampling = DraftSampling.WITHOUT_REPLACEMENT if self.merged else draft.sampling
        weight, stop = np.zeros(p.shape[:2]), np.zeros(p.shape[:2])
        weight[:, 0] = 1.0
        tokens, rows = _host(draft.tree.tokens), _host(draft.rows)
        sweep = Sweep(p, q, tokens, rows, draws, drawn.sum(-1), sampling.value, weight, weight.copy(), np.full_like(draws, -1))
        self.tries(np.argwhere(drawn.any(-1)), sweep, np.empty((0, 0)))
        turns = np.full(stop.shape, -1)
        _stops(sweep.order, sweep.accept, stop, turns)
        check_stop(stop)
        device, order = target_probs.device, None
        if self.in_turn:
            order = torch.from_numpy(in_turn(turns, draft.tree.host[1])).to(device)
        return TreeVerdict(draft.tree, torch.from_numpy(stop).to(device), partial(self._after, sweep, device), order)

    def _after(self, sweep: Sweep, device: torch.device, node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """The tries at each row's context once more, now keeping what they leave of p."""
        at = np.stack([np.arange(len(sweep.p)), _host(node)], 1)
        distributions = np.empty((sweep.p.shape[0], sweep.p.shape[2]))
        _targets(sweep.p, at, distributions)
        drawn = sweep.counts[at[:, 0], at[:, 1]] > 0
        residuals = distributions[drawn]
        self.tries(at[drawn], sweep, residuals)
        distributions[drawn] = residuals
        return torch.from_numpy(distributions).to(device)
