"""Exponential race: target and draft pick from the same clocks, and the walk goes on while the target's pick was drafted.

Kobus & Gunduz 2025 (ERSD, arXiv 2504.15475); one draft: Daliri, Musco & Suresh 2024 (2408.07978).

    E_t(i)  Exp(1) clock of token i at absolute position t, a function of (seed, sample, t, i) alone
    y_t   = argmin_i E_t(i) / p(i | path)        the target's pick        draft: the smallest E_t(i) / q(i)

The output is y_0 y_1 ...: a function of seed and target, not of drafter, tree, batch or number of steps (seed-exact).
Lossless because each y_t ~ p. So every draft is admissible whose tokens do not look ahead in a way that the clocks could not cause.
Acceptance is highest for COUPLED drafts.
Trap: all nodes of a depth share their clocks, so a coupled draft must not be given to a leaf-to-root verifier.
Cost: A vector of clocks for each node that the walk visits: time O(V), memory O(V); q is never read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core import Draft, DraftSampling, Method, NoiseKey, Outcome, TokenTree
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, gather, host, like, scatter
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, ROWS, num_pieces, share_row, sync
from polydraft.sampling import noise
from polydraft.sampling.truncation import soften
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.walks.steps import arrays, child, outcome


@njit(cache=True, error_model="numpy")
def _run_pieces(arguments, begin, end, thread):
    """Races among the tokens of some pieces of the rows of clocks, all rows in one."""
    rates, clocks, key, room, arrival, drawn = arguments
    seed, sample, position = key
    width = num_pieces(rates.size) * PIECE
    for at in range(begin, end, PIECE):
        piece = at // PIECE
        first = at % width
        arrival[piece, 0] = np.inf
        last = min(first + PIECE, rates.size)
        start = clocks[at // width] * rates.size
        noise.arrivals(
            rates, first, last, seed, sample, position, start, room[piece], arrival[piece], drawn[piece]
        )


@njit(cache=True, error_model="numpy")
def _first_arrival(sync, rates, active, seed, sample, position):
    """The token with the first arrival over the active clocks, the lowest id among equals."""
    clocks = np.flatnonzero(active)
    many = len(clocks) * num_pieces(rates.size)
    room = np.empty((many, noise.SPAN))
    arrival = np.empty((many, 1))
    drawn = np.empty((many, 1), np.int64)
    arguments = rates, clocks, (seed, sample, position), room, arrival, drawn
    share_row(sync, shared_code(_run_pieces, arguments), arguments, many * PIECE)
    best = 0
    for i in range(many):
        if arrival[i, 0] < arrival[best, 0] or (
            arrival[i, 0] == arrival[best, 0] and drawn[i, 0] < drawn[best, 0]
        ):
            best = i
    return drawn[best, 0]


@njit(cache=True)
def _fill_picks(sync, p, depth, active, seed, sample, position, picks):
    """picks[b, n] at every context; padding has depth -1, copies may have no active clocks."""
    for b in range(picks.shape[0]):
        for n in range(picks.shape[1]):
            if depth[b, n] >= 0 and active[b, n].any():
                picks[b, n] = _first_arrival(
                    sync, p[b, n], active[b, n], seed[b], sample[b], position[b] + depth[b, n]
                )


def _picks(
    key: NoiseKey, depth: Int[Array, "B N"], active: Bool[np.ndarray, "B N K"], p: Float[Array, "B N V"]
) -> Int[Array, "B N"]:
    """The target's pick at every context: argmin E / p over the active clocks, the lowest id among equals."""
    picks = np.zeros(depth.shape, np.int64)
    _fill_picks(sync, host(p), host(depth), active, *key.host, picks)
    return like(picks, p)


@njit(cache=True)
def _ends(first, tokens, parents, picks, node):
    """Where the picks lead out of the trees."""
    for b in range(len(node)):
        following = 0
        while following >= 0:
            node[b] = following
            following = child(first[b], tokens[b], parents[b], node[b], picks[b, node[b]])


def follow(drafted: TokenTree, picks: Int[Array, "B N"]) -> Int[Array, " B"]:
    """The node where the picks, one for each context, lead out of the tree.

    Example:
        >>> follow(TokenTree.chain(np.array([[5, 7, 9]])), np.array([[7, 8, 0]])).tolist()
        [1]
    """
    node = np.empty(len(picks), np.int64)
    _ends(host(tree.first_copies(drafted)), *drafted.host, host(picks), node)
    return like(node, picks)


@njit(cache=True, error_model="numpy")
def _walk(batch, first, active):
    """The race at the nodes that the walk visits, with masses for rates: the pick needs no normaliser."""
    sync = batch.sync
    logits = batch.logits
    node = batch.node
    rates = np.empty(logits.shape[2], np.float32)
    for b in range(len(node)):
        n = 0
        following = 0
        depth = 0
        pick = -1
        while following >= 0:
            n = following
            if not soften(sync, logits[b, n], batch.samplings[b], rates, batch.ids) > 0.0:
                n = -1
                break
            pick = _first_arrival(
                sync, rates, active[b, n], batch.seed[b], batch.sample[b], batch.position[b] + depth
            )
            following = child(first[b], batch.tokens[b], batch.parents[b], n, pick)
            depth = depth + 1
        node[b] = n
        batch.token[b] = pick


@dataclass(frozen=True)
class Race:
    """A verifier by races. Its verdict is a point mass given the noise, which it reads from `draft.noise`.

    active: of a tree, [B, N, K] which vectors of clocks are in play at each context; vector k has numbers k V to (k + 1) V - 1 of
    the race stream.
    """

    info: Method
    active: Callable[[TokenTree], Bool[np.ndarray, "B N K"]]

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        if draft.noise is None:
            raise InvalidInputError(
                f"a draft without noise was given to the {self.info.name.replace('_', ' ')}; expected draft.noise, the key of this "
                "step's clocks."
            )
        picks = _picks(draft.noise, tree.depths(draft.tree), self.active(draft.tree), target_probs)
        node = follow(draft.tree, picks)
        stop = scatter(like(np.zeros(picks.shape), picks), node[:, None], 1.0)

        def after(at: Array) -> Array:
            B, _, V = target_probs.shape
            return scatter(like(np.zeros((B, V)), picks), gather(picks, at[:, None]), 1.0)

        return TreeVerdict(draft.tree, stop, after)

    def walk(
        self, draft: Draft, logits: Float[Array, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
    ) -> Outcome | None:
        """See `core.Walking`."""
        if draft.noise is None:
            return None
        batch = arrays(draft, logits, draft.noise, samplings)
        active = self.active(draft.tree)
        with ROWS:
            _walk(batch, host(tree.first_copies(draft.tree)), active)
        return outcome(batch)


def _the_same(drafted: TokenTree) -> Bool[np.ndarray, "B N 1"]:
    """One vector of clocks everywhere."""
    return np.ones((*drafted.parents.shape, 1), np.bool_)


race = Race(
    method("race", "Exponential race (seed-exact)", "2504.15475", DraftSampling, shared_noise=True), _the_same
)
"""The verifier."""
