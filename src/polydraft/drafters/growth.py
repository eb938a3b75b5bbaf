"""A tree of deterministic drafts, grown node by node under a budget: what every training-free drafter builds.

Children are merged by token, so that no two nodes spell the same prefix; nothing hangs on an end-of-sequence token.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from numba import njit

from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape

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
        self.tokens, self.parents, self.scores = [root], [-1], [1.0]
        self._budget, self._eos = budget, eos
        self._child: dict[tuple[int, int], int] = {}
        self._depths, self._inner, self.num_paths = [0], set[int](), 0

    @property
    def full(self) -> bool:
        """No further node fits."""
        return len(self.tokens) > self._budget.max_nodes

    def _catch_up(self) -> None:
        """What `add` needs to know of nodes that came all at once."""
        for n in range(len(self._depths), len(self.tokens)):
            parent = self.parents[n]
            self._child[parent, self.tokens[n]] = n
            self._depths.append(self._depths[parent] + 1)
            self._inner.add(parent)

    def child(self, parent: int, token: int) -> int:
        """The node of this child, or -1."""
        self._catch_up()
        return self._child.get((parent, token), -1)

    def add(self, parent: int, token: int, score: float = 1.0) -> int:
        """The node of this child, new if need be; -1 if it does not fit. score: see the class."""
        if len(self._depths) < len(self.tokens):
            self._catch_up()
        node = self._child.get((parent, token))
        if node is not None:
            return node
        node = len(self.tokens)
        opens_path = parent == 0 or parent in self._inner
        if (
            node > self._budget.max_nodes
            or self._depths[parent] >= self._budget.max_depth
            or (opens_path and self.num_paths >= self._budget.width)
            or (parent and self.tokens[parent] in self._eos)
        ):
            return -1
        self.num_paths += opens_path
        self._inner.add(parent)
        self._child[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
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

    def add_ranked(self, tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray) -> None:
        """Candidates, best first, each after its parent; parents[i] is an earlier candidate, or -1 for the root.

        What hangs on a refused candidate is refused with it.
        """
        if len(self.tokens) == 1:
            budget, eos = self._budget, np.array([*self._eos], np.int64)
            fit, self.num_paths = _fit(tokens, parents, scores, eos, budget.max_nodes, budget.max_depth, budget.width)
            for mine, new in zip((self.tokens, self.parents, self.scores), fit, strict=True):
                mine += new.tolist()
            return
        nodes: list[int] = []
        for token, parent, score in zip(tokens.tolist(), parents.tolist(), scores.tolist(), strict=True):
            above = 0 if parent < 0 else nodes[parent]
            nodes.append(-1 if above < 0 else self.add(above, token, score))


@njit(cache=True)
def _fit(tokens, parents, scores, eos, max_nodes, max_depth, width):
    """What `GrownTree.add` would take of candidates below a bare root, and the number of paths."""
    node, num, paths = np.full(len(tokens), -1, np.int64), 0, 0
    out_token, out_parent, out_score = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64), np.empty(len(tokens))
    depth, inner = np.zeros(len(tokens) + 1, np.int64), np.zeros(len(tokens) + 1, np.bool_)
    for i in range(len(tokens)):
        above = 0 if parents[i] < 0 else node[parents[i]]
        if above < 0:
            continue
        for j in range(above, num):
            if out_parent[j] == above and out_token[j] == tokens[i]:
                node[i] = j + 1
                break
        if node[i] > 0:
            continue
        opens_path = above == 0 or inner[above]
        ended = False
        for t in eos:
            ended |= above > 0 and out_token[above - 1] == t
        if num >= max_nodes or depth[above] >= max_depth or ended or (opens_path and paths >= width):
            continue
        out_token[num], out_parent[num], out_score[num] = tokens[i], above, scores[i]
        num += 1
        paths += opens_path
        inner[above] = True
        depth[num] = depth[above] + 1
        node[i] = num
    return (out_token[:num], out_parent[:num], out_score[:num]), paths


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q.

    Example:
        >>> point_mass([GrownTree(5, Budget(0, 0))]).law.name
        'POINT_MASS'
    """
    size = max(len(g.tokens) for g in grown)
    arrays = np.full((3, len(grown), size), -1)  # tokens, parents, rows
    for b, g in enumerate(grown):
        arrays[0, b] = 0
        arrays[:2, b, : len(g.tokens)] = g.tokens, g.parents
    tokens, parents, rows = torch.from_numpy(arrays).unbind()
    return Draft(TokenTree(tokens, parents), SiblingLaw.POINT_MASS, TreeShape.GROWN, None, rows)
