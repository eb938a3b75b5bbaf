"""Leaf to root: lift a verifier for the tries at one context to a whole tree.

Weng et al. 2025 (traversal verification, arXiv 2505.12398), freed of its draw order.

    visit(v, w)   accepts v or something below it with total probability w, and then goes on by the target's distribution;
                  the root has w = 1, a leaf is accepted with probability w
    tries at v    its children in an order that is fixed given the draft, each against q, the exact conditional distribution of
                  that draw:  visit(x, min(1, w p(x) / q(x)));  rejected: p <- N((w p - q)+), w <- S / (S + 1 - w), S its sum
    after them    v is accepted with what is left of w, and emits a token of what is left of p

The stop is drawn in the order in which visits end, so that a walk need not look beyond it.
Lossless if every q is the distribution of its draw given all that was looked at before, and the order looks at no draw that is
not revealed yet. A child entered with weight 1 surely accepts: its later siblings, and v itself, are never reached.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core import Draft, DraftSampling, Method, NoiseKey, Outcome
from polydraft.core.arrays import Array, first, gather, host, like, namespace, scatter
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import ROWS
from polydraft.verifiers.lift.contexts import Contexts, Decision, heights, lifted
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise_or, positive_part
from polydraft.verifiers.walks.steps import TreeBatch, arrays, outcome


def accepted_weight(
    w: Float[Array, " M"], p: Float[Array, "M V"], q: Float[Array, "M V"], x: Int[Array, " M"]
) -> Float[Array, " M"]:
    """min(1, w p(x) / q(x)): the weight with which x is entered; NaN where the draft gave it no mass, which no draw can do.

    Example:
        >>> accepted_weight(np.ones(1), np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]]), np.array([0])).tolist()
        [0.5]
    """
    xp = namespace(p)
    px = gather(p, x[:, None])[:, 0]
    qx = gather(q, x[:, None])[:, 0]
    return xp.where(qx > 0, xp.clip(w * px / qx, max=1.0), xp.nan)


def reweight(w: Float[Array, " M"], S: Float[Array, " M"]) -> Float[Array, " M"]:
    """Weight after rejections that leave S: S / (S + 1 - w); 1 where nothing can be left.

    Example:
        >>> with np.errstate(invalid="ignore"):
        ...     reweight(np.array([0.5, 1.0]), np.array([0.5, 0.0])).tolist()
        [0.5, 1.0]
    """
    return namespace(w).where((S == 0) & (w == 1), 1.0, S / (S + (1 - w)))


def rejected(
    w: Float[Array, " M"], p: Float[Array, "M V"], q: Float[Array, "M V"]
) -> tuple[Float[Array, " M"], Float[Array, "M V"]]:
    """What the rejection of a draw from q leaves of w and of p: S / (S + 1 - w) and N((w p - q)+), S its sum; p where that is empty.

    Example:
        >>> rejected(np.ones(1), np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]]))[1].tolist()
        [[0.0, 1.0]]
    """
    surplus = positive_part(w[:, None] * p - q)
    return reweight(w, namespace(p).sum(surplus, axis=-1)), normalise_or(surplus, otherwise=p)


class Tries:
    """The tries at M contexts, one at each of them at a time.

    weight: what is left of w.  rest: what is left of p.

    Example:
        >>> from polydraft.core import DraftSampling
        >>> p, q = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]])
        >>> zero = np.zeros((1, 1), np.int64)
        >>> tries = Tries(Contexts(np.ones(1), p, q, zero, DraftSampling.IID, zero))
        >>> tries.attempt(zero[:, 0], q)
        >>> tries.decision().weights.tolist(), tries.rest.tolist()
        ([[0.5]], [[0.0, 1.0]])
    """

    def __init__(self, at: Contexts) -> None:
        xp = namespace(at.p)
        self.tokens = at.tokens
        self.weight = at.weight
        self.rest = at.p
        self._places = like(np.arange(at.tokens.shape[1]), at.p)
        self._weights = xp.zeros_like(at.tokens, dtype=at.p.dtype)
        self._turns = xp.full_like(at.tokens, -1)
        self._turn = 0
        self._reached = at.weight != 0

    def attempt(
        self, draw: Int[Array, " M"], q: Float[Array, "M V"], there: Bool[Array, " M"] | None = None
    ) -> None:
        """Try a draw from q, where it is there. A token that was tried before is not entered again; its rejection counts once more."""
        xp = namespace(q)
        x = gather(self.tokens, draw[:, None])
        w = self.weight
        is_there = x[:, 0] >= 0 if there is None else there
        x = xp.clip(x, min=0)
        is_equal = self.tokens == x
        repeated = xp.any(is_equal & (self._turns >= 0), axis=1)
        enters = is_there & ~repeated & self._reached
        into = xp.where(enters, accepted_weight(w, self.rest, q, x[:, 0]), 0.0)
        here = (self._places == first(is_equal)[:, None]) & enters[:, None]  # the first copy has the context
        self._weights = xp.where(here, into[:, None], self._weights)
        self._turns = xp.where(here, self._turn, self._turns)
        self._turn = self._turn + 1
        self._reached = self._reached & (into != 1)
        remaining, rest = rejected(w, self.rest, q)
        self.weight = xp.where(is_there, remaining, w)
        self.rest = xp.where(is_there[:, None], rest, self.rest)

    def decision(self) -> Decision:
        """After the last of them."""
        return Decision(self._weights, self.weight, self.rest, self._turns)


@njit(cache=True)
def _ends(visits, order):
    """Nodes of each tree in the order in which their visits end, those that are not visited behind them."""
    B, N, W = visits.shape
    pending = np.empty(N, np.int64)
    ended = np.empty(N, np.bool_)
    for b in range(B):
        size = 1
        last = N
        pending[0] = 0
        ended[:] = False
        while size > 0:  # parents first, last visits first: the reverse order
            size -= 1
            v = pending[size]
            last = last - 1
            order[b, last] = v
            ended[v] = True
            for k in range(W):
                if visits[b, v, k] >= 0:
                    pending[size] = visits[b, v, k]
                    size += 1
        order[b, : N - last] = order[b, last:].copy()
        order[b, N - last :] = np.flatnonzero(~ended)


def check_stop(stop: Float[Array, "B N"]) -> None:
    """Raise InvalidInputError where a token was tried that its row gives no mass."""
    if np.isnan(host(stop)).any():
        raise InvalidInputError(
            "a drafted token has probability 0 in its row of draft.probs; report the very rows that were sampled."
        )


@dataclass(frozen=True)
class LeafToRoot:
    """A verifier for trees, made of one for the tries at one context.

    tries: at contexts with any weight.  compiled_walk: `walks.visits.visit_trees` with the same tries.
    merged: equal siblings are one draw, of draws without replacement; see `lift.draws`.
    """

    info: Method
    tries: Callable[[Contexts], Decision]
    compiled_walk: Callable[[TreeBatch], None]
    merged: bool = False

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        xp = namespace(target_probs)
        if draft.probs is None and draft.sampling is not DraftSampling.POINT_MASS:
            # It drew nothing: against rows without mass any drawn token is found out.
            rows = like(np.minimum(host(draft.rows), 0), draft.rows)
            draft = replace(draft, probs=xp.zeros_like(target_probs[:, :1]), rows=rows)
        tables = lifted(draft, target_probs, self.tries, self.merged)
        order = np.empty(tables.weights.shape, np.int64)
        _ends(tables.visits, order)
        visit_ends = like(order, tables.weights)
        accept = gather(tables.weights, visit_ends)
        not_before = xp.cumulative_prod(1 - accept[:, :-1], axis=1)
        before = xp.concat([xp.ones_like(accept[:, :1]), not_before], axis=1)
        stop = scatter(xp.zeros_like(accept), visit_ends, before * accept)
        check_stop(stop)
        return TreeVerdict(draft.tree, stop, tables.after, visit_ends)

    def walk(
        self, draft: Draft, logits: Float[Array, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
    ) -> Outcome | None:
        """See `core.Walking` and `walks.visits`."""
        batch = arrays(draft, logits, key, samplings)
        draft_probs = batch.logits[:, :0] if draft.probs is None else host(draft.probs)
        if draft.probs is not None and draft_probs.dtype != np.float32:
            return None
        draws = draws_at(draft.tree, self.merged)
        rows = host(draft.rows)
        sampling = DraftSampling.WITHOUT_REPLACEMENT if self.merged else draft.sampling
        with ROWS:
            self.compiled_walk(TreeBatch(batch, draft_probs, rows, sampling.value, draws, heights(draft)))
        return outcome(batch)
