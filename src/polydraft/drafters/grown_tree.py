"""A tree of deterministic drafts, grown node by node under a budget: what every training-free drafter builds.

Children are merged by token, so that no two nodes spell the same prefix; nothing hangs on an end-of-sequence token.
A tree lives in an array, so that a compiled drafter grows it in one call; the methods are for drafters in Python. Between two
passes of a model nothing of all this is in the processor's caches: few different functions a round are worth more than few steps.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int
from numba import njit
from torch import Tensor

from polydraft.core import Budget, Draft, SiblingLaw, TokenTree, TreeShape

__all__ = [
    "PARENT",
    "SCORE",
    "TOKEN",
    "GrownTree",
    "add_node",
    "add_ranked",
    "end_ids",
    "is_full",
    "limits",
    "new_cells",
    "num_paths",
    "plant",
    "point_mass",
    "size_of",
]

_LAW, _SHAPE = SiblingLaw.POINT_MASS, TreeShape.GROWN  # a member of an enumeration is slow to look up
TOKEN, PARENT, DEPTH, INNER, SCORE, ABOUT = range(6)
"""Rows of a tree's cells: a column for each node (the scores are the bits of float64), and what is known of the whole."""
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
    arrays: (cells, eos), for the compiled functions of this module.

    Example:
        >>> tree = GrownTree(5, Budget.grown(3, 2, width=2))
        >>> tree.add(0, 7), tree.add(1, 8), tree.add(0, 7), tree.add(2, 9), tree.add(1, 9), tree.add(0, 6)
        (1, 2, 1, -1, 3, -1)
        >>> tree.tokens, tree.parents
        ([5, 7, 8, 9], [-1, 0, 1, 1])
    """

    def __init__(self, root: int, budget: Budget, eos: Collection[int] | np.ndarray = ()) -> None:
        self.arrays = new_cells(budget), eos if isinstance(eos, np.ndarray) else end_ids(eos)
        self.size = plant(self.arrays, root, *limits(budget))

    @classmethod
    def grown(cls, arrays: tuple[np.ndarray, np.ndarray], size: int) -> "GrownTree":
        """What a compiled drafter has planted and grown to this size."""
        tree = cls.__new__(cls)
        tree.arrays, tree.size = arrays, size
        return tree

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
        return self.arrays[0][SCORE, : self.size].view(np.float64).tolist()

    def child(self, parent: int, token: int) -> int:
        """The node of this child, or -1."""
        return int(_child(self.arrays[0], parent, token))

    def add(self, parent: int, token: int, score: float = 1.0) -> int:
        """The node of this child, new if need be; -1 if it does not fit. score: see the class."""
        node = add_node(self.arrays, parent, token, score)
        self.size = size_of(self.arrays)
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
        self.size = add_ranked(self.arrays, tokens, parents, scores)


def new_cells(budget: Budget) -> np.ndarray:
    """Room for a tree within a budget, still to be planted."""
    return np.empty((6, max(budget.max_nodes, WIDTH) + 1), np.int64)


def limits(budget: Budget) -> tuple[int, int, int]:
    """A budget as `plant` takes it."""
    return budget.max_nodes, budget.max_depth, budget.width


@njit(cache=True)
def plant(tree, root, max_nodes, max_depth, width):
    """Begin a tree in cells that may hold anything; returns its size, which is 1."""
    cells = tree[0]
    about = cells[ABOUT]
    about[NUM], about[PATHS], about[MAX_NODES], about[MAX_DEPTH], about[WIDTH] = 1, 0, max_nodes, max_depth, width
    cells[TOKEN, 0], cells[PARENT, 0], cells[DEPTH, 0], cells[INNER, 0] = root, -1, 0, 0
    cells[SCORE].view(np.float64)[0] = 1.0
    return 1


@njit(cache=True)
def size_of(tree):
    """Nodes of a tree, the root among them."""
    return tree[0][ABOUT, NUM]


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
    cells, eos = tree
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
    cells[SCORE].view(np.float64)[node] = score
    return node


@njit(cache=True)
def add_ranked(tree, tokens, parents, scores):
    """`GrownTree.add_ranked`, for compiled callers; returns the size of the tree."""
    nodes = np.empty(len(tokens), np.int64)
    for i in range(len(tokens)):
        above = 0 if parents[i] < 0 else nodes[parents[i]]
        nodes[i] = -1 if above < 0 else add_node(tree, above, tokens[i], scores[i])
    return tree[0][ABOUT, NUM]


@lru_cache(maxsize=1024)
def _no_rows(B: int, N: int) -> Int[Tensor, "B N"]:
    """The rows of a draft without a q, the same tensor for all drafts of this size."""
    return torch.full((B, N), -1)


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q; the tree of a batch of one is not copied.

    Example:
        >>> point_mass([GrownTree(5, Budget.grown(0, 0))]).law.name
        'POINT_MASS'
    """
    if len(grown) == 1:
        cells, size = grown[0].arrays[0], grown[0].size
        tree = TokenTree.of(cells[TOKEN : TOKEN + 1, :size], cells[PARENT : PARENT + 1, :size])
        return Draft(tree, _LAW, _SHAPE, None, _no_rows(1, size))
    size = max([g.size for g in grown])
    tokens, parents = np.zeros((len(grown), size), np.int64), np.full((len(grown), size), -1)
    for b, g in enumerate(grown):
        tokens[b, : g.size], parents[b, : g.size] = g.arrays[0][TOKEN, : g.size], g.arrays[0][PARENT, : g.size]
    return Draft(TokenTree.of(tokens, parents), _LAW, _SHAPE, None, _no_rows(len(grown), size))
