"""From a verifier for one context to trees, for arrays of any library and device: all contexts of a depth at once, from the root down.

    per node       the weight of a context is the probability to get there, of the root 1; a verifier hands it on to the children, and
                   what it does not hand on is the context's
    leaf to root   a context of weight w accepts itself or something below it with probability w, on average over what was drawn below

Copies of a context are one: they pool their draws in draw order.
Trap: a list of children made from paths, which counts a draw once for each path through it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, double, host, like, namespace, put, take
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.residual import normalise, normalise_or


class Contexts(NamedTuple):
    """M contexts of one depth that have draws; float64.

    weight: see the module.  p: target distributions.  q: distributions of the draws; [M, n, V] where each draw has its own; None where there is none.
    tokens: of the draws in their order, padded with -1.  heights: how deep the tree goes on below each draw, where that was fixed before the
    first draw, else 0.
    """

    weight: Float[Array, " M"]
    p: Float[Array, "M V"]
    q: Float[Array, "M V"] | Float[Array, "M n V"] | None
    tokens: Int[Array, "M n"]
    sampling: DraftSampling
    heights: Int[Array, "M n"]


class Decision(NamedTuple):
    """What a verifier decides at M contexts.

    weights: of each draw; 0 at a repeated token.  stops: what is left for the context itself.
    rest: what the extra token is drawn from; p where it is all zero.  turns: of each draw, when it is visited; -1: never.
    """

    weights: Float[Array, "M n"]
    stops: Float[Array, " M"]
    rest: Float[Array, "M V"]
    turns: Int[Array, "M n"]


class Lifted(NamedTuple):
    """Tables of a batch.

    weights: of contexts without draws; of others what their children leave of it.  rest: as in `Decision`.  p: target distributions.  visits: children of each context in the order of their visits,
    padded with -1.
    """

    weights: Float[Array, "B N"]
    rest: Float[Array, "B N V"]
    p: Float[Array, "B N V"]
    visits: Int[np.ndarray, "B N W"]

    def after(self, node: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Distributions of the extra tokens behind these nodes."""
        batch = like(np.arange(len(node)), self.p)
        return normalise_or(self.rest[batch, node], otherwise=self.p[batch, node])


def _draft_probs(draft: Draft, b: Int[np.ndarray, " M"], nodes: Int[np.ndarray, "M n"]) -> Array | None:
    if draft.probs is None or draft.sampling is DraftSampling.POINT_MASS:
        return None
    batch = b[:, None]
    rows = host(draft.rows)[batch, np.maximum(nodes, 0)]
    if draft.sampling is not DraftSampling.INDEPENDENT:
        return normalise(double(take(draft.probs, b, np.maximum(rows[:, 0], 0))))
    rows = np.where(nodes >= 0, rows, rows[:, :1])
    return normalise(double(take(draft.probs, np.broadcast_to(batch, rows.shape), rows)))


def heights(draft: Draft) -> Int[np.ndarray, "B N"]:
    """How deep the tree goes on below each node, where that was fixed before the first draw, else 0."""
    if draft.shape in (TreeShape.RAGGED, TreeShape.BY_POSITION):
        return host(tree.heights(draft.tree))
    return np.zeros_like(draft.tree.host.parents)


def _in_turn(draws: Int[np.ndarray, "M n"], turns: Int[np.ndarray, "M n"]) -> Int[np.ndarray, "M n"]:
    """The draws that are visited in the order of their visits, padded with -1."""
    is_visited = turns >= 0
    order = np.argsort(np.where(is_visited, turns, turns.shape[1]), axis=1, kind="stable")
    return np.take_along_axis(np.where(is_visited, draws, -1), order, 1)


def _levels(draft: Draft, draws: Int[np.ndarray, "B N W"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batch rows and nodes of the contexts that have draws, depth by depth."""
    depths = host(tree.depths(draft.tree))
    for depth in range(int(depths.max()) + 1 if draws.shape[-1] else 0):
        b, node = np.nonzero((draws[..., 0] >= 0) & (depths == depth))
        if len(b):
            yield b, node


def _drafted_at(
    draft: Draft, b: Int[np.ndarray, " M"], draws: Int[np.ndarray, "M n"], kind: Array
) -> tuple[Array | None, Array, Array]:
    """q, tokens and heights of draws. kind: an array of the library and device that they shall be of."""
    place = b[:, None], np.maximum(draws, 0)
    tokens = np.where(draws >= 0, draft.tree.host.tokens[place], -1)
    return _draft_probs(draft, b, draws), like(tokens, kind), like(heights(draft)[place], kind)


def _handed_on(
    weights: Float[Array, "B N"],
    b: Int[np.ndarray, " M"],
    children: Int[np.ndarray, "M n"],
    handed: Float[Array, "M n"],
) -> Float[Array, "B N"]:
    """The weights with those that contexts hand on to their children, which are padded with -1."""
    context, turn = np.nonzero(children >= 0)
    return put(weights, (b[context], children[context, turn]), take(handed, context, turn))


def lifted(
    draft: Draft, target_probs: Float[Array, "B N V"], rule: Callable[[Contexts], Decision], merged: bool
) -> Lifted:
    """The tables of a verifier. merged: equal siblings are one draw, of draws without replacement; see `lift.draws`."""
    xp = namespace(target_probs)
    p = normalise(double(target_probs))
    draws = draws_at(draft.tree, merged)
    sampling = DraftSampling.WITHOUT_REPLACEMENT if merged else draft.sampling
    root = like(np.eye(1, draws.shape[1]), p)
    weights = xp.zeros_like(p[..., 0]) + root
    rest = xp.asarray(p, copy=True)
    visits = np.full_like(draws, -1)
    for b, node in _levels(draft, draws):
        children = draws[b, node]
        q, tokens, below = _drafted_at(draft, b, children, p)
        with np.errstate(divide="ignore", invalid="ignore"):  # what is not drawn is divided, too
            decided = rule(Contexts(take(weights, b, node), take(p, b, node), q, tokens, sampling, below))
        weights = _handed_on(weights, b, children, decided.weights)
        weights = put(weights, (b, node), decided.stops)
        rest = put(rest, (b, node), decided.rest)
        visits[b, node] = _in_turn(children, host(decided.turns))
    return Lifted(weights, rest, p, visits)
