"""The sizes that a plan weighs: chains, K paths, and a trunk and then K paths, down to any depth.

    1 - r_d = (1 - a_d)^e_d,   tokens of a size = 1 + r_0 + r_0 r_1 + ... down to its depth

The sizes of a column are one tree by position, cut to the depth of the row, so that one sweep down the master tree of all columns
yields the tokens of all sizes. e_d: draws that one of the K paths is worth: 1 in a trunk, 1 + PARTING log2 K where the paths part, 1 + BELOW log2 K
below, where mostly one path is left.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from polydraft import tree
from polydraft.core import Budget, Draft, Method, Outcome, SiblingLaw
from polydraft.plan.acceptance import ASSUMED, DECAY, DEPTHS, Record, by_depth, count
from polydraft.verifiers import pairing

__all__ = ["NOTHING", "Decided", "Grid", "Options", "Paths", "columns", "expected_tokens", "pairs", "paths"]

PARTING, BELOW = 0.53, 0.08
"""A fit to the block efficiency of greedy traversal on the embedded pair (K = 1 to 4, depths 1 to 8, three temperatures; within 5%)."""
TRIED = (1, 1), (1, 4), (2, 4)
"""Width and depth of sizes that are tried now and then, whatever is thought of them."""


class Options(NamedTuple):
    """Sizes on a grid, the deepest of row d being of depth d + 1: [D, F], of several sequences [B, D, F].

    tokens: expected of a call, 0 where there is no such size.  nodes, passes: expected of the draft.  branching: 1 where it parts.
    """

    tokens: np.ndarray
    nodes: np.ndarray
    passes: np.ndarray
    branching: np.ndarray

    def scaled(self, share: float) -> "Options":
        """Where there is a draft in only so many of the rounds that ask for one."""
        tokens = np.where(self.tokens > 0, 1.0 + share * (self.tokens - 1.0), 0.0)
        return Options(tokens, share * self.nodes, share * self.passes, share * self.branching)


class Decided(NamedTuple):
    """What became of a sequence's draft. size: row and column of the grid.  parents, scores: of its nodes.  path: nodes that were kept."""

    budget: Budget
    size: tuple[int, int]
    parents: Sequence[int]
    path: Sequence[int]
    scores: Sequence[float]

    @classmethod
    def of(cls, budget: Budget, size: tuple[int, int], draft: Draft, outcome: Outcome, b: int) -> "Decided":
        """Row b of a round."""
        scores = [] if draft.scores is None else draft.scores[b].tolist()
        return cls(budget, size, draft.tree.lists[1][b], outcome.lists[0][b], scores)

    @property
    def had(self) -> bool:
        """Whether there was a draft."""
        return len(self.parents) > 1 and self.parents[1] == 0


class Grid(Protocol):
    """The sizes that a plan weighs, and what it learns of them.

    ranked: whether they are most probable trees.  tried: those that are looked at now and then whatever is thought of them.
    """

    ranked: bool
    tried: tuple[Budget, ...]

    def record(self) -> Record:
        """Of a sequence that has shown nothing yet."""
        ...

    def options(self, record: Record, prior: np.ndarray, *, greedy: bool) -> Options:
        """What a sequence may expect of every size. prior: see `Profile.prior`."""
        ...

    def budget(self, size: tuple[int, int], record: Record, prior: np.ndarray, node_price: float) -> Budget:
        """Of a size on the grid. node_price: tokens that a node has to be worth."""
        ...

    def count(self, record: Record, decided: Decided, prior: np.ndarray, decay: float | None = None) -> None:
        """Fold in a round. decay: what is left of the rounds before, default the grid's own."""
        ...

    def learnt(self, record: Record, prior: np.ndarray, *, greedy: bool) -> dict[str, Any]:
        """What the rounds of all sequences say of a profile whose acceptance was taken to be `prior`."""
        ...


NOTHING = Budget.fixed((-1,))


@lru_cache
def paths(width: int, depth: int, trunk: int = 0) -> Budget:
    """The budget of so many paths behind a trunk."""
    return Budget.fixed(tree.paths(width, depth, trunk))


def columns(drafter: Method, verifier: Method, max_width: int, max_trunk: int) -> list[tuple[int, int]]:
    """(paths, trunk) of all that the drafter draws and the rule is exact for; of drafts without a law one path, as a second has no acceptance to plan with.

    Example:
        >>> from polydraft import registry
        >>> columns(registry.drafter("model").methods[0], registry.verifier("greedy_traversal").info, 2, 1)
        [(1, 0), (2, 0), (2, 1)]
    """
    if drafter.laws == {SiblingLaw.POINT_MASS}:
        max_width = 1
    return [
        each for each in pairs(max_width, max_trunk) if pairing.allowed([paths(each[0], each[1] + 1, each[1])], drafter, verifier)
    ]


def pairs(max_width: int, max_trunk: int) -> list[tuple[int, int]]:
    """(paths, trunk): a chain, and what parts."""
    return [(1, 0), *((w, t) for w in range(2, max_width + 1) for t in range(max_trunk + 1))]


def expected_tokens(rates: np.ndarray, width: int, depth: int, trunk: int = 0) -> float:
    """Tokens per call of so many paths behind a trunk. rates: acceptance of one draft by depth, [DEPTHS].

    Example:
        >>> round(expected_tokens(np.full(DEPTHS, 0.5), 1, 4), 4)
        1.9375
    """
    return float(Paths(depth, [(width, trunk)]).tokens(rates)[-1, 0]) if depth else 1.0


class Paths:
    """The grid of these (paths, trunk), the chain first, down to `max_depth`.

    Example:
        >>> Paths(4, [(1, 0), (2, 0), (2, 1)]).budget((2, 2)).max_nodes
        5
    """

    ranked = False

    def __init__(self, max_depth: int, columns: Sequence[tuple[int, int]]) -> None:
        self.tried = tuple(dict.fromkeys(paths(w, min(d, max_depth)) for w, d in TRIED if (w, 0) in columns))
        self.columns = columns
        widths, trunks = np.array(self.columns).T
        depths = np.arange(1, max_depth + 1)[:, None]
        self._possible = trunks < depths
        self._nodes = depths + (widths - 1) * np.maximum(depths - trunks, 0)
        self._passes, self._branching = np.broadcast_to(depths, self._nodes.shape), np.broadcast_to(widths > 1, self._nodes.shape)
        share = np.where(depths <= trunks, 0.0, np.where(depths == trunks + 1, PARTING, BELOW))
        self.tries = 1.0 + share * np.log2(widths)
        """[D, F]: e of each depth."""
        self._depths = np.minimum(np.arange(max_depth), DEPTHS - 1)

    def record(self) -> Record:
        """Of a sequence that has shown nothing yet."""
        return Record()

    def tokens(self, rates: np.ndarray) -> np.ndarray:
        """[D, F]: expected tokens of a call of every size, 0 where there is none. rates: acceptance of one draft by depth, [DEPTHS]."""
        missed = np.maximum(1.0 - rates[self._depths], 1e-12)[:, None] ** self.tries
        return (1.0 + np.cumsum(np.cumprod(1.0 - missed, 0), 0)) * self._possible

    def options(self, record: Record, prior: np.ndarray, *, greedy: bool) -> Options:
        """What a sequence may expect of every size. At temperature 0 a second path would be a copy: one chain."""
        tokens = self.tokens(by_depth(record, prior))
        if greedy:
            tokens[:, 1:] = 0.0
        return Options(tokens, self._nodes, self._passes, self._branching)

    def budget(
        self, size: tuple[int, int], record: Record | None = None, prior: np.ndarray | None = None, node_price: float = 0.0
    ) -> Budget:
        """Of a size on the grid, whatever a node has to be worth."""
        width, trunk = self.columns[size[1]]
        return paths(width, size[0] + 1, trunk)

    def count(self, record: Record, decided: Decided, prior: np.ndarray, decay: float | None = None) -> None:
        """Fold in a round of this size."""
        column = decided.size[1]
        tries = self.tries[:, column] if column else None
        count(record, decided.parents, decided.path, prior, tries, DECAY if decay is None else decay)

    def learnt(self, record: Record, prior: np.ndarray, *, greedy: bool) -> dict[str, Any]:
        """What the rounds of all sequences say of a profile whose acceptance was taken to be `prior`."""
        return {"greedy" if greedy else "acceptance": tuple(by_depth(Record(record.kept, record.seen), prior, ASSUMED).tolist())}
