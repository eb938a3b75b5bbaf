"""A tree of deterministic drafts, grown node by node under a budget: what every training-free drafter builds.

Children are merged by token, so that no two nodes spell the same prefix; nothing hangs on an end-of-sequence token.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from polydraft import tree as trees
from polydraft.core import Budget, Draft, SiblingLaw, TreeShape

__all__ = ["GrownTree", "point_mass"]


class GrownTree:
    """Tokens and parents of one draft; `add` refuses what the budget does not hold.

    root: last committed token.  eos: ids that end a path.
    scores: what the source thinks of each node once its parent is accepted, in [0, 1]; only a mixture reads it, no verifier.
    A path is what leads from the root to a leaf: `budget.width` bounds their number, and so the nodes of every depth.

    Example:
        >>> tree = GrownTree(5, Budget(max_nodes=3, max_depth=2, width=2))
        >>> tree.add(0, 7), tree.add(1, 8), tree.add(0, 7), tree.add(2, 9), tree.add(1, 9), tree.add(0, 6)
        (1, 2, 1, -1, 3, -1)
        >>> tree.tokens, tree.parents
        ([5, 7, 8, 9], [-1, 0, 1, 1])
    """

    def __init__(self, root: int, budget: Budget, eos: Collection[int] = ()) -> None:
        self.tokens, self.parents, self.depths, self.scores = [root], [-1], [0], [1.0]
        self._budget, self._eos = budget, eos
        self._child: dict[tuple[int, int], int] = {}
        self._inner: set[int] = set()
        self.num_paths = 0

    @property
    def full(self) -> bool:
        """No further node fits."""
        return len(self.tokens) > self._budget.max_nodes

    def child(self, parent: int, token: int) -> int:
        """The node of this child, or -1."""
        return self._child.get((parent, token), -1)

    def add(self, parent: int, token: int, score: float = 1.0) -> int:
        """The node of this child, new if need be; -1 if it does not fit. score: see the class."""
        node = self._child.get((parent, token))
        if node is not None:
            return node
        opens_path = parent == 0 or parent in self._inner
        if (
            self.full
            or self.depths[parent] >= self._budget.max_depth
            or (opens_path and self.num_paths >= self._budget.width)
            or (parent and self.tokens[parent] in self._eos)
        ):
            return -1
        node = len(self.tokens)
        self.num_paths += opens_path
        self._inner.add(parent)
        self._child[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        return node

    def add_path(self, tokens: Iterable[int], parent: int = 0, score: float = 1.0) -> int:
        """Follow tokens down from `parent`, as far as they fit; returns the last node reached."""
        for token in tokens:
            node = self.add(parent, token, score)
            if node < 0:
                break
            parent = node
        return parent

    def add_ranked(self, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float] | None = None) -> None:
        """Candidates, best first, each after its parent; parents[i] is an earlier candidate, or -1 for the root.

        What hangs on a refused candidate is refused with it.
        """
        nodes: list[int] = []
        for token, parent, score in zip(tokens, parents, [1.0] * len(tokens) if scores is None else scores, strict=True):
            above = 0 if parent < 0 else nodes[parent]
            nodes.append(-1 if above < 0 else self.add(above, token, score))


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q.

    Example:
        >>> point_mass([GrownTree(5, Budget(0, 0))]).law.name
        'POINT_MASS'
    """
    tree = trees.pad([(g.tokens, g.parents) for g in grown])
    return Draft(tree, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full_like(tree.tokens, -1))
