"""What the fused walks share: a step's verification as one compiled call, from logits to an outcome.

A verifier with a method `walk(draft, logits, key, samplings)` decides just as its verdict does for the distributions that temperature, top-k, top-p and
min-p make of the logits, on the same noise, without making those of rows that it does not visit: draws are gathered, and a residual is made only
where the walk stopped. Equal to the verdict up to rounding.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, NoiseKey, Outcome
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, host
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import sync
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import Stream, uniform_at
from polydraft.sampling.truncation import SAMPLING
from polydraft.verifiers.walks.rows import compiled

STOP: Any = np.int64(Stream.STOP)  # a literal would compile what draws twice
EXTRA: Any = np.int64(Stream.EXTRA)


@compiled
def drawn(row: np.ndarray, seed: int, sample: int, position: int, stream: int) -> int:
    """Draw 0 of a stream from a row."""
    return choose_row(row, uniform_at(seed, sample, position, stream, 0))


@compiled
def child(first: np.ndarray, tokens: np.ndarray, parents: np.ndarray, node: int, pick: int) -> int:
    """The first drafted child of a context that holds the pick; -1 if none does."""
    for m in range(node + 1, len(parents)):
        if parents[m] >= 0 and first[parents[m]] == node and tokens[m] == pick:
            return first[m]
    return -1


class Arrays(NamedTuple):
    """A batch in plain arrays, as compiled walks take it; `node` and `token` are theirs to fill, -1 at faulty logits.

    sync: of `threads`.  samplings, ids: [B] and [V], as `truncation.soften` takes them.
    """

    sync: np.ndarray
    logits: np.ndarray
    samplings: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    seed: np.ndarray
    sample: np.ndarray
    position: np.ndarray
    node: np.ndarray
    token: np.ndarray


class FlowRoom(NamedTuple):
    """Room for the transport of flow verification at one context; M = V + k pieces, V the vocabulary's size.

    tuples [k, M]: the draws of each piece.  widths, spare, share [M]: its probability, what its tuple has left, and the product of both.
    keys [k, M]: q of the draws, to sort by.  a, E [V]: as in `verifiers.flow`.  rest [D, V]: what contexts that are being visited emit.
    """

    tuples: np.ndarray
    keys: np.ndarray
    widths: np.ndarray
    spare: np.ndarray
    share: np.ndarray
    a: np.ndarray
    E: np.ndarray
    rest: np.ndarray


@njit(error_model="numpy")
def room(V, k, levels):
    """For contexts of up to k draws in so many levels."""
    M = V + k
    rows = np.empty((2, V))
    sums = np.empty((3, M))
    return FlowRoom(
        np.empty((k, M), np.int32),
        np.empty((k, M)),
        sums[0],
        sums[1],
        sums[2],
        rows[0],
        rows[1],
        np.empty((levels, V)),
    )


class Tree(NamedTuple):
    """One tree of a batch, and what the visits of its contexts leave behind; N nodes, W draws at a context at most, D levels.

    p: [N, V] target rows: masses of visited contexts; of those with several draws normalised, and what their rejections have left.
    q: [R, V] draft rows.  rows, tokens: as in the draft.  kids, counts: [N, W] draws at each context, and how many.  heights: as in
        `lift.contexts.Contexts`, by child.  several: [N] whether the compiled tries say what comes next.  sampling: value of the DraftSampling.
    stop, weight, scale, draft_scale: [N] stop probability; weight, less what rejections took; 1 / sum of the target and the draft row.
    above: [N] the context it was entered from.  turn: [N] number of tries.
    untried, tried: [D, V] of the contexts being visited: distribution of what is still to be tried, and of the draw that is being tried.
    buckets: [D, V] place of each token in an order.  status, shares: [N, W] what the tries note about each draw.  work: room for flow.
    sync, params, ids: as of `truncation.soften`.
    """

    sync: np.ndarray
    params: Any
    ids: np.ndarray
    p: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    kids: np.ndarray
    counts: np.ndarray
    depth: np.ndarray
    heights: np.ndarray
    several: np.ndarray
    sampling: int
    stop: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    draft_scale: np.ndarray
    above: np.ndarray
    turn: np.ndarray
    untried: np.ndarray
    tried: np.ndarray
    buckets: np.ndarray
    status: np.ndarray
    shares: np.ndarray
    work: FlowRoom


class TreeBatch(NamedTuple):
    """A batch as walks of trees take it.

    draft_probs: [B, R, V].  rows: [B, N] of the draft.  sampling: value of the DraftSampling.  draws: [B, N, W] at each context.  heights: [B, N] as in `lift.contexts.Contexts`, by child.
    """

    batch: Arrays
    draft_probs: np.ndarray
    rows: np.ndarray
    sampling: int
    draws: np.ndarray
    heights: np.ndarray


SOFTMAX = np.array((1.0, 0, 1.0, 0.0, 0.0), SAMPLING)
"""Sampling parameters that change nothing."""


def arrays(
    draft: Draft, logits: Float[Array, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
) -> Arrays:
    """The arrays of a step. samplings: [B] of `SAMPLING`; None: `SOFTMAX`."""
    x = host(logits)
    samplings = np.full(len(x), SOFTMAX) if samplings is None else samplings
    node, token = np.empty((2, len(x)), np.int64)
    ids = np.empty(x.shape[-1], np.int32)
    return Arrays(sync, x, samplings, ids, *draft.tree.host, *key.host, node, token)


def outcome(batch: Arrays) -> Outcome | None:
    """What the walk found; None where logits were faulty: the readable path then names the fault."""
    if min(batch.node.tolist()) < 0 or min(batch.token.tolist()) < 0:
        return None
    return Outcome.of(*tree.paths_to(batch.parents, batch.node), batch.token)
