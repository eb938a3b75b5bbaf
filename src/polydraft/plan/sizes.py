"""The sizes that a plan weighs: chains and K paths, down to any depth.

    1 - r_d = (1 - a_d)^e_d,   tokens of a size = 1 + r_0 + r_0 r_1 + ... down to its depth

The sizes of K paths are one tree by position, cut to the depth of the row, so that one sweep down it yields the tokens of all. A drafter of
most probable trees grows as many nodes to the same depth, and is weighed as if they were paths.
e_d: draws that one of the K paths is worth: 1 + PARTING log2 K where they part, 1 + BELOW log2 K below, where mostly one path is left.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from polydraft import tree
from polydraft.core import Budget, Draft, Method, Outcome, SiblingLaw
from polydraft.plan.acceptance import STRENGTH, Record, count, rates
from polydraft.verifiers import pairing

__all__ = ["NOTHING", "Decided", "Options", "Paths", "expected_tokens", "most_paths", "paths"]

PARTING, BELOW = 0.53, 0.08
"""A fit to the block efficiency of greedy traversal on the embedded pair (K = 1 to 4, depths 1 to 8, three temperatures; within 5%)."""
TRIED = (1, 1), (1, 4), (2, 4)
"""Width and depth of sizes that are tried now and then, whatever is thought of them: a plan that met dear drafts at first finds out that they no longer are."""


class Options(NamedTuple):
    """Sizes on a grid, the deepest of row d being of depth d + 1: [D, F], of several sequences [B, D, F].

    tokens: expected of a call, 0 where there is no such size.  nodes, passes: expected of the draft.  branching: 1 where it parts.
    """

    tokens: np.ndarray
    nodes: np.ndarray
    passes: np.ndarray
    branching: np.ndarray


class Decided(NamedTuple):
    """What became of a sequence's draft. parents: of its nodes.  path: nodes that were kept."""

    budget: Budget
    parents: Sequence[int]
    path: Sequence[int]

    @classmethod
    def of(cls, budget: Budget, draft: Draft, outcome: Outcome, b: int) -> "Decided":
        """Row b of a round."""
        return cls(budget, draft.tree.lists[1][b], outcome.lists[0][b])

    @property
    def had(self) -> bool:
        """Whether there was a draft."""
        return len(self.parents) > 1 and self.parents[1] == 0

    @property
    def depths(self) -> list[int]:
        """Of its nodes, without padding; of a root alone [0]."""
        found = [0]
        for parent in self.parents[1:]:
            if parent < 0:
                break
            found.append(found[parent] + 1)
        return found


NOTHING = Budget.fixed((-1,))


@lru_cache
def paths(width: int, depth: int, *, grown: bool = False) -> Budget:
    """The budget of so many paths, or of a most probable tree of as many nodes."""
    return Budget.grown(width * depth, depth, width) if grown else Budget.fixed(tree.paths(width, depth))


def most_paths(drafter: Method, verifier: Method, most: int) -> int:
    """Paths that the drafter draws and the rule is exact for; of drafts without a law one, as a second has no acceptance to plan with.

    Example:
        >>> from polydraft import registry
        >>> drafter = registry.drafter("model").methods[0]
        >>> [most_paths(drafter, registry.verifier(rule).info, 4) for rule in ("greedy_traversal", "block")]
        [4, 1]
    """
    if drafter.ranked:
        return most
    if drafter.laws == {SiblingLaw.POINT_MASS} or not pairing.allowed([paths(2, 1)], drafter, verifier):
        return 1
    return most


@njit(cache=True)
def _tokens(found: np.ndarray, tries: np.ndarray) -> np.ndarray:
    tokens = np.empty(tries.shape)
    for f in range(tries.shape[1]):
        reached, total = 1.0, 1.0
        for d in range(tries.shape[0]):
            reached *= 1.0 - max(1.0 - found[min(d, len(found) - 1)], 1e-12) ** tries[d, f]
            total += reached
            tokens[d, f] = total
    return tokens


@njit(cache=True)
def _expected(kept: np.ndarray, seen: np.ndarray, prior: np.ndarray, first: float, full: float, tries: np.ndarray) -> np.ndarray:
    return _tokens(rates(kept, seen, prior, first, full), tries)


def expected_tokens(found: np.ndarray, width: int, depth: int) -> float:
    """Tokens per call of so many paths. found: acceptance of one draft by depth, [DEPTHS].

    Example:
        >>> round(expected_tokens(np.full(12, 0.5), 1, 4), 4)
        1.9375
    """
    return float(_tokens(found, Paths(depth, width).tries)[-1, -1]) if depth else 1.0


class Paths:
    """The grid of up to `max_width` paths down to `max_depth`; column f has f + 1 of them. grown: most probable trees of as many nodes.

    Example:
        >>> Paths(4, 2).budget((2, 1)).max_nodes
        6
    """

    def __init__(self, max_depth: int, max_width: int, *, grown: bool = False) -> None:
        self._grown = grown
        self.tried = tuple(dict.fromkeys(paths(w, min(d, max_depth), grown=grown) for w, d in TRIED if w <= max_width))
        depths, widths = np.mgrid[1.0 : max_depth + 1, 1.0 : max_width + 1]
        self._nodes, self._passes, self._branching = depths * widths, depths, (widths > 1).astype(float)
        self.tries = 1.0 + np.where(depths == 1, PARTING, BELOW) * np.log2(widths)
        """[D, F]: e of each depth."""
        self._columns = list(np.ascontiguousarray(self.tries.T))

    def options(self, record: Record, prior: np.ndarray, *, greedy: bool) -> Options:
        """What a sequence may expect of every size. At temperature 0 a second path would be a copy."""
        tokens = _expected(record.kept, record.seen, prior, record.strength, STRENGTH, self.tries)
        if greedy and not self._grown:
            tokens[:, 1:] = 0.0
        return Options(tokens, self._nodes, self._passes, self._branching)

    def budget(self, size: tuple[int, int]) -> Budget:
        """Of a size on the grid."""
        return paths(size[1] + 1, size[0] + 1, grown=self._grown)

    def count(self, record: Record, decided: Decided, prior: np.ndarray) -> None:
        """Fold in a round."""
        accepted, end = len(decided.path), decided.path[-1] if decided.path else 0
        tries = self._columns[min(decided.budget.width, len(self._columns)) - 1]
        reached = accepted + (end in decided.parents[end + 1 :])
        count(record, accepted, reached, prior, tries)
