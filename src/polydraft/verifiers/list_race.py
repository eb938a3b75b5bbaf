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

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import noise, tree
from polydraft.core import Draft, Method, NoiseKey, SiblingLaw, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.verifiers._verdict import TreeVerdict

__all__ = ["ListRace", "list_race", "path_numbers"]


def path_numbers(drafted: TokenTree) -> Int[Tensor, "B N"]:
    """Which path each node belongs to; the root is on path 0, padding too.

    Example:
        >>> path_numbers(tree.pad([([0, 5, 6, 7, 8], [-1, 0, 0, 1, 2])])).tolist()
        [[0, 0, 1, 0, 1]]
    """
    parents = drafted.parents.cpu().numpy()
    numbers = np.zeros(parents.shape, np.int64)
    for b, row in enumerate(parents):
        started, continued = 1, set[int]()
        for n, parent in enumerate(row.tolist()):
            if parent < 0:
                continue
            if parent in continued:
                numbers[b, n] = started
                started += 1
            else:
                continued.add(parent)
                numbers[b, n] = numbers[b, parent]
    return torch.from_numpy(numbers)


class _Walk:
    """Picks at the contexts of one batch, made when they are asked for."""

    def __init__(self, draft: Draft, key: NoiseKey, target_probs: Float[Tensor, "B N V"]) -> None:
        self.p, self.key = target_probs, key
        numbers = path_numbers(draft.tree)
        self.depth, self.children = tree.depths(draft.tree).cpu(), tree.children(draft.tree).cpu()
        self.tokens = draft.tree.tokens.cpu()
        copies, parents = tree.first_copies(draft.tree).cpu(), draft.tree.parents.cpu()
        self.active: list[list[set[int]]] = []
        for b in range(len(numbers)):
            sets = [set[int]() for _ in range(numbers.shape[1])]
            for n in range(numbers.shape[1]):
                if n == 0 or parents[b, n] >= 0:
                    sets[int(copies[b, n])].add(int(numbers[b, n]))
                if parents[b, n] >= 0:
                    sets[int(copies[b, parents[b, n]])].add(int(numbers[b, n]))
            self.active.append(sets)

    def pick(self, b: int, n: int) -> int:
        """The target's token at context n of row b."""
        numbers, rates = sorted(self.active[b][n]), self.p[b, n].double().cpu()
        key = NoiseKey(self.key.seed[b : b + 1], self.key.sample[b : b + 1], self.key.position[b : b + 1] + self.depth[b, n])
        V = len(rates)
        clocks = noise.clocks(key, (numbers[-1] + 1) * V).cpu().view(-1, V)[numbers].amin(0)
        return int(torch.where(rates > 0, clocks / rates, torch.inf).argmin())

    def end(self, b: int) -> int:
        """Where the walk along the picks leaves the tree."""
        node = following = 0
        while following >= 0:
            node, y = following, self.pick(b, following)
            below = self.children[b, node].tolist()
            following = next((c for c in below if c >= 0 and int(self.tokens[b, c]) == y), -1)
        return node


def _after(walk: _Walk, node: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
    law = torch.zeros_like(walk.p[:, 0], dtype=torch.float64)
    picks = torch.tensor([[walk.pick(b, n)] for b, n in enumerate(node.tolist())], device=law.device)
    return law.scatter_(1, picks, 1.0)


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
        walk = _Walk(draft, draft.noise, target_probs)
        ends = torch.tensor([walk.end(b) for b in range(len(target_probs))], device=target_probs.device)
        stop = torch.zeros(draft.tree.tokens.shape, dtype=torch.float64, device=target_probs.device)
        return TreeVerdict(draft.tree, stop.scatter_(1, ends[:, None], 1.0), partial(_after, walk))


list_race = ListRace()
"""The verifier."""
