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
from torch import Tensor

from polydraft.core import Budget, Draft, DraftSampling, TokenTree, TreeShape
from polydraft.numerics.compiled_code import njit

Cells = tuple[np.ndarray, np.ndarray]
"""(cells, end-of-sequence ids): a tree as compiled functions take it."""
_SAMPLING, _SHAPE = DraftSampling.POINT_MASS, TreeShape.GROWN  # a member of an enumeration is slow to look up
TOKEN, PARENT, DEPTH, INNER, SCORE, ABOUT = range(6)
"""Rows of a tree's cells: a column for each node (the scores are the bits of float64), and what is known of the whole."""
NUM, PATHS, MAX_NODES, MAX_DEPTH, WIDTH = range(5)
"""Columns of the row ABOUT. NUM counts the root."""


def end_ids(ids: Collection[int]) -> np.ndarray:
    """End-of-sequence ids as compiled drafters read them."""
    return np.array(sorted(ids), np.int64)


class GrownTree:
    """Tokens and parents of one draft; `add` refuses what the budget does not hold.

    arrays: (cells, eos), for the compiled functions of this module; planted and grown by one of them, or by `rooted` and `add`.
    scores: what the source thinks of each node once its parent is accepted, in [0, 1]; only a mixture reads it, no verifier.
    A path is what leads from the root to a leaf: `budget.width` bounds their number, and so the nodes of every depth.

    Example:
        >>> tree = GrownTree.rooted(5, Budget.grown(3, 2, width=2))
        >>> tree.add(0, 7), tree.add(1, 8), tree.add(0, 7), tree.add(2, 9), tree.add(1, 9), tree.add(0, 6)
        (1, 2, 1, -1, 3, -1)
        >>> tree.tokens, tree.parents
        ([5, 7, 8, 9], [-1, 0, 1, 1])
    """

    def __init__(self, arrays: Cells) -> None:
        self.arrays = arrays

    @classmethod
    def rooted(cls, root: int, budget: Budget, eos: Collection[int] | np.ndarray = ()) -> "GrownTree":
        """A root alone. root: last committed token.  eos: ids that end a path, best given by `end_ids`."""
        arrays = new_cells(budget), eos if isinstance(eos, np.ndarray) else end_ids(eos)
        plant(arrays, root, limits(budget))
        return cls(arrays)

    @property
    def size(self) -> int:
        """Nodes, the root among them."""
        return self.arrays[0].item(ABOUT, NUM)

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
        return int(add_node(self.arrays, parent, token, score))

    def add_path(self, tokens: Iterable[int], parent: int = 0, score: float = 1.0) -> int:
        """Follow tokens down from `parent`, as far as they fit; returns the last node reached."""
        for token in tokens:
            node = self.add(parent, token, score)
            if node < 0:
                break
            parent = node
        return parent


def new_cells(budget: Budget) -> np.ndarray:
    """Room for a tree within a budget, still to be planted."""
    return np.empty((6, max(budget.max_nodes, WIDTH) + 1), np.int64)


def limits(budget: Budget) -> tuple[int, int, int]:
    """A budget as `plant` takes it."""
    return budget.max_nodes, budget.max_depth, budget.width


@njit(cache=True)
def plant(tree, root, limits):
    """Begin a tree in cells that may hold anything. limits: (nodes below the root, depth, paths) at most."""
    cells = tree[0]
    about = cells[ABOUT]
    about[NUM], about[PATHS] = 1, 0
    about[MAX_NODES], about[MAX_DEPTH], about[WIDTH] = limits
    cells[TOKEN, 0], cells[PARENT, 0], cells[DEPTH, 0], cells[INNER, 0] = root, -1, 0, 0
    cells[SCORE].view(np.float64)[0] = 1.0


@njit(cache=True)
def new_trial(tree):
    """Room for another tree within the same budget, still to be planted."""
    return np.empty_like(tree[0]), tree[1]


@njit(cache=True)
def num_nodes(tree):
    """Nodes of a tree, the root among them."""
    return tree[0][ABOUT, NUM]


@njit(cache=True)
def num_paths(tree):
    """Paths of a tree; see `GrownTree`."""
    return tree[0][ABOUT, PATHS]


@njit(cache=True)
def is_full(tree):
    """No further node fits."""
    about = tree[0][ABOUT]
    return about[NUM] > about[MAX_NODES] or about[MAX_DEPTH] == 0


@njit(cache=True)
def _child(cells, parent, token):
    for n in range(parent + 1, cells[ABOUT, NUM]):
        if cells[PARENT, n] == parent and cells[TOKEN, n] == token:
            return n
    return -1


@njit(cache=True)
def _opens_path_beyond_width(cells, parent):
    """Whether a new child of this node were a leaf beyond the paths that there may be."""
    return cells[ABOUT, PATHS] >= cells[ABOUT, WIDTH] and (parent == 0 or cells[INNER, parent] == 1)


@njit(cache=True)
def add_node(tree, parent, token, score):
    """`GrownTree.add`, for compiled callers."""
    cells, eos = tree
    node = _child(cells, parent, token)
    if node >= 0:
        return node
    about = cells[ABOUT]
    node = about[NUM]
    if node > about[MAX_NODES] or cells[DEPTH, parent] >= about[MAX_DEPTH] or _opens_path_beyond_width(cells, parent):
        return -1
    if parent:
        for end in eos:
            if cells[TOKEN, parent] == end:
                return -1
    about[NUM] += 1
    about[PATHS] += parent == 0 or cells[INNER, parent]
    cells[INNER, parent] = 1
    cells[TOKEN, node], cells[PARENT, node], cells[DEPTH, node], cells[INNER, node] = token, parent, cells[DEPTH, parent] + 1, 0
    cells[SCORE].view(np.float64)[node] = score
    return node


@njit(cache=True)
def best_candidate(tree, parents, masses, count):
    """The candidate of the largest mass that does not open a path beyond the width, the first of equals; -1 if there is none.

    parents: the nodes that the first `count` candidates would hang on; -1 for one that cannot be taken yet, or has been tried.
    """
    best = -1
    for i in range(count):
        heavier = parents[i] >= 0 and (best < 0 or masses[i] > masses[best] + 1e-12)
        if heavier and not _opens_path_beyond_width(tree[0], parents[i]):
            best = i
    return best


@njit(cache=True)
def add_best(tree, parents, masses, tokens, scores, count):
    """Add the best candidate that fits; returns (its number, its node), -1 where none fits."""
    while True:
        best = best_candidate(tree, parents, masses, count)
        if best < 0:
            return -1, -1
        node = add_node(tree, parents[best], tokens[best], scores[best])
        parents[best] = -1
        if node >= 0:
            return best, node


@njit(cache=True)
def copy_onto(tree, other):
    """Hang the nodes of another tree on this one's root, as far as they fit; what hangs on a refused node is refused with it."""
    cells = other[0]
    places, scores = np.zeros(num_nodes(other), np.int64), cells[SCORE].view(np.float64)
    for n in range(1, len(places)):
        parent = places[cells[PARENT, n]]
        places[n] = -1 if parent < 0 else add_node(tree, parent, cells[TOKEN, n], scores[n])


@lru_cache(maxsize=1024)
def _no_rows(B: int, N: int) -> Int[Tensor, "B N"]:
    """The rows of a draft without a q, the same tensor for all drafts of this size."""
    return torch.full((B, N), -1)


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q; the tree of a batch of one is not copied.

    Example:
        >>> point_mass([GrownTree.rooted(5, Budget.grown(0, 0))]).sampling.name
        'POINT_MASS'
    """
    if len(grown) == 1:
        cells, size = grown[0].arrays[0], grown[0].size
        tree = TokenTree.of(cells[TOKEN : TOKEN + 1, :size], cells[PARENT : PARENT + 1, :size])
        return Draft(tree, _SAMPLING, _SHAPE, None, _no_rows(1, size))
    sizes = [g.size for g in grown]
    tokens, parents = np.zeros((len(grown), max(sizes)), np.int64), np.full((len(grown), max(sizes)), -1)
    for b, (g, size) in enumerate(zip(grown, sizes, strict=True)):
        tokens[b, :size], parents[b, :size] = g.arrays[0][TOKEN, :size], g.arrays[0][PARENT, :size]
    return Draft(TokenTree.of(tokens, parents), _SAMPLING, _SHAPE, None, _no_rows(*tokens.shape))
