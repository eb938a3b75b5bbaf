"""Exponential race: target and draft pick from the same clocks, and the walk goes on while the target's pick was drafted.

Kobus & Gunduz 2025 (ERSD, arXiv 2504.15475); one draft: Daliri, Musco & Suresh 2024 (2408.07978).

    E_t(i)  Exp(1) clock of token i at absolute position t, a function of (seed, sample, t, i) alone
    y_t   = argmin_i E_t(i) / p(i | path)        the target's pick        draft: the smallest E_t(i) / q(i)

The output is y_0 y_1 ...: a function of seed and target, not of drafter, tree, batch or number of rounds (seed-exact).
So every draft is admissible whose tokens do not look ahead in a way that the clocks could not cause, and the law is exact
because each y_t ~ p. Acceptance is highest for COUPLED drafts.
Trap: all nodes of a depth share their clocks, so a coupled draft must not be given to a leaf-to-root rule.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import Draft, Method, NoiseKey, Outcome, SiblingLaw, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.verifiers.fast import device
from polydraft.verifiers.fast.rows import soften
from polydraft.verifiers.fast.walk import arrays, outcome
from polydraft.verifiers.lift.verdict import TreeVerdict

__all__ = ["Race", "child", "follow", "race"]


def _picks(key: NoiseKey, depth: Int[Tensor, "B N"], p: Float[Tensor, "B N V"]) -> Int[Tensor, "B N"]:
    """The target's pick at every node: argmin E / p, the lowest id among equals."""
    if p.device.type == "cpu":
        picks = np.zeros(depth.shape, np.int64)
        _fill_picks(p.contiguous().numpy(), depth.numpy(), key.seed.numpy(), key.sample.numpy(), key.position.numpy(), picks)
        return torch.from_numpy(picks)
    picks = torch.zeros_like(depth)
    for d in range(int(depth.max()) + 1):
        clocks = noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), p.shape[-1])
        b, n = (depth == d).nonzero(as_tuple=True)
        rates = p[b, n].double()
        picks[b, n] = torch.where(rates > 0, clocks[b] / rates, torch.inf).argmin(-1)
    return picks


@njit(cache=True)
def _fill_picks(p, depth, seed, sample, position, picks):
    """picks[b, n] at every node; padding has depth -1."""
    for b in range(picks.shape[0]):
        for n in range(picks.shape[1]):
            if depth[b, n] >= 0:
                noise.first_arrivals(p[b, n], seed[b], sample[b], position[b] + depth[b, n], picks[b, n : n + 1])


@njit(cache=True)
def child(first, tokens, parents, node, pick):
    """The first drafted child of a context that holds the pick; -1 if none does."""
    for m in range(node + 1, len(parents)):
        if parents[m] >= 0 and first[parents[m]] == node and tokens[m] == pick:
            return first[m]
    return -1


@njit(cache=True)
def _ends(first, tokens, parents, picks, node):
    """Where the walks along the picks leave the trees."""
    for b in range(len(node)):
        following = 0
        while following >= 0:
            node[b] = following
            following = child(first[b], tokens[b], parents[b], node[b], picks[b, node[b]])


def follow(drafted: TokenTree, picks: Int[Tensor, "B N"]) -> Int[Tensor, "B"]:
    """Where the walk along the picks, one for each context, leaves the tree.

    Example:
        >>> follow(TokenTree.chain(torch.tensor([[5, 7, 9]])), torch.tensor([[7, 8, 0]])).tolist()
        [1]
    """
    arrays = (x.cpu().contiguous().numpy() for x in (tree.first_copies(drafted), drafted.tokens, drafted.parents, picks))
    node = np.empty(len(picks), np.int64)
    _ends(*arrays, node)
    return torch.from_numpy(node).to(picks.device)


@njit(cache=True, error_model="numpy")
def _run(logits, laws, first, tokens, parents, seed, sample, position, node, token):
    """The race at the nodes that the walk visits, with rates exp(logits): the pick needs no normaliser."""
    rates, pick = np.empty(logits.shape[2], np.float32), np.empty(1, np.int64)
    for b in range(len(node)):
        n, following, depth = 0, 0, 0
        while following >= 0:
            n = following
            if not soften(logits[b, n], rates) > 0.0:
                n = -1
                break
            noise.first_arrivals(rates, seed[b], sample[b], position[b] + depth, pick)
            following, depth = child(first[b], tokens[b], parents[b], n, pick[0]), depth + 1
        node[b], token[b] = n, pick[0]


class Race:
    """The verifier. Its verdict is a point mass given the noise, which it reads from `draft.noise`."""

    info = Method(
        name="race",
        title="Exponential race (seed-exact)",
        authors="Kobus & Gunduz",
        year=2025,
        arxiv="2504.15475",
        laws=frozenset(SiblingLaw),
        shapes=frozenset(TreeShape),
        shared_noise=True,
    )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        if draft.noise is None:
            raise InvalidInputError(
                "a draft without noise was given to the race; expected draft.noise, the key of this round's clocks."
            )
        picks = _picks(draft.noise, tree.depths(draft.tree), target_probs)
        node = follow(draft.tree, picks)
        stop = torch.zeros(picks.shape, dtype=torch.float64, device=picks.device).scatter_(1, node[:, None], 1.0)

        def after(at: Tensor) -> Tensor:
            law = torch.zeros_like(target_probs[:, 0], dtype=torch.float64)
            return law.scatter_(1, picks.gather(1, at[:, None]), 1.0)

        return TreeVerdict(draft.tree, stop, after)

    def walk(self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Outcome | None:
        """The verdict's outcome for p = softmax(logits), float32, in one call; None where logits are faulty."""
        if draft.noise is None:
            return None
        if logits.device.type != "cpu":
            return device.walk(device.race, draft, logits, draft.noise)
        done = arrays(draft, logits, draft.noise)
        _run(*done._replace(laws=done.logits[:, :0], rows=tree.first_copies(draft.tree).numpy()))
        return outcome(draft, done)


race = Race()
"""The verifier."""
