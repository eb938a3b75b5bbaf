"""Leaf-to-root walk: lift a rule for the tries at one context to a whole tree.

Weng et al. 2025 (traversal verification, arXiv 2505.12398), freed of its draw order.

    visit(v, w)   accepts v or something below it with total probability w, and then goes on by the target's law;
                  the root has w = 1, a leaf is accepted with probability w
    tries at v    its children in an order that is fixed given the draft, each against `law`, the exact conditional law of
                  that draw:  visit(x, min(1, w p(x) / law(x)));  rejected: p <- N((w p - law)+), w <- S / (S + 1 - w)
    after them    v is accepted with probability a(v) = what is left of w, and emits a token of what is left of p

As the order is fixed, the walk is the contexts in post-order:  stop(v) = a(v) prod over all u before v of (1 - a(u)).
Lossless if every `law` is the law of its draw given all that was looked at before, and the order looks at no draw that is
not revealed yet. A child entered with weight 1 surely accepts: its later siblings, and v itself, are never reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, Method
from polydraft.errors import InvalidInputError
from polydraft.verifiers.fast.rows import compiled, copy_normalised, keep, reweight, surplus, total
from polydraft.verifiers.lift.verdict import TreeVerdict

__all__ = ["LeafToRoot", "Tries", "Walk", "enter", "one_draw"]


class Walk(NamedTuple):
    """A batch of walks, as compiled rules see it.

    tokens, rows: [B, N] as in the draft.  draws: [B, N, W] nodes drawn at each context in draw order, padded with -1.
    counts: [B, N] how many.  law: value of the draft's SiblingLaw.
    weight: [B, N] w of each context that is entered, else 0.  accept: [B, N] a(v).
    order: [B, N, W] the children that are tried, in that order, padded with -1.
    """

    tokens: np.ndarray
    rows: np.ndarray
    draws: np.ndarray
    counts: np.ndarray
    law: int
    weight: np.ndarray
    accept: np.ndarray
    order: np.ndarray


Tries = Callable[[np.ndarray, Walk, np.ndarray, np.ndarray, np.ndarray], None]
"""(contexts [M, 2] as (b, v), parents first; walk; p [B, N, V]; q [B, R, V]; residual [M, V] or [0, 0]) -> None: a compiled rule.

For each context with weight > 0 it calls `enter` for the children in the order of their tries and sets `accept`. Where there
is room it leaves the law of a token emitted there in its row of `residual`.
"""


@compiled
def enter(walk, b, v, turn, child, w):
    """The child (first node of its context) is tried at v as number `turn`, with weight w."""
    walk.order[b, v, turn] = child
    walk.weight[b, child] = w
    walk.accept[b, child] = w  # right for a leaf; a context with draws sets its own


@compiled
def one_draw(walk, b, v, p, q):
    """The tries at a context with a single draw from q: gathered scalars, and one pass over the rows if it may be rejected."""
    child = walk.draws[b, v, 0]
    x, w = walk.tokens[b, child], walk.weight[b, v]
    p_sum, q_sum = total(p), total(q)
    into = keep(w, p[x] / p_sum, q[x] / q_sum)
    enter(walk, b, v, 0, child, into)
    if into < 1.0:
        walk.accept[b, v] = reweight(w, surplus(w / p_sum, p, 1.0 / q_sum, q))


@compiled
def _stops(order, accept, stop):
    """stop [B, N] from the order of tries and the probability to be accepted at each turn."""
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


@compiled
def _targets(p, at, laws):
    """laws[i] = the normalised target row of context at[i]."""
    for i in range(len(at)):
        copy_normalised(p[at[i, 0], at[i, 1]], laws[i])


def _host(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().numpy()


@dataclass(frozen=True)
class LeafToRoot:
    """A verifier for trees, made of a compiled rule for the tries at one context.

    Rows on another device are copied to the host, and the verdict's tables back.
    """

    info: Method
    tries: Tries

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        probs = torch.zeros_like(target_probs[:, :1]) if draft.probs is None else draft.probs  # without q nothing can be drawn
        kind = torch.float64 if torch.float64 in (probs.dtype, target_probs.dtype) else torch.float32
        p, q = _host(target_probs.to(kind)), _host(probs.to(kind))
        draws = _host(tree.children(draft.tree))
        drawn = draws >= 0
        weight = np.zeros(p.shape[:2])
        weight[:, 0] = 1.0
        walk = Walk(
            _host(draft.tree.tokens), _host(draft.rows), draws, drawn.sum(-1), draft.law.value, weight, weight.copy(), np.full_like(draws, -1)
        )  # fmt: skip
        self.tries(np.argwhere(drawn.any(-1)), walk, p, q, np.empty((0, 0)))
        stop = np.zeros(p.shape[:2])
        _stops(walk.order, walk.accept, stop)
        if np.isnan(stop).any():
            raise InvalidInputError(
                "a drafted token has probability 0 in its row of draft.probs; report the very rows that were sampled."
            )

        after = partial(self._after, walk, p, q, target_probs.device)
        return TreeVerdict(draft.tree, torch.from_numpy(stop).to(target_probs.device), after)

    def _after(
        self, walk: Walk, p: np.ndarray, q: np.ndarray, device: torch.device, node: Int[Tensor, "B"]
    ) -> Float[Tensor, "B V"]:
        """The tries at each row's context once more, now keeping what they leave of p."""
        at = np.stack([np.arange(len(p)), _host(node)], 1)
        laws = np.empty((p.shape[0], p.shape[2]))
        _targets(p, at, laws)
        drawn = walk.counts[at[:, 0], at[:, 1]] > 0
        left = laws[drawn]
        self.tries(at[drawn], walk, p, q, left)
        laws[drawn] = left
        return torch.from_numpy(laws).to(device)
