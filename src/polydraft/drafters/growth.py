"""A tree of deterministic drafts, grown node by node under a budget: what every training-free drafter builds.

Children are merged by token, so that no two nodes spell the same prefix; nothing hangs on an end-of-sequence token.
A tree lives in arrays, so that a compiled drafter grows it in one call; the methods are for drafters in Python.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from numba import njit

from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape

__all__ = ["PARENT", "TOKEN", "GrownTree", "add_node", "add_ranked", "end_ids", "is_full", "num_paths", "point_mass"]

TOKEN, PARENT, DEPTH, INNER, ABOUT = range(5)
"""Rows of a tree's cells: a column for each node, and what is known of the whole."""
NUM, PATHS, MAX_NODES, MAX_DEPTH, WIDTH = range(5)
"""Columns of the row ABOUT. NUM counts the root."""


def end_ids(ids: Collection[int]) -> np.ndarray:
    """End-of-sequence ids as compiled drafters read them."""
    return np.array(sorted(ids), np.int64)


class GrownTree:
    """Tokens and parents of one draft; `add` refuses what the budget does not hold.

    root: last committed token.  eos: ids that end a path, best given by `end_ids`.
    scores: what the source thinks of each node once its parent is accepted, in [0, 1]; only a mixture reads it, no verifier.
    A path is what leads from the root to a leaf: `budget.width` bounds their number, and so the nodes of every depth.
    arrays: (cells, scores, eos), for the compiled functions of this module.

    Example:
        >>> tree = GrownTree(5, Budget(max_nodes=3, max_depth=2, width=2))
        >>> tree.add(0, 7), tree.add(1, 8), tree.add(0, 7), tree.add(2, 9), tree.add(1, 9), tree.add(0, 6)
        (1, 2, 1, -1, 3, -1)
        >>> tree.tokens, tree.parents
        ([5, 7, 8, 9], [-1, 0, 1, 1])
    """

    def __init__(self, root: int, budget: Budget, eos: Collection[int] | np.ndarray = ()) -> None:
        room = max(budget.max_nodes, WIDTH) + 1
        ends = eos if isinstance(eos, np.ndarray) else end_ids(eos)
        self.arrays = np.empty((5, room), np.int64), np.empty(room), ends
        _plant(*self.arrays[:2], root, budget.max_nodes, budget.max_depth, budget.width)

    @property
    def size(self) -> int:
        """Nodes, the root among them."""
        return int(self.arrays[0][ABOUT, NUM])

    @property
    def num_paths(self) -> int:
        return int(self.arrays[0][ABOUT, PATHS])

    @property
    def full(self) -> bool:
        """No further node fits."""
        return bool(is_full(self.arrays))

    @property
    def tokens(self) -> list[int]:
        return self.arrays[0][TOKEN, : self.size].tolist()

    @property
    def parents(self) -> list[int]:
        return self.arrays[0][PARENT, : self.size].tolist()

    @property
    def scores(self) -> list[float]:
        return self.arrays[1][: self.size].tolist()

    def child(self, parent: int, token: int) -> int:
        """The node of this child, or -1."""
        return int(_child(self.arrays[0], parent, token))

    def add(self, parent: int, token: int, score: float = 1.0) -> int:
        """The node of this child, new if need be; -1 if it does not fit. score: see the class."""
        return int(add_node(self.arrays, parent, token, score))

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
        add_ranked(self.arrays, tokens, parents, scores)


@njit(cache=True)
def _plant(cells, scores, root, max_nodes, max_depth, width):
    about = cells[ABOUT]
    about[NUM], about[PATHS], about[MAX_NODES], about[MAX_DEPTH], about[WIDTH] = 1, 0, max_nodes, max_depth, width
    cells[TOKEN, 0], cells[PARENT, 0], cells[DEPTH, 0], cells[INNER, 0], scores[0] = root, -1, 0, 0, 1.0


@njit(cache=True)
def is_full(tree):
    """No further node fits."""
    return tree[0][ABOUT, NUM] > tree[0][ABOUT, MAX_NODES]


@njit(cache=True)
def num_paths(tree):
    """Paths of a tree, as `GrownTree.num_paths`."""
    return tree[0][ABOUT, PATHS]


@njit(cache=True)
def _child(cells, parent, token):
    for n in range(parent + 1, cells[ABOUT, NUM]):
        if cells[PARENT, n] == parent and cells[TOKEN, n] == token:
            return n
    return -1


@njit(cache=True)
def add_node(tree, parent, token, score):
    """`GrownTree.add`, for compiled callers."""
    cells, scores, eos = tree
    node = _child(cells, parent, token)
    if node >= 0:
        return node
    about = cells[ABOUT]
    node = about[NUM]
    opens_path = parent == 0 or cells[INNER, parent] == 1
    if node > about[MAX_NODES] or cells[DEPTH, parent] >= about[MAX_DEPTH] or (opens_path and about[PATHS] >= about[WIDTH]):
        return -1
    if parent:
        for end in eos:
            if cells[TOKEN, parent] == end:
                return -1
    about[NUM] += 1
    about[PATHS] += opens_path
    cells[INNER, parent] = 1
    cells[TOKEN, node], cells[PARENT, node], cells[DEPTH, node], cells[INNER, node] = token, parent, cells[DEPTH, parent] + 1, 0
    scores[node] = score
    return node


@njit(cache=True)
def add_ranked(tree, tokens, parents, scores):
    """`GrownTree.add_ranked`, for compiled callers."""
    nodes = np.empty(len(tokens), np.int64)
    for i in range(len(tokens)):
        above = 0 if parents[i] < 0 else nodes[parents[i]]
        nodes[i] = -1 if above < 0 else add_node(tree, above, tokens[i], scores[i])


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q.

    Example:
        >>> point_mass([GrownTree(5, Budget(0, 0))]).law.name
        'POINT_MASS'
    """
    sizes = [g.size for g in grown]
    arrays = np.full((3, len(grown), max(sizes)), -1)  # tokens, parents, rows
    for b, (g, size) in enumerate(zip(grown, sizes, strict=True)):
        arrays[:2, b, :size] = g.arrays[0][:2, :size]
        arrays[0, b, size:] = 0
    tokens, parents, rows = torch.from_numpy(arrays).unbind()
    return Draft(TokenTree(tokens, parents), SiblingLaw.POINT_MASS, TreeShape.GROWN, None, rows)
