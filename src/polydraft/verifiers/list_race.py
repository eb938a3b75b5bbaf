"""Gumbel-max list sampling: every path has clocks of its own, and the target takes the first arrival over those still in play.

Rowan, Phan & Khisti 2025 (arXiv 2506.05632).

    E^(k)_t(i)  Exp(1) clock of token i on path k at absolute position t      draft of path k: argmin_i E^(k)_t(i) / q(i)
    active      the paths that agree with the output so far
    y_t       = argmin_i min over active k of E^(k)_t(i) / p(i | path)

Lossless: the active set was settled by earlier positions, so the least of its clocks is exponential for every token, and y_t ~ p.
Acceptance at one node is at least sum_j K / (sum_i max(p_i / p_j, q_i / q_j) + (K - 1) / p_j).
The clock of path k and token i is number k V + i of the race stream; path 0 is the one of `race`. The j-th child of a node,
j > 0, starts a new path; the first child continues its parent's.
Trap: a path dropped because of the token it drew at this very position biases the law (total variation 0.07).
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numba import njit
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import Draft, Method, NoiseKey, Outcome, SiblingLaw, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.verifiers.fast.rows import soften
from polydraft.verifiers.fast.walk import arrays, outcome
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.race import child, follow

__all__ = ["ListRace", "list_race", "path_numbers"]


@njit(cache=True)
def _number(parents, numbers):
    """Path of every node: the first child continues its parent's, the others start new ones."""
    B, N = parents.shape
    for b in range(B):
        started, continued = 1, np.zeros(N, np.bool_)
        for n in range(1, N):
            u = parents[b, n]
            if u >= 0:
                numbers[b, n] = started if continued[u] else numbers[b, u]
                started += continued[u]
                continued[u] = True


@njit(cache=True)
def _activate(parents, first, numbers, active):
    """active[b, n, k]: path k agrees with context n: it runs through it, or it starts there."""
    for b in range(len(parents)):
        active[b, 0, 0] = True
        for n in range(1, parents.shape[1]):
            if parents[b, n] >= 0:
                active[b, first[b, n], numbers[b, n]] = True
                active[b, first[b, parents[b, n]], numbers[b, n]] = True


def path_numbers(drafted: TokenTree) -> Int[Tensor, "B N"]:
    """Which path each node belongs to; the root is on path 0, padding too.

    Example:
        >>> path_numbers(tree.pad([([0, 5, 6, 7, 8], [-1, 0, 0, 1, 2])])).tolist()
        [[0, 0, 1, 0, 1]]
    """
    numbers = np.zeros(drafted.parents.shape, np.int64)
    _number(drafted.parents.cpu().contiguous().numpy(), numbers)
    return torch.from_numpy(numbers)


def _active(drafted: TokenTree) -> Bool[np.ndarray, "B N K"]:
    """Which paths are in play at each context."""
    numbers = path_numbers(drafted).numpy()
    active = np.zeros((*numbers.shape, int(numbers.max()) + 1), np.bool_)
    parents, first = (x.cpu().contiguous().numpy() for x in (drafted.parents, tree.first_copies(drafted)))
    _activate(parents, first, numbers, active)
    return active


@njit(cache=True, error_model="numpy")
def _first_arrival(rates, active, seed, sample, position):
    """The token with the first arrival over the active paths, the lowest id among equals."""
    V, best, least = rates.size, -1, np.inf
    pick = np.empty(1, np.int64)
    for k in range(len(active)):
        if active[k]:
            noise.first_arrivals(rates, seed, sample, position, pick, k * V)
            at = noise.clock_at(seed, sample, position, k * V + pick[0]) / rates[pick[0]]
            if at < least or (at == least and pick[0] < best):
                best, least = pick[0], at
    return best


@njit(cache=True)
def _fill_picks(p, depth, active, seed, sample, position, picks):
    """picks[b, n] at every context; copies and padding have no active paths."""
    for b in range(picks.shape[0]):
        for n in range(picks.shape[1]):
            if active[b, n].any():
                picks[b, n] = _first_arrival(p[b, n], active[b, n], seed[b], sample[b], position[b] + depth[b, n])


def _picks_elsewhere(
    key: NoiseKey, depth: Int[Tensor, "B N"], active: Bool[Tensor, "B N K"], p: Float[Tensor, "B N V"]
) -> Int[Tensor, "B N"]:
    """`_fill_picks` in torch operations, for other devices."""
    picks, (K, V) = torch.zeros_like(depth), (active.shape[-1], p.shape[-1])
    for d in range(int(depth.max()) + 1):
        clocks = noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), K * V).view(-1, K, V)
        b, n = ((depth == d) & active.any(-1)).nonzero(as_tuple=True)
        first, rates = torch.where(active[b, n, :, None], clocks[b], torch.inf).amin(1), p[b, n].double()
        picks[b, n] = torch.where(rates > 0, first / rates, torch.inf).argmin(-1)
    return picks


def _picks(key: NoiseKey, drafted: TokenTree, p: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
    """The target's pick at every context."""
    depth, active = tree.depths(drafted), _active(drafted)
    if p.device.type != "cpu":
        return _picks_elsewhere(key, depth, torch.from_numpy(active).to(p.device), p)
    picks = np.zeros(depth.shape, np.int64)
    noises = key.seed.numpy(), key.sample.numpy(), key.position.numpy()
    _fill_picks(p.contiguous().numpy(), depth.numpy(), active, *noises, picks)
    return torch.from_numpy(picks)


@njit(cache=True, error_model="numpy")
def _run(logits, laws, first, tokens, parents, seed, sample, position, node, token, active):
    """The race at the nodes that the walk visits, with rates exp(logits): the pick needs no normaliser."""
    rates = np.empty(logits.shape[2], np.float32)
    for b in range(len(node)):
        n, following, depth, pick = 0, 0, 0, -1
        while following >= 0:
            n = following
            if not soften(logits[b, n], rates) > 0.0:
                n = -1
                break
            pick = _first_arrival(rates, active[b, n], seed[b], sample[b], position[b] + depth)
            following, depth = child(first[b], tokens[b], parents[b], n, pick), depth + 1
        node[b], token[b] = n, pick


class ListRace:
    """The verifier. Its verdict is a point mass given the noise, which it reads from `draft.noise`."""

    info = Method(
        name="list_race",
        title="Gumbel-max list sampling",
        authors="Rowan, Phan & Khisti",
        year=2025,
        arxiv="2506.05632",
        laws=frozenset({SiblingLaw.LISTED}),
        shapes=frozenset({TreeShape.CHAIN, TreeShape.PATHS}),
        shared_noise=True,
    )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        if draft.noise is None:
            raise InvalidInputError(
                "a draft without noise was given to the list race; expected draft.noise, the key of this round's clocks."
            )
        picks = _picks(draft.noise, draft.tree, target_probs)
        node = follow(draft.tree, picks)
        stop = torch.zeros(picks.shape, dtype=torch.float64, device=picks.device).scatter_(1, node[:, None], 1.0)

        def after(at: Tensor) -> Tensor:
            law = torch.zeros_like(target_probs[:, 0], dtype=torch.float64)
            return law.scatter_(1, picks.gather(1, at[:, None]), 1.0)

        return TreeVerdict(draft.tree, stop, after)

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """The verdict's outcome for p = softmax(logits), float32, in one call; None where logits are faulty."""
        if draft.noise is None or logits.device.type != "cpu":
            return None
        done = arrays(draft, logits, draft.noise)
        _run(*done._replace(laws=done.logits[:, :0], rows=tree.first_copies(draft.tree).numpy()), _active(draft.tree))
        return outcome(draft, done)


list_race = ListRace()
"""The verifier."""
